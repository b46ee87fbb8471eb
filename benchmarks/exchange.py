"""What does an exchange cost, against copying the weights once?

    python -m benchmarks.exchange

Trainers are processes with 61 million weights and as many momenta each, float32 (488 MB), in shared
host memory. When two exchange, each reads half of both vectors and writes half of both: as many
bytes as when both copy their vectors at the same time. "One copy" is ``vector.copy()`` in one
process, which includes the allocation of pages; a copy into allocated memory is faster and is
reported too.
"""

from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.measure import Comparison, Measured, compare, measure, run
from benchmarks.published import PARAMETERS
from benchmarks.team import Team, serve
from tandem.distributed import LocalGroup
from tandem.distributed.allreduce import SharedMemoryAllReduce, shard
from tandem.distributed.exchange import ExchangeShared
from tandem.memory import HostBuffer


def answer(
    rounds: int, parameters: int = PARAMETERS["AlexNet"], most: int = 4
) -> Iterator[Comparison]:
    """Compare exchanges of two trainers with copies; then those of 1 to `most` trainers."""
    vector, target = np.ones((2, 2 * parameters), np.float32)
    copies = {
        "one copy": vector.copy,
        "one copy into allocated memory": lambda: np.copyto(target, vector),
    }
    yield from _two_trainers(rounds, parameters, copies)
    for trainers in range(1, most + 1):
        with trainers_team(trainers, parameters) as team:
            found = measure({"average": lambda: team.do("average"), **copies}, rounds)
        exchange, copy, _ = found
        question = "exchange over the number of trainers"
        name = f"{trainers} trainer{'s' * (trainers > 1)}"
        yield compare(question, Measured(name, exchange.seconds), copy, "time")


def _two_trainers(rounds: int, parameters: int, copies: dict) -> Iterator[Comparison]:
    tasks = ("average", "gradients", "shared", "plain NumPy", "both copy at once")
    with trainers_team(2, parameters) as team:
        steps = {task: lambda task=task: team.do(task) for task in tasks}
        found = {m.name: m for m in measure({**steps, **copies}, rounds)}
    question = f"exchange of two trainers, {parameters / 1e6:.0f} M weights and momenta"
    copy, quick, both = (found[name] for name in (*copies, "both copy at once"))
    yield compare(question, found["average"], copy, "time", target=0.6)
    yield compare(question, found["average"], quick, "time")
    yield compare(question, found["average"], both, "time")
    for name in ("gradients", "shared", "plain NumPy"):
        yield compare(question, found[name], copy, "time")


def trainers_team(trainers: int, parameters: int) -> Team:
    """Trainers that do nothing but exchange."""
    buffers = tuple(HostBuffer.create(8 * parameters) for _ in range(trainers))
    return Team.of_group(exchange_alone, trainers, buffers, parameters)


def exchange_alone(
    group: LocalGroup, buffers: tuple[HostBuffer, ...], parameters: int, pipe: Connection
) -> None:
    """Return what one trainer's process does."""
    vectors = [buffer.array((2 * parameters,), np.float32) for buffer in buffers]
    gradients = [vector[:parameters] for vector in vectors]
    own = vectors[group.rank]
    own[:] = group.rank
    copy = HostBuffer.create(own.nbytes).array(own.shape, own.dtype)
    copy[:] = 0
    shares = [1 / len(vectors)] * len(vectors)
    parts = [vector[shard(vector.size, len(vectors), group.rank)] for vector in vectors]

    def plain() -> None:
        group.barrier()
        mean = sum(parts[1:], parts[0]) / len(parts)
        for part in parts:
            part[:] = mean
        group.barrier()

    average = SharedMemoryAllReduce(group, vectors)
    average_gradients = SharedMemoryAllReduce(group, gradients)
    shared = ExchangeShared(group, gradients)

    def share() -> None:
        shared.before_update(shares)
        shared.after_update(shares)

    tasks = {
        "average": lambda: average.average(own, shares),
        "gradients": lambda: average_gradients.average(own[:parameters], shares),
        "shared": share,
        "plain NumPy": plain,
        "both copy at once": lambda: np.copyto(copy, own),
        "sum": lambda: float(own.sum(dtype=float)),
    }
    serve(pipe, tasks)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=15))
