"""Tests of a pool, on one of ranks: mpirun -n 2 python -m tests.support.rank_pool 0 NPZ TESTS...

The number is the master's, who executes pytest; the other ranks compute what the tests ask for. The
results of `parallel_work` are written into a file, unless it is "-".
"""

import sys

import numpy as np
import pytest

from tandem.parallel import Pool
from tests.support import parallel_work

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


def main() -> int:
    master, file, *arguments = sys.argv[1:]
    with Pool(use_gpu=False, threads=1, master_rank=int(master)) as pool:
        if file != "-":
            np.savez(file, **parallel_work.compute(pool), **parallel_work.exchange(pool))
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
        return int(pytest.main([*options, *arguments], plugins=[RankPool(pool)]))


if __name__ == "__main__":
    raise SystemExit(main())
