"""An empty call over ranks beside mpi4py's scatter and gather of the same objects.

    mpirun -n 2 python -m benchmarks.parallel_ranks

Both in the same processes, one after the other, since the other ranks end with the pool.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tandem.parallel as synk
from tandem.parallel.messages import Answer, Call

ROUNDS, CALLS = 300, 10


def microseconds(call: Callable[[], Any]) -> list[float]:
    """Time rounds of calls; the mean of each round."""
    found = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - began) / CALLS * 1e6)
    return found[1:]


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    messages = [(Call(0, (), (), None, None, 1, (0,)), [])] * world.size if not world.rank else None
    answer = Answer((np.float32(1)[...],), {}, 1e-6, 1e-6)

    def both() -> None:
        world.scatter(messages)
        world.gather(answer)

    theirs = microseconds(both)
    synk.fork(use_gpu=False, threads=1)
    empty = synk.function([], (synk.shared(np.float32(1), "one"), "sum"))
    ours = microseconds(empty)
    for name, found in (("mpi4py's scatter and gather", theirs), ("empty call", ours)):
        print(f"{name}: least {min(found):.1f}, median {statistics.median(found):.1f} microseconds")
    print(f"ratio: {min(ours) / min(theirs):.2f}, {np.median(ours) / np.median(theirs):.2f}")


if __name__ == "__main__":
    main()
