"""Averaging a vector over ranks of MPI: bytes and seconds of each strategy.

    make bench-ranks                                        all of it, with a model and a picture
    python -m benchmarks.ranks --ranks 2 --parameters 61e6  some of it, JSON lines only

Ranks on this machine and, where the system permits it, on two simulated machines joined by a cable
of 1 Gbit/s (`tests.support.machines`). The strategies of training are timed in turn with MPI's
blocking allreduce, gloo's allreduce, and a message there and back between the first and the last
rank. Each line has the seconds of every round, of the slowest rank. Bytes are what a rank receives
through its group, the mean over ranks, which leaves out what MPI does inside an allreduce; between
machines they are what the first machine sent over the cable.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import parser_of
from benchmarks.published import PARAMETERS
from tandem.config.hardware import available_cores, available_memory
from tandem.cost.exchange import STRATEGIES
from tandem.distributed.mpi import find_mpirun
from tests.support.machines import CABLE, MACHINES, missing_for_two_machines, two_machines

# For the latency, 1 MB, GoogLeNet without auxiliary heads, AlexNet; VGG-16 would take minutes.
CABLE_SIZES = (1_000, 250_000, 6_998_552, PARAMETERS["AlexNet"])  # parameters
SIZES = (*CABLE_SIZES, PARAMETERS["GoogLeNet"], PARAMETERS["VGG-16"])
CABLE_SPEED = 1e9  # bit/s
COPIES = 3.5  # memory that a rank takes, in vectors
PEERS = ("MPI allreduce", "gloo allreduce", "MPI message")
LIMIT = 900  # seconds of a job


@dataclass(frozen=True)
class Job:
    """Measurements of one start of ranks."""

    machines: int
    ranks_each: int
    parameters: tuple[int, ...]  # sizes of the vectors
    rounds: int  # measured ones


@dataclass
class Tally:
    """Bytes received by this rank."""

    received: int = 0


@dataclass
class Counted:
    """A group that counts the bytes it receives.

    What a collective operation of all ranks sends is what it receives, so it is enough to count
    what comes: all parts but this rank's own.
    """

    group: Any
    tally: Tally = field(default_factory=Tally)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    @property
    def local(self) -> "Counted":
        return Counted(self.group.local, self.tally)

    def split(self, color: int) -> "Counted":
        return Counted(self.group.split(color), self.tally)

    def all_to_all(self, vector: np.ndarray, received: np.ndarray, parts: Sequence[slice]) -> None:
        self.tally.received += received.nbytes - received[self.rank].nbytes
        self.group.all_to_all(vector, received, parts)

    def all_gather(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        self.tally.received += vector.nbytes - vector[parts[self.rank]].nbytes
        self.group.all_gather(vector, parts)


@dataclass(frozen=True)
class Contender:
    """A timed step: an all-reduce, or one of `PEERS`."""

    name: str
    step: Callable[[], None]  # all ranks call it together
    tally: Tally | None = None  # of bytes received, if they can be counted


# As a rank


def serve(job: Job) -> None:
    """Measure, as one of the ranks; rank 0 prints JSON lines."""
    import torch

    from tandem.distributed.mpi import join

    world = join()
    cores = len(available_cores())
    torch.set_num_threads(max(1, cores // world.size))
    _join_gloo(world)
    for parameters in job.parameters:
        vector, contenders = make_contenders(world, parameters)
        for line in _time(world, vector, contenders, job.rounds):
            if world.rank == 0:
                layout = {"machines": job.machines, "ranks_each": job.ranks_each}
                layout["cores_each"] = cores / job.machines
                print(json.dumps(layout | {"parameters": parameters} | line), flush=True)
    world.barrier()


def make_contenders(world: Any, parameters: int) -> tuple[np.ndarray, list[Contender]]:
    """The vector of this rank, and all ways to average it with the others'."""
    from tandem.distributed import ExchangeSettings
    from tandem.distributed.exchange import ExchangeGradients
    from tandem.distributed.rank_vector import HostVector

    shares, contenders = [1 / world.size] * world.size, []
    # The hierarchical one needs vectors that others see, which are good for all of them.
    shared = [part.view(np.float32) for part in world.local.shared_memory(4 * parameters)]
    vector = HostVector(shared, world.local.rank, is_common=False)
    own = vector.own
    for name in ("hierarchical", *(s for s in STRATEGIES if s != "hierarchical")):
        counted: Any = Counted(world)
        choice = ExchangeSettings.of({"collective": name}).collective
        (all_reduce,) = choice.make(vector, [slice(0, parameters)], counted)
        exchange = ExchangeGradients(all_reduce, vector)

        def step(exchange: Any = exchange) -> None:
            exchange.before_update(shares)

        contenders.append(Contender(name, step, None if name == "ar" else counted.tally))
    return own, contenders + _peers(world, own)


