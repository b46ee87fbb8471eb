"""Small graphs of selection, special functions and Fourier transforms, with values to run them on.

`GPU_CASES` are those of which a CPU computes the first node by its `perform`.
"""

from functools import partial

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.basic import AllocDiag, Choose, PermuteRowElements
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.extra_ops import (
    FillDiagonal,
    FillDiagonalOffset,
    Repeat,
    SearchsortedOp,
    Unique,
)
from pytensor.tensor.fft import IRFFTOp, RFFTOp
from pytensor.tensor.fourier import Fourier
from pytensor.tensor.signal.conv import Convolve1d, Convolve2d

from tests.support.lowering_cases import Case, case, sample

SORTED = {
    "float64": np.array([-np.inf, -1, 0, 0, 2, 3, 3, np.inf, np.nan, np.nan]),
    "float32": np.float32([-1, 0, 0, 2, 3, 3]),
    "int8": np.int8([-7, 0, 0, 2, 3, 3]),
    "uint16": np.uint16([0, 0, 2, 3, 3, 60000]),
}


def _selection_cases() -> list[Case]:
    cases: list[Case] = []
    wanted = {
        "float64": np.array([[-np.inf, np.nan, 3], [np.inf, -0.0, 2.5]]),
        "int64": np.int64([[-9, 0, 3], [70000, 2, 1]]),
    }
    for side in ("left", "right"):
        op = SearchsortedOp(side=side)
        for kind, x in SORTED.items():
            for name, v in wanted.items():
                cases.append(case(f"searchsorted-{side}-{kind}-{name}", op, x, v))
        order = np.array([2, 0, 1, 3])
        unsorted = np.array([0, 1, -1, np.nan])
        cases.append(case(f"searchsorted-{side}-sorter", op, unsorted, np.arange(-2.0, 3), order))
        cases.append(case(f"searchsorted-{side}-empty", op, np.zeros(0), np.arange(2.0)))
        bools = np.array([False, False, True])
        cases.append(case(f"searchsorted-{side}-bool", op, bools, bools))
    for shape in ((3, 4), (4, 3), (3, 3, 3), (0, 2)):
        x = sample("float32", shape)
        cases.append(case(f"fill-diagonal-{shape}", _filled, x, np.float32(5)))
    for offset in (0, 1, -1, -2):
        x, v = sample("int64", (3, 4)), np.int64(9)
        op = FillDiagonalOffset()
        cases.append(case(f"fill-diagonal-offset-{offset}", op, x.T, v, np.int64(offset)))
        cases.append(
            case(
                f"alloc-diagonal-{offset}",
                AllocDiag(axis1=0, axis2=2, offset=offset),
                sample("int8", (2, 3)),
            )
        )
    which, choices = np.int64([[0, 2], [1, 0]]), sample("float32", (3, 2, 2))
    numbers = np.arange(3) * 5
    for mode, places in (("raise", which), ("wrap", which - 4), ("clip", which * 3 - 2)):
        cases.append(case(f"choose-{mode}", Choose(mode), places, choices))
        cases.append(case(f"choose-{mode}-vector", Choose(mode), places[0], choices))
        cases.append(case(f"choose-{mode}-rows", Choose(mode), places.astype("int8"), numbers))
    for dtype in ("uint16", "uint32", "uint64"):
        x = sample(dtype, (3, 4))
        cases.append(case(f"choose-{dtype}", Choose("clip"), which[0], x[:, :2]))
        for inverse in (False, True):
            op = PermuteRowElements(inverse)
            cases.append(case(f"permute-{inverse}-{dtype}", op, x, np.int64([3, 0, 2, 1])))
    x = sample("float64", (2, 3, 4))
    for inverse in (False, True):
        op = PermuteRowElements(inverse)
        orders = np.stack([np.random.default_rng(i).permutation(4) for i in range(6)])
        cases += [
            case(f"permute-{inverse}", op, x, orders.reshape(2, 3, 4)),
            case(f"permute-{inverse}-one", op, x, orders[0] - 4),
            case(f"permute-{inverse}-spread", op, x[:1], orders.reshape(2, 3, 4)[:, :1]),
            case(f"permute-{inverse}-dynamic", op, x, orders[:3], static=False),
        ]
    return cases


