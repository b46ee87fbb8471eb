"""Integers, bools, extremes and repeated indices follow NumPy, as PyTensor's own backend does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
import torch
from pytensor.graph.basic import Variable
from pytensor.scalar.basic import Composite
from pytensor.scalar.loop import ScalarLoop
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.subtensor import AdvancedIncSubtensor1

from tandem.backend import device_mode
from tandem.backend.lowering.scatter import add, add_once, put
from tests.support.check_function import (
    DEVICE,
    PLAIN_DEVICE,
    PYTHON,
    check_equal,
    compile_graph,
)

LARGE = np.uint64([0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1])


def test_float_arange_has_numpys_length() -> None:
    start, stop, step = pt.dscalars("start", "stop", "step")
    values = [
        (0, 6, 0.6),
        (0, 1, 0.1),
        (1, 0, -0.3),
        (0, 6, 7),
        (2, 2, 1),
        (5, 0, 0.5),
        (0.1, 2, 0.3),
    ]
    for dtype in ("float64", "float32"):
        check_equal([start, stop, step], [pt.arange(start, stop, step, dtype=dtype)], *values)


def test_square_of_a_mask_is_a_mask() -> None:
    x = pt.dvector("x")
    mask = pt.vector("mask", dtype="bool")
    outputs = [mask * mask, mask**2, pt.sqr(mask), x[mask * mask], x[pt.sqr(mask)]]
    check_equal([mask, x], outputs, (np.array([True, False, True, True]), np.arange(4.0)))


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "neq", "maximum", "minimum",
                                  "int_div", "mod", "true_div", "add", "mul"])  # fmt: skip
@pytest.mark.parametrize("other", ["uint64", "uint8", "int64", "float64"])
def test_unsigned_64_bits(name: str, other: str) -> None:
    x, y = pt.vector(dtype="uint64"), pt.vector(dtype=other)
    pairs = np.meshgrid(LARGE, LARGE if other == "uint64" else np.array([0, 1, 7]).astype(other))
    check_equal([x, y], [getattr(pt, name)(x, y)], tuple(p.ravel() for p in pairs))


@pytest.mark.parametrize(
    "function",
    [
        pt.abs, pt.sign, pt.neg, pt.sqr, pt.max, pt.min, pt.sum, pt.argmax, pt.sort, pt.argsort,
        pt.cumsum, lambda x: pt.clip(x, np.uint64(3), np.uint64(2**63)),
        *(lambda x, kind=kind: pt.cast(x, kind) for kind in ("float32", "float64")),
    ],
)  # fmt: skip
def test_functions_of_unsigned_64_bits(function: Callable[[Variable], Variable]) -> None:
    x = pt.vector(dtype="uint64")
    check_equal([x], [function(x)], (LARGE[::-1].copy(),))


def test_unsigned_integers_are_accumulated_as_floats() -> None:
    x, y = pt.vector(dtype="uint64"), pt.vector(dtype="uint8")
    of_x = [pt.sum(x, dtype="float64"), pt.mean(x, acc_dtype="float64"), pt.mean(x)]
    check_equal([x], of_x, (np.array([1 << 63, 1 << 62], "uint64"),))
    check_equal([y], [pt.prod(y, dtype="float64")], (np.full(8, 250, "uint8"),))


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint32", "bool"])
@pytest.mark.parametrize("op", [pt.int_div, pt.mod])
def test_division_of_integers_by_zero_gives_zero(op: Any, dtype: str) -> None:
    x, y = pt.vector(dtype=dtype), pt.vector(dtype=dtype)
    values = np.array([7, 0, 1, 100]).astype(dtype), np.array([0, 0, 2, 7]).astype(dtype)
    check_equal([x, y], [op(x, y), op(x, np.zeros(1, dtype))], values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_remainder_of_a_very_large_quotient(dtype: str) -> None:
    x, y = pt.vector(dtype=dtype), pt.vector(dtype=dtype)
    info = np.finfo(dtype)
    values = np.array([info.max, 5, -info.max, np.inf, np.nan] * 2, dtype), np.full(10, 0.75, dtype)
    values[1][1], values[1][5:] = info.tiny, -3
    check_equal([x, y], [x % y, x % np.array(0.75, dtype)], values)


def test_host_numbers_divided_by_an_empty_length_give_zero() -> None:
    x, y = pt.dvector("x"), pt.dvector("y")
    n, m = x.shape[0], y.shape[0]
    check_equal([x, y], [n // m, n % m, (n + 1) // m], (np.ones(3), np.ones(0)))


def test_host_numbers_wrap_around() -> None:
    x = pt.dvector("x")
    n = x.shape[0]
    check_equal([x], [n * 2**62 * 3, n * 2**62 + n * 2**62], (np.ones(3),))


def test_vectors_of_the_host_are_repeated_only_where_their_type_says_so() -> None:
    x, y, i = pt.dmatrix("x"), pt.dmatrix("y"), pt.lscalar("i")
    function = compile_graph([x, y, i], [x.shape[:i] * y.shape], PLAIN_DEVICE)
    assert function(np.ones((2, 3)), np.ones((4, 5)), 2)[0].tolist() == [8, 15]
    with pytest.raises(ValueError, match="cannot be combined"):
        function(np.ones((2, 3)), np.ones((4, 5)), 1)


@pytest.mark.parametrize("choose", [pt.max, pt.min, pt.argmax])
@pytest.mark.parametrize("mode", [PYTHON, DEVICE, PLAIN_DEVICE], ids=["python", "device", "plain"])
def test_nothing_has_no_extreme(choose: Callable[..., Any], mode: Any) -> None:
    x = pt.matrix("x")
    function = compile_graph([x], [choose(x, axis=0)], mode)
    with pytest.raises(ValueError):  # noqa: PT011 (each library words it in its own way)
        function(np.zeros((0, 3), x.dtype))


def test_an_integer_to_a_negative_power_is_refused() -> None:
    x, y = pt.lvector("x"), pt.lvector("y")
    values = np.array([2, 3]), np.array([1, 2])
    check_equal([x, y], [x**y, x**2], values)
    for power in (y, -1):
        # PyTensor's rewrites make reciprocals of constant negative powers, without an error.
        for mode in (PYTHON, PLAIN_DEVICE, *((DEVICE,) if power is y else ())):
            function = compile_graph([x, y], [x**power], mode)
            with pytest.raises(ValueError, match="negative integer powers"):
                function(values[0], np.array([1, -2]))


@pytest.mark.parametrize(
    "build",
    [
        lambda b: [b // b, b % b], lambda b: [pt.dot(b, b)], lambda b: [pt.sum(b), pt.prod(b)],
    ],
)  # fmt: skip
def test_bool_arithmetic(build: Callable[[Variable], list[Variable]]) -> None:
    b = pt.vector(dtype="bool")
    check_equal([b], build(b), (np.array([True, False, True]),))


@pytest.mark.parametrize(
    ("dtype", "build"),
    [
        ("bool", lambda b: b // b), ("bool", lambda b: b % b), ("bool", lambda b: pt.dot(b, b)),
        ("uint32", lambda x: pt.dot(x, x)), ("uint64", lambda x: x > 3),
        ("uint64", lambda x: x // x), ("uint64", pt.max), ("uint64", pt.sort),
    ],
)  # fmt: skip
def test_a_missing_kernel_is_known_when_the_function_is_compiled(
    dtype: str, build: Callable[[Variable], Variable]
) -> None:
    x = pt.vector(dtype=dtype)
    with pytest.raises(NotImplementedError, match="PyTorch"):
        pytensor.function([x], build(x), mode=device_mode(strict=True))


def test_narrow_unsigned_numbers_in_products_and_positions() -> None:
    for dtype in ("uint16", "uint32", "uint64"):
        x, m = pt.vector(dtype=dtype), pt.matrix(dtype=dtype)
        values = np.array([1, 0, 2], dtype), np.array([[1, 0, 2], [0, 3, 0]], dtype)
        check_equal([x, m], [pt.dot(m, x)], values)
        check_equal([x, m], [*pt.nonzero(m), *pt.nonzero(x)], values)


def test_a_composite_that_ignores_an_operand_has_the_declared_shape() -> None:
    a, b = ps.float64("a"), ps.float64("b")
    op = Elemwise(Composite([a, b], [ps.exp(a), ps.constant(2.0) * ps.constant(1.5)]))
    x, y = pt.tensor(dtype="float64", shape=(1, 3)), pt.tensor(dtype="float64", shape=(2, 3))
    check_equal([x, y], op(x, y), (np.ones((1, 3)), np.ones((2, 3))))


REPEATED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rows": lambda x, i, j: x[i],
    "columns": lambda x, i, j: x[:, i],
    "pairs": lambda x, i, j: x[i, j],
    "pairs of columns": lambda x, i, j: x[:, i, j],
    "apart": lambda x, i, j: x[i, :, j],
    "table of rows": lambda x, i, j: x[i.reshape((-1, 2))],
    "outer": lambda x, i, j: x[i[:, None], j[None, :7]],
    "part": lambda x, i, j: x[1::2, i],
    "backwards": lambda x, i, j: x[::-1, i],
    "one element": lambda x, i, j: x[3, i],
    "a mask and rows": lambda x, i, j: x[x[:, 0, 0] > 0, j[0]],
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float64") for name in REPEATED),
        *(("pairs", d) for d in ("int8", "bool", "uint16")),
    ],
)
def test_repeated_indices(name: str, dtype: str) -> None:
    """The last value set wins; values added are all added."""
    rng = np.random.default_rng(0)
    x, y = pt.tensor(dtype=dtype, shape=(6, 6, 6)), pt.tensor(dtype=dtype, shape=(6,))
    i, j = pt.lvector("i"), pt.lvector("j")
    part = REPEATED[name](x, i, j)
    many = pt.arange(pt.prod(part.shape)).reshape(part.shape)
    values = (many % 3 if dtype == "bool" else many % 127).astype(dtype)
    places = [rng.integers(-6, 6, 20) for _ in range(2)]
    outputs = [
        pt.set_subtensor(part, values),
        pt.set_subtensor(part, values[..., :1]),
        pt.set_subtensor(part, np.array(1, dtype)),
        pt.inc_subtensor(part, values),
        pt.inc_subtensor(part, np.array(1, dtype)),
        pt.inc_subtensor(part, values, ignore_duplicates=True),
    ]
    start = rng.integers(-3, 4, (6, 6, 6)) if dtype != "bool" else rng.random((6, 6, 6)) < 0.5
    check_equal([x, y, i, j], outputs, (start.astype(dtype), np.ones(6, dtype), *places))


def test_what_torch_compile_reads_gives_the_same() -> None:
    """Without NumPy, repeated indices are resolved by sorting."""
    rng = np.random.default_rng(0)
    i, j = (torch.from_numpy(rng.integers(-4, 4, (3, 5))) for _ in range(2))
    for tensors in ([None, i], [i, j], [None, i, j], [i, None, j], [i[:, :1], j], [i]):
        start = rng.normal(size=(4, 4, 4))
        index = tuple(slice(None) if x is None else x.numpy() for x in tensors)
        y = rng.normal(size=start[index].shape)
        for write in (put, add, add_once):
            found = [torch.from_numpy(start.copy()) for _ in range(2)]
            for part, traced in zip(found, (False, True), strict=True):
                write(part, tensors, torch.from_numpy(y), traced)
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("static", [True, False])
def test_repeated_indices_give_the_same_bits_on_any_number_of_threads(static: bool) -> None:
    rng = np.random.default_rng(0)
    kind = partial(pt.tensor, dtype="float32")
    x = kind(shape=(500, 40) if static else (None, None))
    y = kind(shape=(40000, 40) if static else (None, None))
    v, z = kind(shape=(500 if static else None,)), kind(shape=(40000 if static else None,))
    i = pt.lvector("i")
    outputs = [
        pt.set_subtensor(x[i], y), pt.inc_subtensor(x[i], y), pytensor.grad((x[i] * y).sum(), x),
        pt.set_subtensor(v[i], z), pt.inc_subtensor(v[i], z), pt.inc_subtensor(x[i, i % 40], z),
    ]  # fmt: skip
    function = compile_graph([x, y, v, z, i], outputs, DEVICE)
    values = [rng.normal(size=s).astype("float32") for s in ((500, 40), (40000, 40), 500, 40000)]
    places = rng.integers(0, 500, 40000)
    before = torch.get_num_threads()
    seen = set()
    try:
        for threads in (1, 2, 4, 2, 2, 2):
            torch.set_num_threads(threads)
            found = function(*values, places)
            seen.add(b"".join(output.tobytes() for output in found))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1
    last = dict(zip(places.tolist(), range(40000), strict=True))
    np.testing.assert_array_equal(found[0][list(last)], values[1][list(last.values())])
    np.testing.assert_array_equal(found[3][list(last)], values[3][list(last.values())])
    total = values[2].astype("float64")
    np.add.at(total, places, values[3])
    np.testing.assert_allclose(found[4], total, atol=1e-4)


def test_values_are_added_to_a_transposed_row() -> None:
    """Its axes can be joined without a copy, though their strides are unusual."""
    part = torch.zeros(4, 1).T
    index = torch.tensor([0, 0, 0])
    add(part, [index, torch.tensor([3, 1, 3])], torch.ones(3), False)
    np.testing.assert_array_equal(part.numpy(), [[0, 1, 0, 2]])


def test_a_value_for_rows_is_not_repeated_unless_its_type_says_so() -> None:
    x, y, i = pt.dmatrix("x"), pt.dmatrix("y"), pt.lvector("i")
    values = np.zeros((3, 2)), np.ones((1, 2)), np.array([0, 1])
    for mode in (PYTHON, PLAIN_DEVICE):
        function = compile_graph([x, y, i], [AdvancedIncSubtensor1()(x, y, i)], mode)
        with pytest.raises(ValueError, match="Runtime broadcasting not allowed"):
            function(*values)


def test_an_index_out_of_range_is_refused() -> None:
    x, i = pt.dmatrix("x"), pt.lvector("i")
    for part in (x[i], x[:, i], x[i, i]):
        for output in (pt.set_subtensor(part, 1.0), pt.inc_subtensor(part, 1.0)):
            function = compile_graph([x, i], [output], DEVICE)
            for index in (3, -4):
                with pytest.raises(IndexError):
                    function(np.ones((3, 3)), np.array([0, index]))


def test_sinh_and_cosh_reach_the_largest_number() -> None:
    """In an array that is long enough for PyTorch's vectorised kernels."""
    for dtype, limit in (("float32", 89.4), ("float64", 710.4)):
        x = pt.vector("x", dtype=dtype)
        values = np.tile([-limit, -limit / 2, -1, -0.0, 0, 1e-3, limit - 1, limit], 8).astype(dtype)
        check_equal([x], [pt.sinh(x), pt.cosh(x)], (values,), (np.full(40, np.inf, dtype),))


