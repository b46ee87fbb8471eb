"""Weighted sums of many vectors, as they are added after they have been received."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tandem.distributed import LocalGroup, local_groups
from tandem.distributed.allreduce import HierarchicalAllReduce, SharedWithin, add_weighted


@pytest.mark.parametrize("terms", [1, 2, 8, 9, 20])
def test_terms_are_added_one_after_another(terms: int) -> None:
    rng = np.random.default_rng(terms)
    vectors = rng.normal(size=(terms, 1001)).astype(np.float32)
    shares = rng.dirichlet(np.ones(terms))
    shares[terms // 2] *= terms == 1
    expected = np.zeros(1001, np.float32)
    for vector, share in zip(vectors, shares, strict=True):
        expected = expected + vector * np.float32(share)
    vectors[shares == 0] = np.nan
    add_weighted(vectors[0], vectors, shares.tolist())  # into one of them
    assert vectors[0].tobytes() == expected.tobytes()


def test_no_terms_are_nothing() -> None:
    target = np.full(3, np.nan)
    add_weighted(target, np.full((2, 3), np.nan), [0.0, 0.0])
    assert (target == 0).all()


class Slow:
    """A place at a group, which the last rank leaves late."""

    def __init__(self, place: LocalGroup, size: int) -> None:
        self.rank, self.size, self._place = place.rank, size, place

    def all_gather_object(self, message: Any) -> Sequence[Any]:
        found = self._place.all_gather_object(message)
        time.sleep(0.05 * (self.rank == self.size - 1))
        return found


def test_neighbours_wait_for_each_other() -> None:
    """Each goes on to its next step at once, and changes its vector."""
    vectors = [np.full(100, float(rank)) for rank in range(3)]
    found: list[list[np.ndarray]] = [[], [], []]

    def rank(place: LocalGroup) -> None:
        local: Any = Slow(place, 3)
        collective, own = (
            HierarchicalAllReduce(SharedWithin(local, vectors), [range(3)], 0, None),
            None,
        )
        for _ in range(3):
            collective.average(own, [0.5, 0.25, 0.25])
            found[place.rank].append(vectors[place.rank].copy())
            vectors[place.rank][:] += place.rank + 1

    threads = [threading.Thread(target=rank, args=(place,)) for place in local_groups(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for turn in range(3):
        for mine in found:
            assert (mine[turn] == 0.75 + 1.75 * turn).all()
