"""Small graphs on complex numbers, with values to run them on."""

from functools import partial
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.math import ProdWithoutZeros

from tests.support.linalg_cases import normal
from tests.support.lowering_cases import Case, case, sample

KINDS = ("complex64", "complex128")
PAIRS = (
    ("complex64", "complex64"), ("complex128", "complex64"), ("complex64", "float64"),
    ("int8", "complex64"), ("bool", "complex128"), ("complex128", "int64"),
)  # fmt: skip


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return normal(dtype, *shape) if dtype in KINDS else sample(dtype, shape, 1, 4)


def _elementwise_cases() -> list[Case]:
    cases: list[Case] = []
    for name in ["add", "mul", "sub", "true_div", "pow", "eq", "neq"]:
        for left, right in PAIRS:
            if name == "sub" and "bool" in (left, right):
                continue
            operands = values(left, (3, 4)), values(right, (4,))
            cases.append(case(f"{name}-{left}-{right}", getattr(pt, name), *operands))
    names = [
        "abs",
        "neg",
        "sqr",
        "sqrt",
        "reciprocal",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "cos",
        "sin",
        "tan",
        "cosh",
        "sinh",
        "tanh",
        "arccos",
        "arcsin",
        "arctan",
        "arccosh",
        "arcsinh",
        "arctanh",
        "isnan",
        "isinf",
        "real",
        "imag",
        "angle",
        "conj",
    ]
    for dtype in KINDS:
        x = np.array([1 + 2j, -3j, -2.5, 0.25 + 1j, 2, -0.5 - 0.5j]).astype(dtype)
        cases += [case(f"{name}-{dtype}", getattr(pt, name), x) for name in names]
        real = x.real.astype(x.real.dtype)
        cases.append(case(f"parts-of-real-{dtype}", _parts, real))
        cases.append(case(f"polar-{dtype}", pt.complex_from_polar, np.abs(real), x.imag.copy()))
        cases.append(case(f"complex-{dtype}", pt.complex, real, x.imag.copy()))
    matrix = normal("complex128", 3, 4)
    cases += [
        case("complex-integers", pt.complex, np.int8([1, 2]), np.int64([3, -4])),
        case("parts-of-integers", _parts, np.int64([3, 0, -4])),
        case("complex-zero-power", pt.pow, np.zeros(3, "complex128"), np.array([0, 2, 1.5])),
        case("complex-numbers", _with_numbers, matrix),
        case("complex-switch", pt.switch, sample("bool", (4,)), matrix, np.float32(2)),
        case("complex-casts", _casts, sample("float32", (3,)), sample("int8", (3,))),
        case("complex-real-view", lambda x: [pt.real(x) * 2, pt.imag(x), x + 1], matrix),
    ]
    return cases


def _parts(x: Variable) -> list[Variable]:
    return [Elemwise(op)(x) for op in (ps.real, ps.imag, ps.angle, ps.conj)]


def _with_numbers(x: Variable) -> list[Variable]:
    return [
        x * 2, 2 - x, x + 1j, pt.eq(x, 0), x**2, x**-1, x / 2j, (1 + 1j) ** x, x**0.5,
        pt.switch(pt.eq(x, x), x, 1j), pt.second(x, 2j),
    ]  # fmt: skip


def _casts(x: Variable, y: Variable) -> list[Variable]:
    return [pt.cast(v, kind) for v in (x, y) for kind in KINDS]


def _tensor_cases() -> list[Case]:
    x, y = normal("complex64", 3, 4), normal("complex128", 4, 3)
    reductions: dict[str, Any] = {"sum": pt.sum, "prod": pt.prod, "mean": pt.mean}
    cases = [
        case(f"{name}-{kind}-{axis}", partial(op, axis=axis), normal(kind, 2, 3, 4))
        for name, op in reductions.items()
        for kind in KINDS
        for axis in (None, (0, 2))
    ]
    cases += [
        case("complex-cumulative", lambda x: [pt.cumsum(x, 0), pt.cumprod(x, 1)], x),
        case("complex-no-zeros", ProdWithoutZeros(axis=1), x * (np.abs(x) > 1)),
        case("complex-dot", pt.dot, x, y),
        case("complex-matmul", pt.matmul, np.stack([x, x]), y),
        case("complex-shapes", _moved, x),
        case("complex-writes", _written, x, y[0]),
        case("complex-vector", lambda a, b: pt.stack([a, b, 1j]), np.complex64(1j), np.float32(2)),
    ]
    return cases


def _moved(x: Variable) -> list[Variable]:
    return [
        x.T, x[::-1, 1], x[[0, 2]], pt.alloc(x[0], 2, 4), pt.zeros_like(x), pt.concatenate([x, x]),
        pt.diag(x[0]), pt.eye(3, dtype="complex64"), pt.tril(x), x[pt.abs(x) > 1],
    ]  # fmt: skip


def _written(x: Variable, y: Variable) -> list[Variable]:
    return [
        pt.set_subtensor(x[0, :3], pt.cast(pt.real(y), "float32")),
        pt.inc_subtensor(x[[0, 0, 1]], x[:1]),
        pt.fill_diagonal(x, np.complex64(2j)),
    ]


COMPLEX_CASES: list[Case] = [*_elementwise_cases(), *_tensor_cases()]
