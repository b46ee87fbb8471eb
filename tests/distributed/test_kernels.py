"""Weighted averages by compiled loops: their bits, memory and machine code."""

import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tandem.distributed import kernels
from tandem.distributed.kernels import average_into_all, average_into_first
from tandem.distributed.shares import weights_and_divisor


def rounded_average(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """The oracle of the bits: every product rounded, then added by rank, then divided."""
    kind, (weights, divisor) = vectors[0].dtype.type, weights_and_divisor(shares)
    terms = [v * kind(w) for v, w in zip(vectors, weights, strict=True) if w > 0]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total / kind(divisor)


def check_averages(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> None:
    expected = rounded_average(vectors, shares)
    everywhere, first = ([vector.copy() for vector in vectors] for _ in range(2))
    average_into_all(everywhere, shares)
    average_into_first(first, shares)
    for vector in (*everywhere, first[0]):
        assert vector.tobytes() == expected.tobytes()
    if shares[0] > 0:
        for vector, before in zip(first[1:], vectors[1:], strict=True):
            assert vector.tobytes() == before.tobytes()


@pytest.mark.parametrize("shares", [[1.0], [1 / 3, 2 / 3], [0.5, 0.2, 0.3], [0.1, 0.4, 0.3, 0.2]])
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
    check_averages(vectors, shares)


@pytest.mark.parametrize(
    "shares", [[1.0, 0.0], [0.0, 1.0], [0.25, 0.0, 0.75], [0.0, 0.0, 0.4, 0.6]]
)
def test_a_trainer_without_pictures_is_not_read(shares: list[float]) -> None:
    rng = np.random.default_rng(0)
    vectors = [*rng.normal(size=(len(shares), 100)).astype(np.float32)]
    for vector, share in zip(vectors, shares, strict=True):
        if share == 0:
            vector[:] = np.nan
    check_averages(vectors, shares)


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


def refuse(*arguments: object, **options: object) -> NoReturn:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fault", ["no folder", "full disk", "damaged file"])
def test_without_a_cache_of_machine_code_it_is_compiled_again(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    kernels._compiled.cache_clear()
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
        kernels._compiled.cache_clear()
    vectors = [np.zeros(3), np.ones(3)]
    average_into_all(vectors, [0.5, 0.5])
    assert (vectors[0] == 0.5).all()
    kernels._compiled.cache_clear()
