"""Small graphs that between them use every lowering, with values to run them on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.compile.ops import deep_copy_op, view_op
from pytensor.graph.basic import Variable
from pytensor.raise_op import Assert
from pytensor.scalar.basic import Composite
from pytensor.tensor.basic import scalar_from_tensor, tensor_from_scalar
from pytensor.tensor.blas import _batched_dot
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import CpuContiguous
from pytensor.tensor.math import Argmax, Max, Min, Prod, ProdWithoutZeros, Sum
from pytensor.tensor.reshape import join_dims, split_dims
from pytensor.tensor.shape import Shape_i, specify_shape
from pytensor.tensor.subtensor import AdvancedIncSubtensor1, AdvancedSubtensor1

from tandem.ops import (
    LRN,
    AdamStep,
    AveragePool2d,
    AveragePool2dGrad,
    BatchNorm,
    BatchNormBySums,
    BatchNormBySumsGrad,
    BatchNormGrad,
    BatchNormInference,
    ChannelGradientSums,
    ChannelSums,
    Conv2d,
    Conv2dBiasGrad,
    Conv2dInputGrad,
    Conv2dWeightGrad,
    CropMirror,
    Dropout,
    DropoutMask,
    LRNGrad,
    MaxPool2d,
    MaxPool2dGrad,
    MomentumStep,
    Pad2d,
    Relu,
    ReluGrad,
)  # fmt: skip

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class Case:
    """A graph with values for its inputs.

    `build` gives inputs, outputs and the inputs' values; it is called anew for each use.
    """

    name: str
    build: Callable[[], tuple[list[Variable], list[Variable], list[Any]]]

    def __str__(self) -> str:
        return self.name


def sample(dtype: str, shape: tuple[int, ...], low: float = -3, high: float = 3) -> np.ndarray:
    """Values of a dtype that PyTensor's rules treat differently: both signs, ties, zeros."""
    rng = np.random.default_rng(sum(map(ord, dtype)) + len(shape))
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("uint"):
        low = max(low, 0)
    values = rng.uniform(low, high, shape)
    return np.asarray(values if dtype.startswith("float") else np.round(values)).astype(dtype)


def tensor_like(value: np.ndarray, static: bool = True, name: str | None = None) -> Variable:
    """A tensor variable for a value, of its static shape or with lengths of 1 known only."""
    shape = value.shape if static else tuple(1 if n == 1 else None for n in value.shape)
    return pt.tensor(name, dtype=value.dtype.name, shape=shape)


def case(name: str, function: Callable[..., Any], *values: Any, static: bool = True) -> Case:
    """A case from a function of symbolic inputs and the values that they take."""

    def build() -> tuple[list[Variable], list[Variable], list[Any]]:
        arrays = [np.asarray(value) for value in values]
        inputs = [tensor_like(array, static) for array in arrays]
        outputs = function(*inputs)
        return inputs, list(outputs) if isinstance(outputs, list | tuple) else [outputs], arrays

    return Case(f"{name}{'' if static else '-dynamic'}", build)


def cases_on(functions: dict[str, Callable[..., Any]], *values: Any, static: bool = True) -> list:
    """Several cases on the same values."""
    return [case(name, function, *values, static=static) for name, function in functions.items()]