def _peers(world: Any, vector: np.ndarray) -> list[Contender]:
    import torch.distributed
    from mpi4py import MPI

    tensor, last = torch.from_numpy(vector), world.size - 1

    def message() -> None:
        """Send there and back; half of the time counts."""
        if world.rank == 0:
            MPI.COMM_WORLD.Send(vector, last)
            MPI.COMM_WORLD.Recv(vector, last)
        elif world.rank == last:
            MPI.COMM_WORLD.Recv(vector, 0)
            MPI.COMM_WORLD.Send(vector, 0)

    reduce = (
        lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, vector),
        lambda: torch.distributed.all_reduce(tensor),
        message,
    )
    return [Contender(name, step) for name, step in zip(PEERS, reduce, strict=True)]


def _join_gloo(world: Any) -> None:
    import torch.distributed

    # The address of rank 0: the cable, or this machine.
    address = os.environ.get("TANDEM_BENCHMARK_ADDRESS", "127.0.0.1")
    port = world.all_gather_object(_free_port())[0]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=world.rank, world_size=world.size
    )


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _time(
    world: Any, vector: np.ndarray, contenders: Sequence[Contender], rounds: int
) -> Iterator[dict[str, Any]]:
    """Time contenders in turn, after a round that counts only for its bytes."""
    found: dict[str, list[float]] = {each.name: [] for each in contenders}
    received: dict[str, float | None] = {}
    cable: dict[str, float] = {}
    for number in range(1 + rounds):
        for each in contenders:
            vector.fill(world.rank + 1)
            world.barrier()
            sent, begun = _sent_by_cable(), time.perf_counter()
            each.step()
            took = max(world.all_gather_object(time.perf_counter() - begun))
            if number > 0:
                found[each.name].append(took / 2 if each.name == "MPI message" else took)
                continue
            cable[each.name] = _sent_by_cable() - sent
            received[each.name] = _mean(world.all_gather_object(each.tally and each.tally.received))
    for each in contenders:
        yield {
            "name": each.name,
            "seconds": [float(f"{value:.4g}") for value in found[each.name]],
            "bytes_received": received[each.name],
            "bytes_by_cable": cable[each.name] if Path(_COUNTER).exists() else None,
        }


_COUNTER = f"/sys/class/net/{CABLE}/statistics/tx_bytes"


def _sent_by_cable() -> int:
    try:
        return int(Path(_COUNTER).read_text())
    except OSError:
        return 0


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# As the process that starts ranks


def run(job: Job) -> Iterator[dict[str, Any]]:
    """Start ranks; yield their measurements. Raises as `start`."""
    sizes = [str(size) for size in job.parameters]
    layout = ["--as-rank", str(job.machines), str(job.ranks_each), "--parameters", *sizes]
    program = ["benchmarks.ranks", "--rounds", str(job.rounds), *layout]
    yield from start(job.machines, job.ranks_each, program)


def start(count: int, ranks_each: int, program: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Start a module as ranks; yield the JSON lines that they print.

    Raises SystemExit if they failed; their own message is on the terminal.
    """
    starter = find_mpirun() or "mpirun"
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hides warnings about host names
    with ExitStack() as stack:
        if count == 1:
            command = [starter, "-n", str(ranks_each)]
        else:
            pair = stack.enter_context(two_machines())
            pair.limit(CABLE_SPEED)
            command = pair.mpirun(starter, ranks_each)
            environment["GLOO_SOCKET_IFNAME"] = CABLE
            environment["TANDEM_BENCHMARK_ADDRESS"] = pair.addresses[0]
        command += [sys.executable, "-m", *program]
        result = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, env=environment
        )
    if result.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {result.returncode}")
    yield from (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))


def jobs(ranks: Sequence[int], parameters: Sequence[int], rounds: int) -> Iterator[Job]:
    """Yield the jobs: on one machine, then on two if they can be simulated."""
    for number in ranks:
        fits = tuple(size for size in parameters if number * size * 4 * COPIES < available_memory())
        for size in set(parameters) - set(fits):
            sys.stderr.write(
                f"left out: {size:,} parameters at {number} ranks: too little memory\n"
            )
        yield Job(1, number, fits, rounds)
    if reason := missing_for_two_machines():
        sys.stderr.write(f"left out: two machines: {reason}\n")
        return
    for number in ranks:
        if number % MACHINES == 0:
            sizes = tuple(size for size in parameters if size in CABLE_SIZES)
            yield Job(MACHINES, number // MACHINES, sizes, rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print JSON lines; return the exit status."""
    parser = parser_of(__doc__, prog="python -m benchmarks.ranks")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4], help="in all")
    parser.add_argument("--parameters", nargs="+", type=float, default=sorted(SIZES))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--as-rank", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    parameters = tuple(int(size) for size in options.parameters)
    if options.as_rank:
        serve(Job(*options.as_rank, parameters, options.rounds))
        return 0
    for job in jobs(options.ranks, parameters, options.rounds):
        sys.stderr.write(f"{job.machines} machine(s) of {job.ranks_each} rank(s) ...\n")
        for line in run(job):
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
