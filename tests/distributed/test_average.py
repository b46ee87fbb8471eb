"""Averaging against NumPy, at several numbers of trainers, and bit-equality of the buffers."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from tandem.distributed import (
    AverageGradients,
    AverageParameters,
    Exchange,
    LocalGroup,
    SharedParameters,
    kernels,
    local_groups,
)
from tandem.distributed.average import shard


def run_together(strategies: Sequence[Exchange], shares: Sequence[float], method: str) -> None:
    """Call one method of every trainer's exchange at once, each in a thread of its own."""
    errors: list[BaseException] = []

    def call(exchange: Exchange) -> None:
        try:
            getattr(exchange, method)(shares)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(s,), daemon=True) for s in strategies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors


def expected_average(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    total = np.zeros(vectors[0].shape)
    for vector, share in zip(vectors, shares, strict=True):
        total += vector.astype(float) * share
    return total


@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 1000, 163_917])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_average_equals_numpy_and_leaves_the_same_bits(
    trainers: int, size: int, dtype: str
) -> None:
    rng = np.random.default_rng(trainers)
    vectors = [rng.normal(size=size).astype(dtype) for _ in range(trainers)]
    counts = rng.integers(1, 10, trainers)
    shares = (counts / counts.sum()).tolist()
    expected = expected_average(vectors, shares)
    places = local_groups(trainers)
    run_together([AverageParameters(p, vectors) for p in places], shares, "after_update")
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    for vector in vectors:
        np.testing.assert_allclose(vector, expected, rtol=tolerance, atol=tolerance)
        assert vector.tobytes() == vectors[0].tobytes()


@pytest.mark.parametrize(
    ("strategy", "acts_in"),
    [
        (AverageParameters, "after_update"),
        (AverageGradients, "before_update"),
        (SharedParameters, "before_update"),
    ],
)
def test_each_strategy_acts_on_its_side_of_the_update(
    strategy: type[AverageParameters], acts_in: str
) -> None:
    for method in ("before_update", "after_update"):
        vectors = [np.zeros(10), np.ones(10)]
        run_together([strategy(p, vectors) for p in local_groups(2)], [0.5, 0.5], method)
        expected = 0.5 if method == acts_in else 0.0
        assert (vectors[0] == expected).all()
        if method == acts_in and strategy is not SharedParameters:
            assert (vectors[1] == expected).all()


@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("strategy", "method", "average"),
    [
        (AverageParameters, "after_update", "average_into_all"),
        (AverageGradients, "before_update", "average_into_all"),
        (SharedParameters, "before_update", "average_into_first"),
    ],
)
def test_every_element_is_averaged_by_one_trainer(
    trainers: int,
    strategy: type[AverageParameters],
    method: str,
    average: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step moves: a trainer is given one part of each vector, of as many as there are."""
    size = 100_000
    vectors = [np.zeros(size, np.float32) for _ in range(trainers)]
    given: list[Sequence[np.ndarray]] = []
    monkeypatch.setattr(kernels, average, lambda parts, shares: given.append(parts))
    shares = [1 / trainers] * trainers
    run_together([strategy(p, vectors) for p in local_groups(trainers)], shares, method)
    assert len(given) == (trainers if trainers > 1 else 0)
    for parts in given:
        assert len({part.size for part in parts}) == 1
        assert parts[0].size == pytest.approx(size / trainers, abs=1024)
        for part in parts:
            part += 1
    assert all((vector == (trainers > 1)).all() for vector in vectors)


def test_nobody_goes_on_before_all_have_updated_what_is_shared() -> None:
    updated: list[int] = []
    seen: list[int] = []

    def update(place: LocalGroup) -> None:
        exchange = SharedParameters(place, [np.ones(10)] * 3)
        exchange.before_update([1.0, 0.0, 0.0])
        time.sleep(0.1 * place.rank)
        updated.append(place.rank)
        exchange.after_update([1.0, 0.0, 0.0])
        seen.append(len(updated))

    threads = [threading.Thread(target=update, args=(p,), daemon=True) for p in local_groups(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [3, 3, 3]


@pytest.mark.parametrize("size", [1, 1023, 1024, 4096, 100_001])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_cover_the_vector_once(size: int, shards: int) -> None:
    touched = np.zeros(size, int)
    for number in range(shards):
        touched[shard(size, shards, number)] += 1
    assert (touched == 1).all()


def test_gather_gives_every_trainer_the_same_messages_by_rank() -> None:
    places = local_groups(3)
    results: dict[int, tuple[str, ...]] = {}

    def talk(place: LocalGroup) -> None:
        for turn in range(5):
            results[place.rank] = place.all_gather_object(f"{place.rank} in turn {turn}")

    threads = [threading.Thread(target=talk, args=(p,), daemon=True) for p in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == dict.fromkeys(range(3), ("0 in turn 4", "1 in turn 4", "2 in turn 4"))