def _elemwise_cases() -> list[Case]:
    cases = []
    binary = "add mul sub true_div pow maximum minimum eq neq lt gt le ge second int_div mod"
    pairs = (
        "float32-float32 float64-float64 float32-float64 float32-int8 float32-int32 int64-float32 "
        "int8-int8 int8-uint8 uint8-uint8 int32-int64 uint16-uint16 uint32-int16 bool-float32 "
        "bool-int8 float16-float32"
    )
    for name in binary.split():
        for left, right in (pair.split("-") for pair in pairs.split()):
            low = 0 if "uint" in left + right and name == "sub" else -3
            divisor = name in ("true_div", "int_div", "mod")
            if name == "pow":
                low = 1
            if "bool" in (left, right) and name == "pow":
                continue
            x = sample(left, (3, 4), low, 7)
            y = sample(right, (4,) if left == "float32" else (3, 1), 1 if divisor else low, 5)
            if divisor and y.dtype.kind in "if":
                y = (y * np.where(np.arange(y.size).reshape(y.shape) % 2, -1, 1)).astype(right)
            cases.append(case(f"{name}-{left}-{right}", getattr(pt, name), x, y))
    matrix, double = sample("float32", (3, 4)), sample("float64", (2, 3))
    cases += [
        case("sub-uint8-wraps", pt.sub, np.uint8([1, 2]), np.uint8([2, 1])),
        case("add-uint8-wraps", pt.add, np.uint8([200, 255]), np.uint8([100, 1])),
        case("mul-int8-wraps", pt.mul, np.int8([100, -128]), np.int8([3, -1])),
        case("add-uint16-wraps", pt.add, np.uint16([65535]), np.uint16([2])),
        case("add-bool", pt.add, sample("bool", (9,)), sample("bool", (9,))[::-1]),
        case("mul-bool", pt.mul, sample("bool", (9,)), sample("bool", (9,))[::-1]),
        case("maximum-nan", pt.maximum, np.array([1, np.nan, 3.0]), np.array([np.nan, 2, 4.0])),
        case("minimum-nan", pt.minimum, np.array([1, np.nan, 3.0]), np.array([np.nan, 2, 4.0])),
        case("maximum-number", lambda x: pt.maximum(x, np.float32(0)), sample("float32", (5,))),
        case("maximum-number-nan", lambda x: pt.maximum(x, 0.5), np.array([np.nan, 0, 1.0])),
        case("minimum-left-number", lambda x: pt.minimum(np.int64(1), x), sample("int64", (5,))),
        case("int_div-zero", pt.int_div, np.array([1.0, -1.0, 0.0]), np.zeros(3)),
        case("mod-float-signs", pt.mod, np.array([5.5, -5.5] * 2), np.array([3, 3, -3, -3.0])),
        case("add-many", lambda a, b, c: pt.add(a, b, 2.0, c, 1.0), *[double] * 3),
        case("add-one", lambda a: Elemwise(ps.add)(a), double),
        case("mul-many", pt.mul, *(sample("float32", shape) for shape in ((2, 1), (1, 3), (2, 3)))),
        case(
            "number-left",
            lambda x: [2 - x, 2 / x, 2**x, 3 * x, x - 2, x / 3, x**2, x < 1],
            sample("float32", (4,), 1, 2),
        ),
        case(
            "number-left-integer",
            lambda x: [2 - x, 7 // x, 7 % x, 3 * x, x**2, x < 1, x + 2.5],
            sample("int32", (4,), 1, 4),
        ),
        case("number-rounded", lambda x: [x * np.float32(0.1), x * 0.1], sample("float64", (4,))),
        case("switch", pt.switch, sample("bool", (3, 1)), matrix, sample("int64", (4,))),
        case(
            "switch-number",
            lambda c, x: [pt.switch(c, *ways) for ways in ((x, np.float32(0)), (1, x), (1.0, 2.0))],
            sample("int8", (3, 4)),
            matrix,
        ),
        case("clip", pt.clip, sample("float64", (9,)), np.array([1.0]), np.array([0.5])),
        case("clip-number", lambda x: pt.clip(x, -1.0, 1.0), np.array([np.nan, -2, 0, 3])),
        case("clip-crossed", lambda x: pt.clip(x, 1.0, -1.0), np.linspace(-2, 2, 7)),
        case("clip-integer", lambda x: pt.clip(x, 1, 2), sample("int32", (9,))),
        case("arctan2", pt.arctan2, sample("float64", (9,)), sample("float64", (9,))[::-1]),
        case("fill", pt.fill, matrix, np.float64(2.5)),
    ]
    for dtype in ("bool", "int8", "uint8", "int64", "uint16"):
        for name, op in {"and": pt.bitwise_and, "or": pt.bitwise_or, "xor": pt.bitwise_xor}.items():
            left = sample(dtype, (3, 4), -100, 100)
            cases.append(case(f"bitwise_{name}-{dtype}", op, left, left[::-1, :1]))
        cases.append(case(f"invert-{dtype}", pt.invert, sample(dtype, (9,), -100, 100)))
    return cases + _unary_cases()


def _unary_cases() -> list[Case]:
    names = (
        "abs sign sqr exp exp2 expm1 cos sin tan arctan cosh sinh tanh arcsinh sigmoid softplus "
        "erf erfc ceil floor trunc round deg2rad rad2deg isnan isinf"
    )
    anywhere = {name: getattr(pt, name) for name in names.split()}
    anywhere["round_half_away"] = lambda x: pt.round(x, mode="half_away_from_zero")
    positive = ["sqrt", "log", "log2", "log10", "log1p", "reciprocal", "gammaln", "digamma"]
    within = ["arccos", "arcsin", "arctanh", "erfinv"]
    cases = []
    for dtype in ("float32", "float64", "float16", "int8", "int64", "uint8", "bool"):
        discrete = not dtype.startswith("float")
        values = sample(dtype, (3, 4)) if discrete else np.r_[sample(dtype, (9,)), -2.5, 0.5, 1.5]
        values = values.astype(dtype)
        for name, op in anywhere.items():
            # PyTensor has no sign of bools, and takes their softplus in half precision.
            missing = dtype == "bool" and name in ("sign", "softplus")
            if missing or (discrete and name.startswith("round")):
                continue
            cases.append(case(f"{name}-{dtype}", op, values))
        if dtype not in ("uint8", "bool"):
            cases.append(case(f"neg-{dtype}", pt.neg, values))
        above = sample(dtype, (3, 4), 0.5, 3)
        values = np.maximum(values, 1).astype(dtype) if discrete else above
        cases += [case(f"{name}-{dtype}", getattr(pt, name), values) for name in positive]
        values = sample(dtype, (3, 4), -0.9, 0.9)
        cases += [case(f"{name}-{dtype}", getattr(pt, name), values) for name in within]
        cases.append(case(f"arccosh-{dtype}", pt.arccosh, np.ones(3, dtype)))
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -40, 40, 1e-9])
    for name in ("sign", "abs", "softplus", "sigmoid", "isnan", "isinf", "floor"):
        cases.append(case(f"{name}-special", getattr(pt, name), special))
    cases.append(case("log1mexp", pt.log1mexp, sample("float64", (9,), -3, -0.1)))
    cases.append(case("identity", lambda x: Elemwise(ps.identity)(x) + 0, sample("int8", (3,))))
    kinds = ("bool", "int8", "uint8", "uint16", "int32", "uint64", "int64", *FLOATS, "float16")
    for given in kinds:
        values = sample(given, (3, 4), 0, 50)
        cases.append(case(f"cast-{given}", lambda x: [pt.cast(x, kind) for kind in kinds], values))
    return cases


