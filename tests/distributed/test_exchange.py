"""When vectors are exchanged, and one copy of the parameters that all share."""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from tandem.distributed import Exchange, LocalGroup, kernels, local_groups
from tandem.distributed.allreduce import SharedMemoryAllReduce
from tandem.distributed.exchange import ExchangeGradients, ExchangeParameters, ExchangeShared
from tandem.distributed.rank_vector import HostVector
from tests.support.threads import run_threads


def exchange_of(kind: type[Exchange], group: LocalGroup, vectors: list[np.ndarray]) -> Exchange:
    if kind is ExchangeShared:
        return ExchangeShared(group, vectors)
    all_reduce = SharedMemoryAllReduce(group, vectors)
    return kind(all_reduce, HostVector(vectors, group.rank))  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize(
    ("kind", "acts_in"),
    [
        (ExchangeParameters, "after_update"),
        (ExchangeGradients, "before_update"),
        (ExchangeShared, "before_update"),
    ],
)
def test_each_exchange_acts_on_its_side_of_the_update(kind: type[Exchange], acts_in: str) -> None:
    for method in ("before_update", "after_update"):
        vectors = [np.zeros(10), np.ones(10)]
        exchanges = [exchange_of(kind, group, vectors) for group in local_groups(2)]
        run_threads([partial(getattr(e, method), [0.5, 0.5]) for e in exchanges])
        expected = 0.5 if method == acts_in else 0.0
        assert (vectors[0] == expected).all()
        if method == acts_in and kind is not ExchangeShared:
            assert (vectors[1] == expected).all()


@pytest.mark.parametrize("trainers", [2, 3, 4])
def test_each_trainer_averages_its_part_of_shared_gradients(
    trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = [np.zeros(100_000, np.float32) for _ in range(trainers)]
    given: list[Sequence[np.ndarray]] = []
    monkeypatch.setattr(kernels, "average_into_first", lambda parts, shares: given.append(parts))
    exchanges = [ExchangeShared(group, vectors) for group in local_groups(trainers)]
    run_threads([lambda e=e: e.before_update([1 / trainers] * trainers) for e in exchanges])
    assert len(given) == trainers
    for parts in given:
        assert {part.size for part in parts} == {parts[0].size}
        for part in parts:
            part += 1
    assert all((vector == 1).all() for vector in vectors)


def test_nobody_goes_on_before_all_have_updated_what_is_shared() -> None:
    updated: list[int] = []
    seen: list[int] = []

    def update(group: LocalGroup) -> None:
        exchange = ExchangeShared(group, [np.ones(10)] * 3)
        exchange.before_update([1.0, 0.0, 0.0])
        time.sleep(0.1 * group.rank)
        updated.append(group.rank)
        exchange.after_update([1.0, 0.0, 0.0])
        seen.append(len(updated))

    run_threads([lambda group=group: update(group) for group in local_groups(3)])
    assert seen == [3, 3, 3]


def test_trainers_that_are_not_in_step_vote_for_reports_only() -> None:
    exchange = Exchange()
    assert all(exchange.votes_after(step, 10) for step in range(20))
    exchange.is_synchronous = False
    assert [step for step in range(1, 31) if exchange.votes_after(step, 10)] == [10, 20, 30]
