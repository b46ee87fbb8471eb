"""Measures this machine: its CPU's speeds, its exchange in shared memory, and its loader.

Several trainers of the small networks in `tandem.cost.probes` make a few steps, line by line: one
alone with all cores, and more of them at once with their share of the cores, so that each has as
much of the caches and of the memory's bandwidth as in a run. Compiling takes the most time.
"""

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.config.hardware import available_cores
from tandem.cost.exchange import Layout, fit, load
from tandem.cost.machine import ExchangeRates, Machine
from tandem.distributed import LocalGroup, local_groups
from tandem.processes.spawn import SPAWN
from tandem.processor import describe_processor

if TYPE_CHECKING:
    from tandem.cost.fitting import TimedLine

log = logging.getLogger(__name__)

MOST_TRAINERS = 8  # that are measured at once
SECONDS = 75.0  # within which the last step begins
ROUNDS = 5  # of which the median counts
EXCHANGED = (1 << 14, 1 << 20, 1 << 24)  # elements
_PICTURES, _STORED, _CROP = 128, 256, 227  # of the loader's minibatch; pixels


@dataclass(frozen=True)
class Measured:
    """What a trainer has measured while `trainers` worked at once."""

    trainers: int
    threads: int
    lines: list["TimedLine"]  # of a step of each network
    step: float  # seconds of these steps
    exchange: list[float]  # seconds for each of EXCHANGED


def calibrate(seconds: float = SECONDS, rounds: int = ROUNDS) -> Machine:
    """Measure this machine's CPU, which should be otherwise idle, in about a minute.

    Parameters
    ----------
    seconds : float
        After which no further round of steps begins; each number of trainers has one in any case.
    rounds : int
        In which each network makes a step, of which the median counts.

    Raises
    ------
    RuntimeError
        A process ended too early, for example for lack of memory.
    """
    from tandem.cost.fitting import fit_speed

    cores = len(available_cores())
    layouts = [(trainers, cores // trainers) for trainers in numbers_of_trainers(cores)]
    load_rate = loader_rate()
    found = _measure_trainers(layouts, seconds, rounds)
    speeds = []
    for trainers, threads in layouts:
        parts = [part for rank in found for part in rank if part.trainers == trainers]
        lines = [line for part in parts for line in part.lines]
        speeds.append(fit_speed(lines, sum(part.step for part in parts), trainers, threads))
    return Machine(
        processor=describe_processor(),
        speeds=tuple(speeds),
        load=load_rate,
        exchange=exchange_rates(found[0], cores),
    )


def numbers_of_trainers(cores: int) -> list[int]:
    """Powers of two up to the number of cores, and `MOST_TRAINERS`."""
    most = min(cores, MOST_TRAINERS)
    return [1 << power for power in range(most.bit_length())]


def exchange_rates(found: Sequence[Measured], cores: int) -> ExchangeRates:
    """Fit the model of an exchange in shared memory; without one, nothing is known."""
    loads, measured = [], []
    for part in found:
        layout = Layout(1, part.trainers, cores)
        for elements, seconds in zip(EXCHANGED, part.exchange, strict=bool(part.exchange)):
            loads.append(load("memory", elements, layout))
            measured.append(seconds)
    return ExchangeRates.of(fit(loads, measured)) if loads else ExchangeRates()


def loader_rate(pictures: int = _PICTURES, rounds: int = ROUNDS) -> float:
    """Return the bytes of pixels a second that a loader fills, from files in the page cache."""
    from tandem.cost.noise import noise_builder

    with tempfile.TemporaryDirectory() as folder:
        fill, nbytes = noise_builder(Path(folder), pictures, _STORED, _CROP)
        return nbytes / _median_seconds(fill, rounds)


def _median_seconds(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(1 + rounds):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


# Trainers


def _measure_trainers(
    layouts: Sequence[tuple[int, int]], seconds: float, rounds: int
) -> list[list[Measured]]:
    """Start as many processes as trainers are measured at once; return what each has measured."""
    groups = local_groups(max(trainers for trainers, _ in layouts))
    processes, pipes = [], []
    for group in groups:
        here, there = SPAWN.Pipe()
        arguments = (group, there, layouts, seconds, rounds)
        process = SPAWN.Process(target=_serve, args=arguments, name="trainer", daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    for group in groups:  # whose ends are to be the processes' alone
        group.close()
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise RuntimeError("a process that measured this machine ended too early") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(
    group: LocalGroup,
    pipe: Connection,
    layouts: Sequence[tuple[int, int]],
    seconds: float,
    rounds: int,
) -> None:
    """Measure as one of the processes."""
    deadline = time.monotonic() + seconds
    os.environ["OMP_NUM_THREADS"] = str(layouts[0][1])
    from tandem.backend import keep_freed_memory, set_threads
    from tandem.cost.timed_steps import compiled_probes

    set_threads(layouts[0][1])
    keep_freed_memory()
    probes = compiled_probes()
    found = []
    for number, (trainers, threads) in enumerate(layouts):
        works = group.rank < trainers
        team = group.split(int(works))
        if works:
            left = max(deadline - time.monotonic(), 0) / (len(layouts) - number)
            set_threads(threads)
            lines, step = _measure_steps(team, probes, time.monotonic() + left, rounds)
            found.append(Measured(trainers, threads, lines, step, _measure_exchange(team, rounds)))
        group.barrier()  # the others wait, without computing
    with closing(pipe):
        pipe.send(found)


def _measure_steps(
    team: LocalGroup, probes: Sequence[Any], deadline: float, rounds: int
) -> tuple[list["TimedLine"], float]:
    """Have all make the steps of each network in turn, at the same time."""
    for number in range(1 + rounds):
        for probe in probes:
            team.barrier()
            probe.step(counts=number > 0)
        # One of them decides for all: their clocks may differ by a step.
        if number and team.all_gather_object(time.monotonic() > deadline)[0]:
            break
    lines = [line for probe in probes for line in probe.lines()]
    return lines, sum(probe.seconds() for probe in probes)


def _measure_exchange(team: LocalGroup, rounds: int) -> list[float]:
    """Time the average of vectors of several sizes in shared memory; none by a trainer alone."""
    from tandem.distributed.allreduce import SharedMemoryAllReduce

    if team.size == 1:
        return []
    areas = team.shared_memory(4 * EXCHANGED[-1])
    shares = [1 / team.size] * team.size
    found = []
    for elements in EXCHANGED:
        vectors = [area[: 4 * elements].view(np.float32) for area in areas]
        own, all_reduce = vectors[team.rank], SharedMemoryAllReduce(team, vectors)
        own[...] = team.rank
        found.append(_median_seconds(lambda: all_reduce.average(own, shares), rounds))
    return found