def _composite() -> Case:
    def build() -> tuple[list[Variable], list[Variable], list[Any]]:
        x, y = ps.float32("x"), ps.int8("y")
        total = ps.add(ps.mul(x, x), y, ps.constant(2.5, dtype="float64"))
        op = Elemwise(Composite([x, y], [total, ps.maximum(x, ps.constant(np.float32(0)))]))
        values = [sample("float32", (3, 4)), sample("int8", (1, 4))]
        inputs = [tensor_like(value) for value in values]
        return inputs, op(*inputs), values

    return Case("composite", build)


def _reduction_cases() -> list[Case]:
    cases = []
    reductions = {"sum": pt.sum, "prod": pt.prod, "max": pt.max, "min": pt.min, "mean": pt.mean}
    for name, op in reductions.items():
        for dtype in (*FLOATS, *INTEGERS, "bool", "float16"):
            if name == "min" and dtype.startswith(("uint", "bool")):
                continue
            values = sample(dtype, (2, 3, 4), -2, 3)
            for axis in (None, 1, (0, 2), (0, 1, 2)):
                cases.append(case(f"{name}-{dtype}-{axis}", partial(op, axis=axis), values))
    x = sample("float32", (3, 4))
    nan = np.array([[1.0, np.nan], [3.0, 2.0]])
    cases += cases_on(
        {
            "sum-no-axis": lambda x: [Sum(axis=())(x), Sum(axis=(), dtype="float64")(x)],
            "sum-dtype": Sum(axis=0, dtype="float64", acc_dtype="float64"),
            "sum-float32-accumulator": Sum(dtype="float32", acc_dtype="float32"),
            "max-keepdims": partial(pt.max, axis=1, keepdims=True),
            "argmax": lambda x: [
                pt.argmax(x, axis=1),
                pt.argmax(x),
                pt.argmin(x, axis=0),
                Argmax((0, 1))(x),
            ],
            "var-std": lambda x: [pt.var(x, axis=0), pt.std(x)],
            "cumulative": lambda x: [pt.cumsum(x, axis=0), pt.cumprod(x, axis=1), pt.cumsum(x)],
        },
        x,
    )
    cases += cases_on(
        {
            "max-nan": lambda x: [Max((0,))(x), Min((1,))(x), Max((0, 1))(x)],
            "argmax-nan": partial(pt.argmax, axis=1),
        },
        nan,
    )
    cases += cases_on(
        {
            "max-bool": lambda x: [Max((0,))(x), Min((0,))(x)],
            "all-any": lambda x: [pt.all(x, axis=0), pt.any(x, axis=(0, 1)), pt.all(x)],
            "xor": CAReduce(ps.xor, axis=(0,)),
            "argmax-bool": Argmax((0,)),
        },
        sample("bool", (3, 4)),
    )
    small, many = sample("int8", (3, 4)), sample("float64", (4, 5))
    cases += [
        case("sum-overflow", pt.sum, np.full(300, 100, "int8")),
        case("sum-large", partial(pt.sum, axis=0), sample("float32", (70000, 2), 0)),
        case("sum-empty", lambda x: [pt.sum(x, axis=0), pt.prod(x, axis=0)], np.zeros((0, 3))),
        case("prod-dtype", Prod(axis=1, dtype="int32"), small),
        case("prod-no-zeros", ProdWithoutZeros(axis=1), sample("int64", (3, 9))),
        case("min-uint8", Min((0,)), sample("uint8", (3, 4), 0, 9)),
        case("all-any-integer", lambda x: [pt.all(x, axis=0), pt.any(x, axis=1)], small),
        case("argmax-ties", partial(pt.argmax, axis=1), sample("int8", (4, 9))),
        case("argmax-axes", Argmax((0, 2)), sample("uint16", (2, 3, 4), 0, 9)),
        case("sort", lambda x: [pt.sort(x, axis=0), pt.argsort(x, axis=1, kind="stable")], many),
        case("sort-ties", partial(pt.argsort, kind="stable"), sample("int8", (30,))),
    ]
    for name, op in {"softmax": pt.special.softmax, "log_softmax": pt.special.log_softmax}.items():
        cube = sample("float32", (2, 3, 4))
        cases += [case(f"{name}-{a}", partial(op, axis=a), cube) for a in (None, 0, -1, (0, 2))]
        cases.append(
            case(
                f"{name}-gradient",
                lambda x, op=op: pytensor.grad((op(x, axis=1) ** 2).sum(), x),
                sample("float64", (3, 4)),
            )
        )
        cases.append(case(f"{name}-large", partial(op, axis=0), np.array([1e3, -1e3, 9])))
        cases.append(case(f"{name}-short-rows", partial(op, axis=1), sample("float32", (100, 5))))
    return cases