def test_a_loop_over_scalars_ends_for_each_element() -> None:
    state, factor = ps.float64("state"), ps.float64("factor")
    update = state * factor + 1
    until = ScalarLoop(init=[state], constant=[factor], update=[update], until=update > 100)
    counted = ScalarLoop(init=[state], constant=[factor], update=[update])
    n, x, y = pt.lmatrix("n"), pt.dmatrix("x"), pt.drow("y")
    outputs = [*Elemwise(until)(n - 2, x, y), Elemwise(counted)(n, x, y)]
    steps = np.array([[0, 1, 2], [3, 30, 7]])
    values = np.linspace(-1, 2, 6).reshape(2, 3)
    check_equal([n, x, y], outputs, (steps, values, np.array([[1.5, 2, 3]])))
    function = pytensor.function([n, x, y], outputs[-1], mode=DEVICE)
    with pytest.raises(ValueError, match="termination condition"):
        function(-steps, values, np.ones((1, 3)))


def test_what_an_inner_graph_needs_twice_is_computed_once() -> None:
    """PyTensor lists a node of such a graph once for each of its users."""
    x, y = ps.float64("x"), ps.float64("y")
    sums = x + y
    doubled = sums * sums
    composite = Elemwise(Composite([x, y], [(doubled - sums) / (doubled + y)]))
    loop = Elemwise(ScalarLoop(init=[x], constant=[y], update=[(doubled - sums) / (doubled + y)]))
    v, w = pt.dvectors("v", "w")
    gradient = pytensor.grad(pt.gammainc(v, w).sum(), v)
    outputs = [composite(v, w), loop(np.int64(3), v, w), gradient]
    check_equal([v, w], outputs, (np.array([0.5, 1, 3]), np.array([1.0, 2, 7])))


