"""Measures this machine: the speeds of its CPU, its exchange in shared memory, and its loader.

Trainers of the small networks in `tandem.cost.probes` make a few steps, of which every line is
timed: one trainer with all cores, then several at once with their share of the cores, so that each
has as much of the caches and of the memory's bandwidth as in a run. The processes start and compile
once, which takes a third of the time.
"""

import contextlib
import logging
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.config.hardware import available_cores, available_memory
from tandem.cost.exchange import Layout, fit, load
from tandem.cost.fitting import TimedSteps, fit_speed
from tandem.cost.loading import noise_loader
from tandem.cost.machine import ExchangeRates, Machine, Speed
from tandem.distributed import LocalGroup, local_groups
from tandem.errors import InputError
from tandem.processes.spawn import SPAWN
from tandem.processor import describe_processor, set_openmp
from tandem.validation import shown_size

if TYPE_CHECKING:
    from tandem.cost.timed_steps import TimedNetwork

log = logging.getLogger(__name__)

MOST_TRAINERS = 8  # that are measured at once
NBYTES = 3 << 30  # of memory that each of them has
SECONDS = 75.0
ROUNDS = 5
EXCHANGED = (1 << 14, 1 << 20, 1 << 24)  # elements of vectors that are averaged
PICTURES, STORED, CROP = 128, 256, 227  # of a loader's minibatch; pixels
_BUSY = 1.3  # a step takes so much longer than another: something else was computing


@dataclass(frozen=True)
class Division:
    """A division of a machine's cores among trainers."""

    trainers: int
    threads: int  # of each


@dataclass(frozen=True)
class Measured:
    """The measurements of one trainer."""

    division: Division
    networks: list[TimedSteps]
    averages: list[float]  # seconds for each of EXCHANGED; none without other trainers


def calibrate(seconds: float = SECONDS, rounds: int = ROUNDS) -> Machine:
    """Measure this machine's CPU, which should be otherwise idle, in less than two minutes.

    Parameters
    ----------
    seconds : float
        After which no further round begins; each division of the cores has one in any case.
    rounds : int
        In each of which every network makes a step; the faster half of them counts.

    Raises
    ------
    InputError
        A process ended too early, for example for lack of memory.
    """
    cores = len(available_cores())
    log.info("measuring %d cores with small networks, in one to two minutes", cores)
    load_rate = loader_rate(PICTURES, rounds)
    found = _measure(divisions(cores, available_memory()), seconds, rounds)
    _warn_if_busy([part for rank in found for part in rank])
    return Machine(
        processor=describe_processor(),
        speeds=tuple(speed(parts) for parts in zip(*found, strict=True)),
        load=load_rate,
        exchange=exchange_rates(found[0], cores),
    )


def divisions(cores: int, memory: float) -> list[Division]:
    """Numbers of trainers that are powers of two, for as many as there are cores at most.

    `memory`, in bytes, limits them too.
    """
    most = max(1, min(cores, MOST_TRAINERS, int(min(memory / NBYTES, MOST_TRAINERS))))
    return [Division(1 << power, cores >> power) for power in range(most.bit_length())]


def speed(parts: Sequence[Measured]) -> Speed:
    """Fit the speed of one trainer to what several have measured at the same time.

    Those that did not take part have empty lists.
    """
    division, found = parts[0].division, [timed for part in parts for timed in part.networks]
    lines = [line for timed in found for line in timed.lines]
    steps = sum(timed.step for timed in found)
    return fit_speed(lines, steps, division.trainers, division.threads)


def exchange_rates(found: Sequence[Measured], cores: int) -> ExchangeRates:
    """Fit the model of an exchange in shared memory; one core alone exchanges nothing."""
    pairs = [
        (load("memory", elements, Layout(1, part.division.trainers, cores)), seconds)
        for part in found
        if part.averages
        for elements, seconds in zip(EXCHANGED, part.averages, strict=True)
    ]
    if not pairs:
        return ExchangeRates()
    loads, measured = zip(*pairs, strict=True)
    return ExchangeRates.of(fit(loads, measured))


