"""Averaging against NumPy, at several numbers of trainers, and bit-equality of the buffers."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from tandem.exchange import AverageGradients, AverageParameters, Exchange, Meeting, meetings
from tandem.exchange.average import BLOCK, average_into_all, shard


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
@pytest.mark.parametrize("size", [1, 1000, 5 * BLOCK + 77])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_average_equals_numpy_and_leaves_the_same_bits(
    trainers: int, size: int, dtype: str
) -> None:
    rng = np.random.default_rng(trainers)
    vectors = [rng.normal(size=size).astype(dtype) for _ in range(trainers)]
    counts = rng.integers(1, 10, trainers)
    shares = (counts / counts.sum()).tolist()
    expected = expected_average(vectors, shares)
    places = meetings(trainers)
    run_together([AverageParameters(p, vectors) for p in places], shares, "after_update")
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    for vector in vectors:
        np.testing.assert_allclose(vector, expected, rtol=tolerance, atol=tolerance)
        assert vector.tobytes() == vectors[0].tobytes()


@pytest.mark.parametrize(
    ("strategy", "acts_in"),
    [(AverageParameters, "after_update"), (AverageGradients, "before_update")],
)
def test_each_strategy_acts_on_its_side_of_the_update(
    strategy: type[AverageParameters], acts_in: str
) -> None:
    for method in ("before_update", "after_update"):
        vectors = [np.zeros(10), np.ones(10)]
        run_together([strategy(p, vectors) for p in meetings(2)], [0.5, 0.5], method)
        expected = 0.5 if method == acts_in else 0.0
        assert (vectors[0] == expected).all()


def test_a_trainer_without_pictures_is_not_read() -> None:
    vectors = [np.ones(10), np.full(10, np.nan)]
    average_into_all(vectors, [1.0, 0.0])
    assert (vectors[1] == 1).all()


@pytest.mark.parametrize("size", [1, 1023, 1024, 4096, 100_001])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_cover_the_vector_once(size: int, shards: int) -> None:
    touched = np.zeros(size, int)
    for number in range(shards):
        touched[shard(size, shards, number)] += 1
    assert (touched == 1).all()


def test_gather_gives_every_trainer_the_same_messages_by_rank() -> None:
    places = meetings(3)
    results: dict[int, tuple[str, ...]] = {}

    def talk(place: Meeting) -> None:
        for turn in range(5):
            results[place.rank] = place.gather(f"{place.rank} in turn {turn}")

    threads = [threading.Thread(target=talk, args=(p,), daemon=True) for p in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == dict.fromkeys(range(3), ("0 in turn 4", "1 in turn 4", "2 in turn 4"))