def test_a_loop_of_more_operands_than_a_ufunc_takes() -> None:
    states = [ps.float64() for _ in range(17)]
    loop = ScalarLoop(init=states, update=[x + k for k, x in enumerate(states)])
    n, x = pt.lvector("n"), pt.dvector("x")
    results = pytensor.function([n, x], Elemwise(loop)(n, *[x] * 17), mode=DEVICE)
    for k, result in enumerate(results(np.array([2, 0]), np.ones(2))):
        np.testing.assert_array_equal(result, [1 + 2 * k, 1])


@pytest.mark.parametrize(("op", "dtype"), [(ps.add, "float32"), (ps.mul, "int8")])
@pytest.mark.parametrize("rows", [3, 1], ids=["equal shapes", "repeated row"])
def test_many_operands_are_combined_from_the_left_and_kept(op: Any, dtype: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [(rows, 5), (rows, 5), (3, 5), (3, 5)]
    values = [rng.integers(0, 99, shape).astype(dtype) for shape in shapes]
    values = [v / 7 if dtype == "float32" else v for v in values]
    inputs = [pt.tensor(dtype=dtype, shape=shape) for shape in shapes]
    result = Elemwise(op)(*inputs, pt.constant(np.array(2, dtype)))
    call = compile_graph(inputs, [result], PLAIN_DEVICE)
    kept = [v.copy() for v in values]
    expected = values[0]
    for v in (*values[1:], np.array(2, dtype)):
        expected = {ps.add: np.add, ps.mul: np.multiply}[op](expected, v)
    np.testing.assert_array_equal(call(*values)[0], expected)
    for value, before in zip(values, kept, strict=True):
        np.testing.assert_array_equal(value, before)