def _tensor_cases() -> list[Case]:
    x = sample("float32", (3, 4))
    three, row, cube = np.int64(3), sample("int8", (1, 4)), sample("int8", (2, 3, 4))

    def reshapes(x: Variable) -> list[Variable]:
        return [
            x.reshape((4, 3)), x.reshape((2, -1)), x.flatten(),
            x.T.reshape((-1,)), x.T.flatten(2),
        ]  # fmt: skip

    def ranges(n: Variable) -> list[Variable]:
        return [
            pt.arange(n), pt.arange(1, n, 2), pt.arange(n, 0, -1), pt.arange(n, 0),
            pt.arange(0, 1, 0.25), pt.arange(0.5, n, dtype="float32"),
        ]  # fmt: skip

    cases = cases_on(
        {
            "dimshuffle": lambda x: [x.T, x.dimshuffle("x", 1, "x", 0), x.dimshuffle(0, 1, "x")],
            "alloc": lambda x: [pt.alloc(x, 2, 3, 4), pt.alloc(1.5, 2, 2), pt.zeros((2,), "int8")],
            "stack": lambda x: [pt.stack([x, x], axis=1), pt.stack([x[0, 0], x[1, 1]])],
            "split": lambda x: pt.split(x, [1, 2], n_splits=2, axis=0),
            "split-one": lambda x: pt.split(x, [3], n_splits=1, axis=0),
            "reshape": reshapes,
            "split-dims": lambda x: split_dims(x, (2, 2), axis=1),
            "contiguous": lambda x: CpuContiguous()(x.T),
            "diagonal": lambda x: [pt.diagonal(x, offset) for offset in (0, 1, -1)],
            "copies": lambda x: [deep_copy_op(x), view_op(x), deep_copy_op(x.T) * 2],
            "tri": lambda x: [pt.tril(x), pt.triu(x)],
            "tile-repeat": lambda x: pt.tile(x, (2, 1)),
        },
        x,
    )
    cases += cases_on(
        {
            "alloc-symbolic": lambda x, n: [
                pt.alloc(x, n, 3, 4),
                pt.alloc(0, n),
                pt.alloc(x[:, :1], n, 4),
            ],
            "reshape-symbolic": lambda x, n: [x.reshape((n, 4)), x.reshape((n, -1))],
        },
        x,
        three,
    )
    cases += cases_on(
        {
            "alloc-empty": lambda n: pt.basic.AllocEmpty("float32")(n, 0),
            "arange": ranges,
            "eye": lambda n: [pt.eye(n), pt.eye(n, 4, 1), pt.eye(3, n, -1, dtype="int8")],
        },
        three,
    )
    cases += cases_on(
        {
            "alloc-of-shape": lambda x: [
                pt.alloc(1.0, x.shape[0], 2),
                pt.zeros_like(x),
                pt.ones_like(x) * 2,
            ],
            "specify-shape": lambda x: [specify_shape(x, (3, None)), specify_shape(x, (3, 4)) + 1],
        },
        x,
        static=False,
    )
    cases += [
        case(
            "dimshuffle-drop", lambda x: [x.dimshuffle(1), x.dimshuffle(1, "x"), x.squeeze()], row
        ),
        case("dimshuffle-scalar", lambda x: x.dimshuffle("x", "x"), np.float32(2)),
        case("arange-float", lambda a, b: pt.arange(a, b, 0.3), np.float64(0.1), np.float64(2)),
        case(
            "join",
            lambda x, y: [pt.join(0, x, y), pt.concatenate([x, x], axis=-1)],
            x,
            sample("int32", (2, 4)),
        ),
        case("join-symbolic-axis", lambda x, a: pt.join(a, x, x), x, np.int64(1)),
        case(
            "make-vector",
            lambda a, b: [pt.stacklists([a, b]), pt.stack([a, b, a])],
            np.float32(1),
            np.float32(2),
        ),
        case("make-vector-empty", lambda x: pt.basic.MakeVector("float32")() + x, np.float32(1)),
        case(
            "split-symbolic", lambda x, s: pt.split(x, s, n_splits=2, axis=1), x, np.array([1, 3])
        ),
        case("reshape-vector", partial(pt.reshape, ndim=2), x, np.array([2, 6])),
        case("reshape-scalar", lambda x: x.reshape(()), np.ones((1, 1))),
        case("join-dims", lambda x: join_dims(x, 0, 2), cube),
        case(
            "specify-shape-symbolic",
            lambda x, n: specify_shape(x, (n, None)),
            x,
            three,
            static=False,
        ),
        case(
            "assert",
            lambda x, c: Assert("must hold")(x, c, x.shape[0] > 1),
            x,
            np.True_,
            static=False,
        ),
        case("diagonal-axes", partial(pt.diagonal, axis1=1, axis2=2), cube),
        case("nonzero", pt.nonzero, sample("int8", (3, 4))),
        case("nonzero-vector", pt.nonzero, sample("int8", (9,))),
    ]
    products = {
        "matrix-matrix": ((3, 4), (4, 2)), "matrix-vector": ((3, 4), (4,)),
        "vector-matrix": ((4,), (4, 2)), "vector-vector": ((4,), (4,)),
        "batched": ((2, 3, 4), (2, 4, 5)), "batched-broadcast": ((2, 3, 4), (4, 5)),
        "batched-two": ((2, 1, 3, 4), (3, 4, 2)),
    }  # fmt: skip
    for name, (left, right) in products.items():
        for kinds in (("float32", "float32"), ("float64", "float32"), ("int64", "int8")):
            operands = map(sample, kinds, (left, right))
            cases.append(case(f"matmul-{name}-{'-'.join(kinds)}", pt.matmul, *operands))
    cases += [
        case("dot", pt.dot, x, x.T),
        case("dot-gradient", lambda x, y: pytensor.grad((pt.dot(x, y) ** 2).sum(), [x, y]), x, x.T),
        case("batched-dot", _batched_dot, *(sample("float64", s) for s in ((2, 3, 4), (2, 4, 5)))),
    ]
    return cases


