"""Every all-reduce over a `LocalGroup` of threads, and the arithmetic of vectors, against NumPy."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem.distributed import ExchangeSettings, LocalGroup, kernels, local_groups
from tandem.distributed.allreduce import (
    HierarchicalAllReduce,
    SharedMemoryAllReduce,
    add_weighted,
    shard,
    zeros_like,
)
from tandem.distributed.rank_vector import HostVector
from tests.support.threads import run_threads

SIZES = (1, 1000, 163_917)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("collective", "dtype", "tolerance"),
    [
        ("auto", "float32", 1e-6),
        ("auto", "float64", 1e-14),
        ("ar", "float32", 1e-6),
        ("asa", "float32", 1e-6),
        ("asa16", "float32", 2**-9),
        ("hierarchical", "float32", 1e-6),
    ],
)
def test_every_all_reduce_averages_and_leaves_the_same_bits(
    ranks: int, size: int, collective: str, dtype: str, tolerance: float
) -> None:
    rng = np.random.default_rng(ranks)
    shared = [rng.uniform(-1, 1, size).astype(dtype) for _ in range(ranks)]
    counts = rng.integers(1, 10, ranks)
    if ranks > 1:
        counts[-1] = 0
    shares = (counts / counts.sum()).tolist()
    expected = sum(v.astype(float) * s for v, s in zip(shared, shares, strict=True))
    choice = ExchangeSettings.of({"collective": collective}).collective
    if ranks > 1 and collective != "asa16":
        shared[-1].fill(np.nan)  # it is not to be read

    def average(group: LocalGroup) -> None:
        vector = HostVector(shared, group.rank, is_common=False)
        (all_reduce,) = choice.make(vector, [slice(0, size)], group)
        all_reduce.average(vector.own, shares)

    run_threads([lambda group=group: average(group) for group in local_groups(ranks)])
    for vector in shared:
        np.testing.assert_allclose(vector, expected, rtol=tolerance, atol=tolerance)
        assert vector.tobytes() == shared[0].tobytes()


@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", ["average_into_all", "average_into_first"])
def test_every_element_is_averaged_by_one_trainer(
    trainers: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step moves: a trainer is given one part of each vector, of as many as there are."""
    size = 100_000
    vectors = [np.zeros(size, np.float32) for _ in range(trainers)]
    given: list[Sequence[np.ndarray]] = []
    monkeypatch.setattr(kernels, kernel, lambda parts, shares: given.append(parts))
    shares = [1 / trainers] * trainers

    def average(group: LocalGroup) -> None:
        within = SharedMemoryAllReduce(group, vectors)
        if kernel == "average_into_all":
            within.average(vectors[group.rank], shares)
        else:
            within.average_into_first(vectors[group.rank], shares)

    run_threads([lambda group=group: average(group) for group in local_groups(trainers)])
    assert len(given) == (trainers if trainers > 1 else 0)
    for parts in given:
        assert len({part.size for part in parts}) == 1
        assert parts[0].size == pytest.approx(size / trainers, abs=1024)
        for part in parts:
            part += 1
    assert all((vector == (trainers > 1)).all() for vector in vectors)


@pytest.mark.parametrize("size", [1, 1023, 1024, 4096, 100_001])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_cover_the_vector_once(size: int, shards: int) -> None:
    touched = np.zeros(size, int)
    for number in range(shards):
        touched[shard(size, shards, number)] += 1
    assert (touched == 1).all()


class Slow(LocalGroup):
    """A group whose last rank leaves each barrier late."""

    def all_gather_object(self, message: Any) -> tuple[Any, ...]:
        found = super().all_gather_object(message)
        time.sleep(0.05 * (self.rank == self.size - 1))
        return found


def test_ranks_of_a_machine_wait_for_each_other() -> None:
    """Each goes on to its next step at once, and changes its vector."""
    vectors = [np.full(100, float(rank)) for rank in range(3)]
    found: list[list[np.ndarray]] = [[], [], []]

    def rank(group: LocalGroup) -> None:
        slow = Slow(group.rank, group.size, group._links)
        within = SharedMemoryAllReduce(slow, vectors)
        all_reduce, own = HierarchicalAllReduce(within, [range(3)], 0, None), vectors[group.rank]
        for _ in range(3):
            all_reduce.average(own, [0.5, 0.25, 0.25])
            found[group.rank].append(own.copy())
            own += group.rank + 1

    run_threads([lambda group=group: rank(group) for group in local_groups(3)])
    for turn in range(3):
        for mine in found:
            assert (mine[turn] == 0.75 + 1.75 * turn).all()


@pytest.mark.parametrize("kind", [np.array, torch.from_numpy])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("terms", [1, 2, 8, 9, 20])
def test_terms_are_added_one_after_another(
    terms: int, dtype: str, kind: Callable[[np.ndarray], Any]
) -> None:
    rng = np.random.default_rng(terms)
    vectors = rng.normal(size=(terms, 1001)).astype(dtype)
    shares = rng.dirichlet(np.ones(terms))
    shares[terms // 2] *= terms == 1
    expected = np.zeros(1001, dtype)
    for vector, share in zip(vectors, shares, strict=True):
        expected = expected + vector * np.dtype(dtype).type(share)
    vectors[shares == 0] = np.nan
    found = kind(vectors)
    add_weighted(found[0], found, shares.tolist())  # into one of them
    assert np.asarray(found[0]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", [np.array, torch.from_numpy])
def test_no_terms_are_nothing(kind: Callable[[np.ndarray], Any]) -> None:
    target = kind(np.full(3, np.nan))
    add_weighted(target, kind(np.full((2, 3), np.nan)), [0.0, 0.0])
    assert (target == 0).all()


def test_zeros_are_of_a_named_dtype_or_of_a_vectors() -> None:
    for vector, library in ((np.ones(2), np), (torch.ones(2), torch)):
        assert zeros_like(vector, 3, "uint16").dtype == library.uint16
        assert zeros_like(vector, (2, 3)).dtype == vector.dtype
