"""How partial results become one, against loops and fractions, for arrays and tensors."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.parallel.fold import OPS, UPDATE_OPS, Fold, check_op, op_weights, row_weights

COUNTS = st.lists(st.integers(0, 13), min_size=1, max_size=6).filter(any)
LIBRARIES: dict[str, Callable[..., Any]] = {"numpy": np.asarray, "torch": torch.tensor}
NUMERIC = [op for op in OPS if op is not None]

library = pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)


def folded(op: str | None, partials: Sequence[Any], counts: Sequence[int], parts: int = 1) -> Any:
    """Fold what `parts` workers compute, each an equal number of consecutive slices."""
    weights, divisor = op_weights(op, counts)
    total = Fold(op, divisor)
    for first in range(0, len(partials), len(partials) // parts):
        worker = Fold(op)
        for n in range(first, first + len(partials) // parts):
            worker.add(partials[n], weights[n])
        total.add(worker.value())
    return total.value()


def by_loop(op: str | None, partials: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """The same, element by element; averages and sums by fractions, rounded at the end."""
    if op is None:
        return partials[-1]
    if op == "gather":
        rows = [row for partial in partials for row in (partial if partial.ndim else [partial])]
        return np.array(rows, partials[0].dtype).reshape(-1, *partials[0].shape[1:])
    result = np.empty_like(partials[0])
    for place in np.ndindex(result.shape):
        values = [partial[place].item() for partial in partials]
        if op in ("avg", "uavg"):
            ns = counts if op == "avg" else [1] * len(values)
            exact = sum(Fraction(v) * n for v, n in zip(values, ns, strict=True)) / sum(ns)
        elif op == "sum":
            exact = sum(map(Fraction, values), Fraction(0))
        elif op == "prod":
            exact = Fraction(1)
            for value in values:
                exact *= Fraction(value)
        else:
            exact = Fraction(max(values) if op == "max" else min(values))
        result[place] = float(exact)
    return result


def partials_of(shape: tuple[int, ...], number: int, dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    values = rng.uniform(0.5, 2, (number, *shape)) * rng.choice([-1, 1], (number, *shape))
    return [np.asarray(value, dtype) for value in values]


@given(COUNTS)
def test_weights_are_exact_and_the_divisor_is_their_sum(counts: list[int]) -> None:
    weights, divisor = row_weights(counts)
    total = sum(counts)
    for weight, count in zip(weights, counts, strict=True):
        assert Fraction(weight) / Fraction(divisor) == Fraction(count, total)
        assert np.float16(weight) == weight
    assert Fraction(divisor) == sum(map(Fraction, weights))
    assert 0.5 < divisor <= 1


def test_known_weights() -> None:
    assert row_weights([2, 2]) == ([0.5, 0.5], 1.0)
    assert row_weights([4, 4, 4]) == ([0.25, 0.25, 0.25], 0.75)
    assert row_weights([3, 0, 2]) == ([3 / 8, 0.0, 2 / 8], 5 / 8)
    assert row_weights([0, 70, 0]) == ([0.0, 1.0, 0.0], 1.0)
    assert op_weights("avg", [1, 3]) == ([0.25, 0.75], 1.0)
    assert op_weights("uavg", [1, 3]) == ([0.5, 0.5], 1.0)
    assert op_weights("uavg", [1, 0, 30]) == ([0.5, 0.0, 0.5], 1.0)
    assert op_weights("sum", [1, 0, 30]) == ([1.0, 1.0, 1.0], 1.0)


@pytest.mark.parametrize("counts", [[], [0, 0], [3, -1]])
def test_an_average_needs_rows(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="there is no average of partial results over"):
        row_weights(counts)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 3], [64, 64, 63], [7, 6, 6, 6, 6]])
@library
def test_the_average_of_equal_powers_of_two_is_exact(
    make: Any, counts: list[int], dtype: str
) -> None:
    """Rounded weights, such as ``float32(1/3)``, would give 1.0000001."""
    result = folded("avg", [make(np.array([1.0, -4.0], dtype)) for _ in counts], counts)
    assert np.asarray(result).dtype == dtype
    assert result.tolist() == [1.0, -4.0]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
@library
def test_results_are_those_of_loops(make: Any, shape: tuple[int, ...], op: str | None) -> None:
    for number in range(1, 6):
        counts = [number, 3, 1, 2, 7][:number]
        partials = partials_of(shape, number)
        result = folded(op, [make(partial) for partial in partials], counts)
        assert isinstance(result, torch.Tensor if make is torch.tensor else np.ndarray)
        expected = by_loop(op, partials, counts)
        if op in ("max", "min", "gather", None):
            np.testing.assert_array_equal(np.asarray(result), expected, strict=True)
        else:
            np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-12, strict=True)


@given(st.sampled_from(NUMERIC), st.integers(1, 6), st.sampled_from(["float32", "float16"]))
def test_arrays_and_tensors_give_the_same_bits(op: str, number: int, dtype: str) -> None:
    partials, counts = partials_of((5,), number, dtype), [*range(1, number + 1)]
    array = folded(op, partials, counts)
    tensor = folded(op, [torch.tensor(partial) for partial in partials], counts)
    assert array.dtype == dtype
    assert array.tobytes() == tensor.numpy().tobytes()


@given(st.sampled_from(OPS), st.integers(1, 6), st.sampled_from([(), (4,)]))
def test_workers_of_one_slice_have_the_bits_of_one_worker(
    op: str | None, number: int, shape: tuple[int, ...]
) -> None:
    partials, counts = partials_of(shape, number, "float32"), [*range(3, number + 3)]
    one, many = folded(op, partials, counts), folded(op, partials, counts, parts=number)
    assert one.tobytes() == many.tobytes()
    assert one.shape == many.shape


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "gather"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
@library
def test_integers_keep_their_dtype_and_bits(make: Any, dtype: str, op: str) -> None:
    partials = [np.array([100, 3], dtype), np.array([100, 2], dtype)]
    result = np.asarray(folded(op, [make(partial) for partial in partials], [1, 2]))
    expected = {
        "sum": partials[0] + partials[1],  # which wraps
        "prod": partials[0] * partials[1],
        "max": [100, 3],
        "min": [100, 2],
        "gather": [100, 3, 100, 2],
    }[op]
    np.testing.assert_array_equal(result, np.array(expected, dtype), strict=True)


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "float32"])
@library
def test_sums_and_products_of_integers_widen_as_those_of_numpy(
    make: Any, dtype: str, op: str
) -> None:
    partials, fold = np.array([[100, 3], [100, 2], [90, 0]], dtype), Fold(op, widens=True)
    for partial in partials:
        fold.add(make(partial))
    expected = getattr(partials, op)(axis=0)
    np.testing.assert_array_equal(np.asarray(fold.value()), expected, strict=True)


@library
def test_booleans_have_maximum_and_minimum(make: Any) -> None:
    partials = [make(np.array([True, False, False])), make(np.array([True, True, False]))]
    assert folded("max", partials, [1, 1]).tolist() == [True, True, False]
    assert folded("min", partials, [1, 1]).tolist() == [True, False, False]


@pytest.mark.parametrize("op", ["max", "min", "sum", "avg"])
@pytest.mark.parametrize("place", [0, 1, 2])
@library
def test_a_nan_in_any_partial_is_in_the_result(make: Any, place: int, op: str) -> None:
    partials = [make(np.array([1.0, n])) for n in range(3)]
    partials[place][0] = np.nan
    result = folded(op, partials, [1, 1, 1])
    assert np.isnan(np.asarray(result)).tolist() == [True, False]


@pytest.mark.parametrize("op", UPDATE_OPS)
@pytest.mark.parametrize("shape", [(), (2,)])
@library
def test_partials_are_not_changed_unless_given_away(
    make: Any, shape: tuple[int, ...], op: str | None
) -> None:
    partials = [make(partial) for partial in partials_of(shape, 3)]
    before = [np.asarray(partial).copy() for partial in partials]
    weights, divisor = op_weights(op, [1, 2, 4])
    for number in (1, 2, 3):
        fold = Fold(op, divisor)
        for partial, weight in zip(partials[:number], weights, strict=False):
            fold.add(partial, weight)
        fold.value()
    for partial, old in zip(partials, before, strict=True):
        np.testing.assert_array_equal(np.asarray(partial), old)


@pytest.mark.parametrize("op", ["avg", "uavg", "sum", "prod", "max", "min"])
@library
def test_what_is_given_away_is_folded_in_place(make: Any, op: str) -> None:
    partials = partials_of((4,), 3, "float32")
    weights, divisor = op_weights(op, [1, 2, 4])
    fold, first = Fold(op, divisor), make(partials[0].copy())
    for partial, weight in zip([first, *map(make, partials[1:])], weights, strict=True):
        fold.add(partial, weight, is_own=partial is first)
    for _ in range(2):  # the second time it is not divided again
        assert fold.value() is first
        assert np.asarray(first).tobytes() == folded(op, partials, [1, 2, 4]).tobytes()


@library
def test_a_single_value_that_is_divided_stays_as_it_was(make: Any) -> None:
    fold, value = Fold("avg", 0.75), make(np.array([0.75, 1.5]))
    fold.add(value)
    assert fold.value().tolist() == [1, 2]
    assert value.tolist() == [0.75, 1.5]


def test_scalars_of_numpy_are_arrays_without_dimensions() -> None:
    assert folded("avg", [np.float32(1), np.float32(2)], [1, 3]) == np.float32(1.75)
    for op in NUMERIC:
        result = folded(op, [np.float32(1), np.float32(2)], [1, 3])
        assert isinstance(result, np.ndarray)
        assert (result.dtype, result.ndim) == (np.float32, op == "gather")


def test_rows_of_unequal_numbers_are_gathered_in_order() -> None:
    partials = [np.arange(2), np.arange(0), np.arange(3)]
    assert folded("gather", partials, [2, 0, 3]).tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("op", ["avg", "sum", "prod", "max"])
@library
def test_shapes_that_would_be_broadcast_are_refused(make: Any, op: str) -> None:
    fold = Fold(op)
    fold.add(make(np.ones(1)))
    with pytest.raises(ValueError, match=rf'\(1,\) and \(3,\) .* by \'{op}\'; "gather" joins'):
        fold.add(make(np.ones(3)))


def test_nothing_cannot_be_folded() -> None:
    for op in OPS:
        with pytest.raises(ValueError, match="no partial result"):
            Fold(op).value()


@pytest.mark.parametrize("op", OPS)
def test_ops_of_floats(op: str | None) -> None:
    assert check_op(op, "float32", "output 0") == op
    assert check_op(op, np.dtype("float16"), "update of w", is_update=True) == op
    if op is not None:
        assert check_op(f"c_{op}", "float64", "output 0") == op


def test_the_increment_is_for_updates() -> None:
    assert check_op("inc", "int64", "update of n", is_update=True) == "inc"
    with pytest.raises(ValueError, match="output 0: the op is 'inc'; it can be 'avg', 'uavg', 's"):
        check_op("inc", "int64", "output 0")


@pytest.mark.parametrize("op", ["mean", "c_", "c_c_avg", "c_inc", "", 3, ["avg"], np.ones(2)])
def test_an_unknown_op_is_refused_with_those_that_there_are(op: Any) -> None:
    with pytest.raises(ValueError, match=r"output 2: the op is .*'gather', None, 'inc'$"):
        check_op(op, "float32", "output 2", is_update=True)


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        ("avg", "int64", 'output 1 is int64, .* cast it to a float, or use the op "inc"'),
        ("uavg", "uint8", "output 1 is uint8, .* cast it to a float"),
        ("c_avg", "bool", "output 1 is bool, .* cast it to a float"),
        ("sum", "bool", "output 1 is bool, which has no 'sum': cast it to an integer"),
        ("c_prod", "bool", "which has no 'prod'"),
        ("inc", "bool", "which has no 'inc'"),
        ("sum", None, "output 1 is no tensor, and has no 'sum'"),
    ],
)
def test_ops_that_a_dtype_does_not_have(op: str, dtype: str | None, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_op(op, dtype, "output 1", is_update=True)


def test_all_dtypes_can_be_gathered_and_those_of_no_tensor_are_the_masters() -> None:
    for dtype in ("bool", "int8", "complex64"):
        assert check_op("gather", dtype, "output 0") == "gather"
    assert check_op(None, None, "output 0") is None