def _host_cases() -> list[Case]:
    """Arithmetic on shapes, which stays on the host."""
    x = sample("float32", (3, 4))

    def arithmetic(x: Variable) -> list[Variable]:
        n, m = Shape_i(0)(x), Shape_i(1)(x)
        return [
            n + m, n * m, n - m, m // n, m % n, -n, n / m, pt.maximum(n, m), pt.minimum(n, m),
            pt.eq(n, m), pt.neq(n, m), n < m, n > m, n <= m, n >= m, pt.switch(n < m, n, m),
            pt.and_(n < m, m > 1), pt.or_(n > m, m > 9), pt.xor(n < m, m > 1), pt.invert(n < m),
            pt.invert(n), pt.sqr(n), pt.abs(n - m), pt.sign(n - m), pt.clip(n, 5, 6),
            pt.second(n, m), pt.cast(n, "float32"), Elemwise(ps.identity)(n),
            pt.cast(n < m, "int64"),
        ]  # fmt: skip

    def vectors(x: Variable) -> list[Variable]:
        shape = x.shape
        return [
            shape, shape * 2, shape + shape, shape[0], shape[::-1], shape[1:] * shape,
            pt.prod(shape), pt.sum(shape), pt.max(shape), Min((0,))(shape),
            pt.all(shape > 2), pt.any(shape > 9), pt.stack([shape[0], shape[1] + 1]),
            pt.join(0, shape, shape), deep_copy_op(shape), view_op(shape),
            specify_shape(shape, (2,)), specify_shape(shape[shape[0] - 2 :], (1,)),
            shape.dimshuffle("x", 0), shape[0].dimshuffle("x"), shape[:1].dimshuffle(()),
            Assert("")(shape, shape[0] > 1), Assert("")(shape[0], shape[1] > 1),
            pt.cast(shape, "float32") / 2,
        ]  # fmt: skip

    def uses(x: Variable) -> list[Variable]:
        n = x.shape[0]
        return [
            x / n, x[: n - 1], x[n // 2], x.reshape((n * x.shape[1],)), pt.arange(n * 2),
            x * pt.cast(n, x.dtype), x.sum() / pt.prod(x.shape), x[n - 1, ::-1],
        ]  # fmt: skip

    def scalars(x: Variable) -> list[Variable]:
        first = scalar_from_tensor(x[0, 0])
        product = ps.mul(first, ps.constant(np.float32(0.1)))
        return [
            tensor_from_scalar(product),
            tensor_from_scalar(ps.exp(first)),
            tensor_from_scalar(scalar_from_tensor(x.shape[0])),
        ]

    functions = {"arithmetic": arithmetic, "vectors": vectors, "uses": uses, "scalars": scalars}
    return [case(f"host-{name}", function, x, static=False) for name, function in functions.items()]


def _subtensor_cases() -> list[Case]:
    x, cube = sample("float32", (5, 6)), sample("float64", (4, 5, 6))
    rows = np.array([3, 0, -1, 3])
    one = np.int64(1)
    indices: dict[str, Callable[[Variable], Any]] = {
        "integer": lambda x: x[2],
        "negative-integer": lambda x: x[-1, -2],
        "slice": lambda x: x[1:4, ::2],
        "negative-step": lambda x: x[::-1, 4:1:-2],
        "negative-step-empty": lambda x: x[1:4:-1],
        "negative-step-bounds": lambda x: x[100:-100:-2, -2:0:-1],
        "mixed": lambda x: x[-3:, 1],
        "nothing": lambda x: x[5:],
        "everything": lambda x: x[()],
        "newaxis": lambda x: x[None, :, None, 2],
        "rows": lambda x: x[rows],
        "rows-uint8": lambda x: x[np.uint8([3, 0, 1])],
        "matrix-of-rows": lambda x: x[rows.reshape(2, 2)],
        "pairs": lambda x: x[rows, [0, 1, -1, 2]],
        "rows-of-slice": lambda x: x[1:4, [0, 2]],
        "rows-of-reversed": lambda x: x[::-1, [0, 2]],
        "integer-and-rows": lambda x: x[2, [0, 2]],
        "outer": lambda x: x[rows[:, None], np.array([0, 2])],
        "mask": lambda x: x[x > 0],
        "mask-of-rows": lambda x: x[x[:, 0] > 0],
        "mask-of-columns": lambda x: x[:, x[0] > 0],
    }
    cases = []
    for name, index in indices.items():
        for static in (True, False):
            cases.append(case(f"index-{name}", index, x, static=static))
        if name in ("newaxis", "everything"):
            continue
        cases += _writing_cases(name, index, x)
    cases += [
        case(
            "index-apart",
            lambda x: [x[[0, 1], :, [2, 3]], x[:, [0, 1], [2, 3]], x[1, :, [0, 2]]],
            cube,
        ),
        case(
            "index-symbolic",
            lambda x, i: [x[i], x[i:], x[: i + 1, ::i], x[i, i], x[::-i], x[:, i:2]],
            x,
            one,
        ),
        case("index-scalar-tensor", lambda x, i: [x[:, i, [0, 1]], x[i, :, [0, 1]]], cube, one),
        case(
            "index-symbolic-slice",
            lambda x, i, r: [x[i:4, r], x[r, i:], x[::-i, r]],
            x,
            one,
            rows,
        ),
        case("index-many-axes", lambda x: [x[..., 1], x[1, ..., ::-1], x[:, 2]], cube),
        case(
            "choose-labels", lambda x, y: x[pt.arange(y.shape[0]), y], x, np.array([1, 0, 5, 2, 1])
        ),
    ]
    cases += cases_on(
        {
            "index-symbolic-rows": lambda x, r: [x[r], x[r, r], x[1:, r], x[pt.abs(r)]],
            "index-gradient": lambda x, r: pytensor.grad((x[r] ** 2).sum() + x[1:3].prod(), x),
            "index-rows-only": lambda x, r: [
                AdvancedSubtensor1()(x, r),
                AdvancedIncSubtensor1()(x, x[:4], r),
                AdvancedIncSubtensor1(set_instead_of_inc=True)(x, x[:2], r[:2]),
            ],
        },
        x,
        rows,
    )
    return cases


def _writing_cases(name: str, index: Callable[[Variable], Any], x: np.ndarray) -> list[Case]:
    def write(x: Variable) -> list[Variable]:
        part = index(x)
        y = pt.ones_like(part, dtype="float32") * 2
        twice = x * 2
        return [
            pt.set_subtensor(part, y),
            pt.inc_subtensor(part, y),
            pt.inc_subtensor(index(twice), y),
            pt.set_subtensor(index(x), np.float32(5)),
            pt.inc_subtensor(part, y, ignore_duplicates=True),
        ]

    def write_other_dtype(x: Variable, y: Variable) -> list[Variable]:
        return [pt.set_subtensor(index(x), y), pt.inc_subtensor(index(x), y)]

    return [
        case(f"write-{name}", write, x),
        case(f"write-{name}", write, x, static=False),
        case(f"write-{name}-int8", write_other_dtype, x, np.int8(3)),
    ]


def _network_cases() -> list[Case]:
    cases = []
    for dtype in FLOATS:
        for stride, pad, groups in ((1, 0, 1), (2, 1, 1), (3, 2, 2), (1, 1, 2)):
            x, w = sample(dtype, (2, 4, 9, 8)), sample(dtype, (6, 4 // groups, 3, 3))
            rows, columns = ((n + 2 * pad - 3) // stride + 1 for n in x.shape[2:])
            g = sample(dtype, (2, 6, rows, columns))
            props = (stride, pad, groups)
            name = f"{dtype}-{stride}-{pad}-{groups}"
            cases += [
                case(f"conv2d-{name}", Conv2d(*props), x, w, sample(dtype, (6,))),
                case(f"conv2d-input-{name}", Conv2dInputGrad(*props), x, w, g),
                case(f"conv2d-weight-{name}", Conv2dWeightGrad(*props), x, w, g),
                case(f"conv2d-bias-{name}", Conv2dBiasGrad(), g),
            ]
        x = sample(dtype, (2, 3, 7, 9))
        ties = np.round(x).astype(dtype)
        for size, stride in ((3, 2), (2, 2), (2, 3)):
            pooled = MaxPool2d(size, stride)
            back = MaxPool2dGrad(size, stride)
            cases += [
                case(f"pool-{dtype}-{size}-{stride}", pooled, x),
                case(f"pool-ties-{dtype}-{size}-{stride}", pooled, ties),
                case(
                    f"pool-gradient-{dtype}-{size}-{stride}",
                    lambda x, pooled=pooled, back=back: back(x, pooled(x)[1], pooled(x)[0] * 2),
                    x,
                ),
            ]
        x = sample(dtype, (3, 7, 4, 5))
        for size, alpha, beta, k in ((5, 1e-4, 0.75, 2.0), (3, 0.5, 0.75, 1.0), (5, 0.3, 0.6, 1.5)):
            props = (size, alpha, beta, k)
            cases += [
                case(f"lrn-{dtype}-{size}-{beta}", LRN(*props), x),
                case(
                    f"lrn-gradient-{dtype}-{size}-{beta}",
                    lambda x, g, props=props: LRNGrad(*props)(x, LRN(*props)(x)[1], g),
                    x,
                    x[::-1],
                ),
            ]
        cases += [
            *(
                case(
                    f"momentum-{dtype}-{m}-{decay}-{nesterov}",
                    MomentumStep(m, decay, nesterov),
                    *(x, x[::-1], x * x, np.dtype(dtype).type(0.1)),
                )
                for m, decay, nesterov in ((0.9, 0.01, False), (0.9, 0.0, True), (0.0, 0.01, False))
            ),
            *(
                case(
                    f"adam-{dtype}-{decay}-{is_decoupled}",
                    AdamStep(0.9, 0.99, decay, is_decoupled),
                    *(x, x[::-1], x * x, x[:, ::-1]),
                    *(np.dtype(dtype).type(number) for number in (0.1, 0.5, 1e-3)),
                )
                for decay, is_decoupled in ((0.01, False), (0.01, True), (0.0, True))
            ),
            case(f"lrn-few-channels-{dtype}", LRN(5, 0.5, 0.75, 1.0), x[:, :2]),
            case(f"relu-{dtype}", lambda x: [Relu()(x), Relu()(x * 2)], x),
            case(f"relu-gradient-{dtype}", lambda x, g: ReluGrad()(Relu()(x), g), x, x[::-1]),
        ]
        for rate, layer, units in ((0.5, 0, 8), (0.25, 1, 5)):
            mask = DropoutMask(rate, layer, units, dtype)
            values = (np.int64(2**62 + 12345), np.int64(3), np.array([0, 7, 2**31 + 5]))
            cases.append(case(f"dropout-{dtype}-{units}", mask, *values))
        for first in (1, 6, 12):
            mask = DropoutMask(0.25, 1, 5, dtype, first)
            cases.append(case(f"dropout-{dtype}-from-{first}", mask, *values))
        cases += _crop_cases(dtype)
        cases += _padded_cases(dtype)
        cases += _norm_cases(dtype)
    cases += large_convolutions()
    large = sample("float32", (3, 96, 55, 55))
    cases.append(case("lrn-large", LRN(5, 1e-4, 0.75, 2.0), large))
    return cases


def _padded_cases(dtype: str) -> list[Case]:
    """Windows and pads of two lengths, windows over the edge, and averages."""
    x = sample(dtype, (2, 4, 9, 8))
    cases = [case(f"pad-{dtype}", Pad2d((0, 1, 2, 3)), x)]
    for number, (filters, options) in enumerate(
        (
            ((6, 4, 3, 2), ((2, 1), (0, 2), 1, 1)),
            ((6, 2, 3, 3), (1, 2, 2, 2)),
            ((4, 1, 3, 3), ((1, 2), (1, 0), 4, (1, 2))),
        )
    ):
        w, b = sample(dtype, filters), sample(dtype, filters[:1])

        def gradients(x: Any, w: Any, b: Any, options: Any = options) -> list[Variable]:
            g = Conv2d(*options)(x, w, b) * 2
            return [Conv2dInputGrad(*options)(x, w, g), Conv2dWeightGrad(*options)(x, w, g)]

        cases += [
            case(f"conv2d-pairs-{dtype}-{number}", Conv2d(*options), x, w, b),
            case(f"conv2d-pairs-gradients-{dtype}-{number}", gradients, x, w, b),
        ]
    for number, options in enumerate(
        ((3, 2, 1, False), (3, 2, 0, True), ((2, 3), 2, (1, 0), True))
    ):

        def pools(x: Any, options: Any = options) -> list[Variable]:
            y, argmax = MaxPool2d(*options)(x)
            return [y, argmax, MaxPool2dGrad(*options)(x, argmax, y * 2)]

        cases.append(case(f"pool-padded-{dtype}-{number}", pools, x))
        for count_pad in (False, True):

            def means(x: Any, options: Any = (*options, count_pad)) -> list[Variable]:
                y = AveragePool2d(*options)(x)
                return [y, AveragePool2dGrad(*options)(x, y * 2)]

            cases.append(case(f"average-{dtype}-{number}-{count_pad}", means, x))
    return cases


def _norm_cases(dtype: str) -> list[Case]:
    cases = []
    for shape in ((7, 5, 4, 3), (7, 5), (6, 40, 9, 9), (1, 3)):
        x, scale, shift = (sample(dtype, s) for s in (shape, shape[1:2], shape[1:2]))
        name = f"{dtype}-{'x'.join(map(str, shape))}"
        statistics = np.abs(scale) + 1
        infer = BatchNormInference(1e-3)
        cases.append(case(f"norm-inference-{name}", infer, x, scale, shift, shift, statistics))
        for rows in (2, 7):

            def norm(x: Any, a: Any, b: Any, *valid: Any, rows: int = rows) -> list[Variable]:
                y, mean, variance, *saved = BatchNorm(rows, 1e-3)(x, a, b, *valid)
                gradients = BatchNormGrad(rows)(x, a, y * x, *saved, *valid)
                return [y, mean, variance, *saved, *gradients]

            cases.append(case(f"norm-{name}-{rows}", norm, x, scale, shift))
            for valid in sorted({0, len(x) // 2, len(x)}):
                operands = (x, scale, shift, np.int64(valid))
                cases.append(case(f"norm-{name}-{rows}-{valid}", norm, *operands))

        def by_sums(x: Any, a: Any, b: Any, *valid: Any) -> list[Any]:
            sums, count = ChannelSums()(x, b, *valid), np.float64(7)
            y, mean, variance, inverse = BatchNormBySums(1e-3)(x, a, b, b, sums, count, *valid)
            g = y * x
            slopes = ChannelGradientSums()(x, g, mean, inverse, *valid)
            dx = BatchNormBySumsGrad()(x, g, a, mean, inverse, slopes, count, *valid)
            return [sums.astype(x.dtype), y, mean, variance, inverse, slopes, dx]

        cases.append(case(f"norm-by-sums-{name}", by_sums, x, scale, shift))
        valid = np.int64(len(x) // 2)
        cases.append(case(f"norm-by-sums-{name}-valid", by_sums, x, scale, shift, valid))

        def rectified(x: Any, a: Any, b: Any, *valid: Any) -> list[Variable]:
            y, mean, variance, *saved = BatchNorm(2, 1e-3, relu=True)(x, a, b, *valid)
            gradients = BatchNormGrad(2, relu=True)(x, a, b, y * x, *saved, *valid)
            added = BatchNorm(2, 1e-3, relu=True, adds=True)(x, a, b, x[:, ::-1], *valid)
            return [y, mean, variance, *gradients, *added]

        cases.append(case(f"norm-relu-{name}", rectified, x, scale, shift))
        valid = np.int64(len(x) // 2)
        cases.append(case(f"norm-relu-{name}-valid", rectified, x, scale, shift, valid))
        keys = (np.int64(2**62 + 12345), np.int64(3), np.arange(len(x)) + 2**31)
        cases.append(case(f"dropout-fused-{name}", Dropout(0.3, 1, 1.5), x, *keys))
    return cases


def large_convolutions(of_filters: bool = False) -> list[Case]:
    """Convolutions of several of Winograd's tiles, and gradients; of filters if asked for."""
    cases = []
    for side, pad, groups, batch, channels, image in (
        (5, (2, 2), 2, 8, 64, (29, 29)),
        (5, (1, 1), 1, 8, 32, (31, 31)),
        (3, (1, 1), 1, 16, 32, (13, 13)),
        (3, (0, 2), 2, 16, 32, (29, 17)),
    ):
        x = sample("float32", (batch, channels, *image))
        w = sample("float32", (channels, channels // groups, side, side))
        area = [n + 2 * p - side + 1 for n, p in zip(image, pad, strict=True)]
        g = sample("float32", (batch, channels, *area))
        props = (1, pad, groups)
        name = f"large-{side}-{pad[0]}-{groups}"
        cases += [
            case(f"conv2d-{name}", Conv2d(*props), x, w, sample("float32", (channels,))),
            case(f"conv2d-input-{name}", Conv2dInputGrad(*props), x, w, g),
        ]
        if of_filters:
            cases.append(case(f"conv2d-weight-{name}", Conv2dWeightGrad(*props), x, w, g))
    return cases


def _crop_cases(dtype: str) -> list[Case]:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (4, 9, 9, 3), dtype=np.uint8)
    mean = rng.uniform(0, 255, (3, 9, 9)).astype(dtype)
    origins = np.array([[0, 0], [4, 0], [0, 4], [3, 2]])
    mirrored = np.uint8([0, 1, 1, 0])
    colours = rng.normal(0, 9, (4, 3)).astype("float32")
    whole, cropped = CropMirror(5, False, dtype), CropMirror(5, True, dtype)
    return [
        case(f"crop-{dtype}", whole, pictures, mean, origins, mirrored),
        case(f"crop-coloured-{dtype}", whole, pictures, mean, origins, mirrored, colours),
        case(f"crop-done-{dtype}", cropped, pictures[:, :5, :5], mean, origins, mirrored),
    ]


LOWERING_CASES: list[Case] = [
    *_network_cases(),
    *_elemwise_cases(),
    _composite(),
    *_reduction_cases(),
    *_tensor_cases(),
    *_host_cases(),
    *_subtensor_cases(),
]