def loader_rate(pictures: int, rounds: int) -> float:
    """Return the bytes of pixels a second that a loader fills, from files in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        fill, nbytes = noise_loader(Path(folder), pictures, STORED, CROP)
        return nbytes / _median_seconds(fill, rounds)


def _median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Time a call, after one that does not count."""
    times = []
    for _ in range(1 + rounds):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def _warn_if_busy(parts: Sequence[Measured]) -> None:
    worst = max(timed.slowest / timed.step for part in parts for timed in part.networks)
    if worst > _BUSY:
        log.warning(
            "a step took %.1f times as long as the same one at other times: was something else "
            "computing? Rates are more accurate on a machine that is otherwise idle",
            worst,
        )


# The trainers


def _measure(planned: Sequence[Division], seconds: float, rounds: int) -> list[list[Measured]]:
    """Start as many processes as there are trainers at most; return what each has measured."""
    groups = local_groups(max(division.trainers for division in planned))
    processes, pipes = [], []
    for group in groups:
        here, there = SPAWN.Pipe()
        arguments = (group, there, planned, seconds, rounds)
        name = f"trainer {group.rank}"
        processes.append(SPAWN.Process(target=_work, args=arguments, name=name, daemon=True))
        processes[-1].start()
        pipes.append(here)
        there.close()
        group.close()  # its ends are the process's alone
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise InputError(
            f"a process that measured this machine ended early; expected {len(pipes)} of them, "
            f"with up to {shown_size(NBYTES)} of memory each"
        ) from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(
    group: LocalGroup,
    pipe: Connection,
    planned: Sequence[Division],
    seconds: float,
    rounds: int,
) -> None:
    """Measure as one of the trainers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    deadline = time.monotonic() + seconds
    set_openmp(planned[-1].threads)  # while all of them compile
    from tandem.backend import keep_freed_memory, set_threads
    from tandem.cost.timed_steps import compiled_probes

    keep_freed_memory()
    networks = compiled_probes()
    found = []
    for number, division in enumerate(planned):
        takes_part = group.rank < division.trainers
        team = group.split(int(takes_part))
        measured = Measured(division, [], [])
        if takes_part:
            left = max(deadline - time.monotonic(), 0) / (len(planned) - number)
            set_threads(division.threads)
            make_steps(team, networks, time.monotonic() + left, rounds)
            timed = [network.take() for network in networks]
            measured = Measured(division, timed, _averages(team, rounds))
        found.append(measured)
        group.barrier()  # the others wait there, and compute nothing
    with contextlib.closing(pipe):
        pipe.send(found)


def make_steps(
    team: LocalGroup, networks: Sequence["TimedNetwork"], deadline: float, rounds: int
) -> None:
    """Have all trainers make steps of each network in turn, at the same time.

    The first round does not count. The first trainer's clock decides which is the last.
    """
    for number in range(1 + rounds):
        for network in networks:
            team.barrier()
            network.step(counts=number > 0)
        if number and team.all_gather_object(time.monotonic() > deadline)[0]:
            return


def _averages(team: LocalGroup, rounds: int) -> list[float]:
    """Time the averages of vectors in shared memory."""
    from tandem.distributed.allreduce import SharedMemoryAllReduce

    if team.size == 1:
        return []
    areas = team.shared_memory(4 * max(EXCHANGED))
    shares = [1 / team.size] * team.size

    def seconds(elements: int) -> float:
        vectors = [area[: 4 * elements].view(np.float32) for area in areas]
        vectors[team.rank][...] = team.rank
        all_reduce = SharedMemoryAllReduce(team, vectors)
        return _median_seconds(lambda: all_reduce.average(vectors[team.rank], shares), rounds)

    return [seconds(elements) for elements in EXCHANGED]
