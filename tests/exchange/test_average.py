"""Averaging against NumPy, at several numbers of trainers, and bit-equality of the buffers."""

import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tandem.exchange import (
    AverageGradients,
    AverageParameters,
    Exchange,
    Meeting,
    average,
    loops,
    meetings,
)
from tandem.exchange.average import average_into_all, shard


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


def rounded_average(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """The oracle of the bits: every product rounded, then added, in order of rank."""
    terms = [v * v.dtype.type(s) for v, s in zip(vectors, shares, strict=True) if s > 0]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("shares", [[1.0], [0.3, 0.7], [0.5, 0.2, 0.3], [0.1, 0.4, 0.3, 0.2]])
@pytest.mark.parametrize("size", [1, 7, 1000, 4097])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bits_are_those_of_rounded_products_and_sums(
    shares: list[float], size: int, dtype: str
) -> None:
    rng = np.random.default_rng(size)
    # Of all magnitudes, so that a product which is not rounded gives another sum.
    scales = 10.0 ** rng.integers(-3, 4, (len(shares), size))
    vectors = [*(rng.normal(size=(len(shares), size)) * scales).astype(dtype)]
    vectors[0][0] = -0.0
    expected = rounded_average(vectors, shares)
    average_into_all(vectors, shares)
    for vector in vectors:
        assert vector.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "shares", [[1.0, 0.0], [0.0, 1.0], [0.25, 0.0, 0.75], [0.0, 0.0, 0.4, 0.6]]
)
def test_a_trainer_without_pictures_is_not_read(shares: list[float]) -> None:
    rng = np.random.default_rng(0)
    vectors = [*rng.normal(size=(len(shares), 100)).astype(np.float32)]
    for vector, share in zip(vectors, shares, strict=True):
        if share == 0:
            vector[:] = np.nan
    expected = rounded_average(vectors, shares)
    average_into_all(vectors, shares)
    for vector in vectors:
        assert vector.tobytes() == expected.tobytes()


def test_no_memory_of_a_vectors_size_is_needed() -> None:
    vectors = [np.ones(1 << 20, np.float32) for _ in range(2)]
    average_into_all(vectors, [0.5, 0.5])
    tracemalloc.start()
    average_into_all(vectors, [0.5, 0.5])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < vectors[0].nbytes / 100


def test_others_work_while_a_vector_is_averaged() -> None:
    """A trainer's heart beats in a thread, and must not stop for a long vector."""
    first, second = np.zeros((2, 1 << 23), np.float32)
    seen_half_done = False
    for number in range(1, 51):
        second[:] = first + 2
        thread = threading.Thread(target=average_into_all, args=((first, second), (0.5, 0.5)))
        thread.start()
        while thread.is_alive():
            # Whoever holds the interpreter's lock shows others no state in between.
            seen_half_done |= first[0] == number > first[-1]
        if seen_half_done:
            return
    raise AssertionError("no other thread ran meanwhile")


@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
def test_every_element_is_averaged_by_one_trainer(
    trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step moves: of each vector, one trainer is given one of as many parts."""
    size = 100_000
    vectors = [np.zeros(size, np.float32) for _ in range(trainers)]
    given: list[Sequence[np.ndarray]] = []
    monkeypatch.setattr(average, "average_into_all", lambda parts, shares: given.append(parts))
    shares = [1 / trainers] * trainers
    places = meetings(trainers)
    run_together([AverageParameters(p, vectors) for p in places], shares, "after_update")
    assert len(given) == (trainers if trainers > 1 else 0)
    for parts in given:
        assert len({part.size for part in parts}) == 1
        assert parts[0].size == pytest.approx(size / trainers, abs=1024)
        for part in parts:
            part += 1
    assert all((vector == (trainers > 1)).all() for vector in vectors)


def refuse(*arguments: object, **options: object) -> NoReturn:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fault", ["no folder", "full disk", "damaged file"])
def test_without_a_cache_of_machine_code_it_is_compiled_again(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    loops._compiled.cache_clear()
    if fault == "no folder":
        monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    elif fault == "full disk":
        monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", refuse)
    else:
        average_into_all([np.zeros(3), np.ones(3)], [0.5, 0.5])
        files = [path for path in tmp_path.rglob("*.nb?") if path.stat().st_size]
        assert {path.suffix for path in files} == {".nbc", ".nbi"}
        for path in files:
            path.write_bytes(path.read_bytes()[:-100])
        loops._compiled.cache_clear()
    vectors = [np.zeros(3), np.ones(3)]
    average_into_all(vectors, [0.5, 0.5])
    assert (vectors[0] == 0.5).all()
    loops._compiled.cache_clear()


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
