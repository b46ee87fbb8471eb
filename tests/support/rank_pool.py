"""Tests of a pool, on one of ranks: mpirun -n 2 python -m tests.support.rank_pool 0 NPZ [TESTS]

The number is the master's, who executes pytest; the other ranks compute what the tests ask for. The
results of `parallel_work` are written into a file, unless it is "-"; of simulated GPUs, if its name
ends in "gpus.npz", and of ranks that do not open each other's memory, if in "apart.npz".
"""

import contextlib
import sys

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.parallel import Pool
from tests.support import parallel_work
from tests.support.simulated_pool import simulated_gpus

NAMES = {(2, 0): "two", (3, 1): "three"}  # of the fixtures, by ranks and the master


class RankPool:
    """Gives the pool to the tests that take one of its size; others are not executed."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.name = pool, NAMES[pool.ranks, pool.master_rank]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._takes(item)]

    def _takes(self, item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        given = callspec.params.get("pool") if callspec else None
        names = set(getattr(item, "fixturenames", ())) & {"one", "simulated", *NAMES.values()}
        return (names | {given}) - {None} == {self.name}


def refuse(path: str, name: str) -> HostBuffer:
    raise InputError(f"{name} is not opened")


def main() -> int:
    master, file, *arguments = sys.argv[1:]
    on_gpus = file.endswith("gpus.npz")
    context = simulated_gpus(2) if on_gpus else contextlib.nullcontext()
    if file.endswith("apart.npz"):
        HostBuffer.open = refuse  # type: ignore[assignment, method-assign]
    with context, Pool(use_gpu=on_gpus, threads=1, master_rank=int(master)) as pool:
        print("memory:", type(pool.rank.residents).__name__)
        if file != "-":
            np.savez(file, **parallel_work.compute(pool), **parallel_work.exchange(pool))
        if not arguments:
            return 0
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
        return int(pytest.main([*options, *arguments], plugins=[RankPool(pool)]))


if __name__ == "__main__":
    raise SystemExit(main())