def _filled(x: Variable, value: Variable) -> list[Variable]:
    return [FillDiagonal()(x, value), FillDiagonal()(x * 2, value)]


def _special_cases() -> list[Case]:
    functions = {
        "erfcx": pt.erfcx, "i0": pt.i0, "i1": pt.i1, "trigamma": pt.tri_gamma,
        "erfcinv": lambda x: pt.erfcinv(pt.abs(x) / 20),
    }  # fmt: skip
    cases: list[Case] = []
    for name, function in functions.items():
        for dtype in ("float32", "float64", "int8"):
            x = np.array([-5.5, -1, -0.25, 0, 1e-3, 0.5, 1, 2, 3, 8, 20]).astype(dtype)
            cases.append(case(f"{name}-{dtype}", function, x))
    special = np.array([np.nan, np.inf, -np.inf, -0.0])
    cases.append(
        case("special", lambda x: [pt.erfcx(x), pt.i0(x), pt.i1(x), pt.tri_gamma(x[:2])], special)
    )
    return cases


def _transform_cases() -> list[Case]:
    cases: list[Case] = []
    for dtype in ("float32", "float64"):
        x = sample(dtype, (3, 6, 5))
        cases += [
            case(f"rfft-{dtype}", lambda x: [RFFTOp()(x), RFFTOp()(x, (4, 8))], x),
            case(
                f"irfft-{dtype}",
                lambda x: [IRFFTOp()(RFFTOp()(x), (6, 5)), IRFFTOp()(RFFTOp()(x))],
                x,
            ),
        ]
    # Of float32 the Op declares complex128 and gives complex64.
    cases.append(case("fourier", lambda x: [Fourier()(x, 4, 1), Fourier()(x, 7, 2)], x))
    cases.append(case("fourier-integers", lambda x: Fourier()(x, 4, 0), sample("int8", (4,))))
    return cases


def _gpu_cases() -> list[Case]:
    cases: list[Case] = []
    x = sample("int64", (3, 4), -2, 3)
    for axis, counts in ((0, [2, 0, 1]), (1, [3]), (0, [0]), (1, [1, 0, 2, 1])):
        cases.append(case(f"repeat-{axis}-{counts}", Repeat(axis=axis), x, np.array(counts)))
    floats = np.array([[3, np.nan, -1], [-0.0, np.nan, 3], [0.0, 3, np.inf]])
    for flags in ((False, False, False), (True, True, True), (False, True, False)):
        cases += [
            case(f"unique-{flags}", Unique(*flags), x),
            case(f"unique-{flags}-nan", Unique(*flags), floats),
            case(f"unique-{flags}-rows", Unique(*flags, axis=0), x[[0, 1, 0, 2]] % 2),
            case(f"unique-{flags}-columns", Unique(*flags, axis=1), x % 2),
            case(f"unique-{flags}-empty", Unique(*flags), np.zeros(0)),
        ]
    for dtype in ("float32", "float64"):
        signals, filters = sample(dtype, (2, 3, 9)), sample(dtype, (2, 1, 4))
        pictures, stamps = sample(dtype, (2, 6, 7)), sample(dtype, (2, 3, 2))
        for full in (True, False):
            one = partial(_convolved, Convolve1d(), full)
            cases += [
                case(f"convolve1d-{dtype}-{full}", one, signals[0, 0], filters[0, 0]),
                case(f"convolve1d-{dtype}-{full}-short", one, filters[0, 0], signals[0, 0]),
                case(f"convolve1d-{dtype}-{full}-many", one, signals, filters),
            ]
            for method in ("direct", "fft"):
                two = partial(_convolved, Convolve2d(method=method), full)
                name = f"convolve2d-{dtype}-{full}-{method}"
                cases += [
                    case(name, two, pictures[0], stamps[0]),
                    case(f"{name}-many", two, stamps, pictures),
                ]
    return cases


def _convolved(op: Convolve1d | Convolve2d, full: bool, x: Variable, y: Variable) -> Variable:
    return Blockwise(op)(x, y, pt.constant(full, dtype="bool"))


SELECTION_CASES: list[Case] = [*_selection_cases(), *_special_cases(), *_transform_cases()]
GPU_CASES: list[Case] = _gpu_cases()
