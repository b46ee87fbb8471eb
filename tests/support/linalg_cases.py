"""Small graphs of linear algebra, with matrices to run them on.

Each graph has many Ops on the same matrices: to compile one is most of a case's time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.linalg.constructors import BlockDiagonal
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.decomposition.eigen import Eig, Eigh, Eigvalsh
from pytensor.tensor.linalg.decomposition.lu import LU, LUFactor, PivotToPermutations
from pytensor.tensor.linalg.decomposition.qr import QR
from pytensor.tensor.linalg.decomposition.svd import SVD
from pytensor.tensor.linalg.inverse import MatrixInverse, MatrixPinv, TensorInv
from pytensor.tensor.linalg.products import Expm
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.lstsq import TensorSolve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.linalg.summary import Det, SLogDet

from tests.support.lowering_cases import Case, case, sample

Build = Callable[..., list[Variable]]

# The signatures of those that do not name it themselves.
_SIGNATURES = {Eigh: "(m,m)->(m),(m,m)", Eigvalsh: "(m,m)->(m)"}


def normal(dtype: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(len(shape) + sum(shape))
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape) if dtype.startswith("complex") else x).astype(dtype)


def square(dtype: str, *batch: int, n: int = 4) -> np.ndarray:
    """Regular matrices with other numbers in each triangle."""
    return (normal(dtype, *batch, n, n) + 3 * np.eye(n)).astype(dtype)


def positive(dtype: str, *batch: int, n: int = 4) -> np.ndarray:
    x = normal(dtype, *batch, n, n)
    return (x @ x.conj().swapaxes(-1, -2) + n * np.eye(n)).astype(dtype)


def half(x: np.ndarray, lower: bool) -> np.ndarray:
    """The matrices with numbers in the other triangle that must not be read."""
    return np.tril(x) + np.triu(x * 7, 1) if lower else np.triu(x) + np.tril(x * 7, -1)


def transposed(x: np.ndarray) -> np.ndarray:
    """The same matrices, laid out by columns."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def apply(op: Any, *inputs: Variable) -> list[Variable]:
    """Apply an Op of single matrices, alone or by Blockwise."""
    if inputs[0].type.ndim > 2:
        op = Blockwise(op, signature=_SIGNATURES.get(type(op)))
    outputs: list[Variable] = op(*inputs, return_list=True)
    return outputs


def _all(*ops: Any) -> Build:
    return lambda *inputs: [output for op in ops for output in apply(op, *inputs)]


def _everywhere(name: str, build: Build, make: Callable[..., Sequence[np.ndarray]]) -> list[Case]:
    """Cases of one and many matrices, by rows and by columns, of unknown lengths.

    `make` takes the dtype and the leading lengths.
    """
    columns = [transposed(x) if x.ndim > 1 else x for x in make("complex64")]
    many = make("float64", 2)
    return [
        case(f"{name}-float32-many", build, *make("float32", 2, 3)),
        case(f"{name}-complex128-many", build, *make("complex128", 2, 1)),
        case(f"{name}-columns", build, *columns),
        case(f"{name}-many-columns", build, *(transposed(x) for x in many)),
        case(f"{name}-dynamic", build, *many, static=False),
    ]


def _conjugate(x: Variable) -> Variable:
    return pt.conj(x).mT if x.type.dtype.startswith("complex") else x.mT


def _svd(x: Variable) -> list[Variable]:
    """What is unique in the decomposition, and what the vectors promise."""
    results = apply(SVD(compute_uv=False), x)
    for full in (True, False):
        u, s, vh = apply(SVD(full_matrices=full), x)
        k = 3
        product = (u[..., :, :k] * s[..., None, :]) @ vh[..., :k, :]
        results += [s, product, _conjugate(u) @ u, vh @ _conjugate(vh)]
    return results


def _eigen(x: Variable) -> list[Variable]:
    w, v = apply(Eig(), x)
    results = [10 + x @ v - v * w[..., None, :], *(f(w, axis=-1) for f in (pt.sum, pt.prod))]
    for lower in (True, False):
        results += apply(Eigvalsh(lower=lower), x)
        if not x.type.dtype.startswith("complex"):
            w, v = apply(Eigh(lower=lower), x)
            results += [w, (v * w[..., None, :]) @ v.mT, v.mT @ v]
    return results


def _decomposition_cases() -> list[Case]:
    cases: list[Case] = []
    modes = [QR(mode=mode) for mode in ("full", "economic", "r", "raw")]
    # Of a raw factorization that is not square the Op's signature is wrong.
    rectangular = _all(*modes[:3])
    for shape in ((5, 3), (3, 5)):
        cases += _everywhere(
            f"qr-svd-{shape}",
            lambda x: [*rectangular(x), *_svd(x)],
            lambda *a, shape=shape: [normal(*a, *shape)],
        )
        cases.append(case(f"qr-raw-{shape}", QR(mode="raw"), normal("float64", *shape)))
        for op in (LU(), LU(permute_l=True), LU(p_indices=True)):
            cases.append(case(f"{op}-{shape}", op, normal("float64", *shape)))
    factors = _all(*modes, LU(), LU(permute_l=True), LU(p_indices=True), LUFactor())
    cases += _everywhere("square", lambda x: [*factors(x), *_eigen(x)], lambda *a: [square(*a)])
    for lower in (True, False):
        x = half(positive("complex64", 2), lower)
        cholesky = Cholesky(lower=lower)
        cases.append(case(f"cholesky-{lower}", _all(cholesky), transposed(x)))
        cases.append(case(f"cholesky-{lower}-real", _all(cholesky), x.real))
        cases.append(case(f"cholesky-{lower}-one", cholesky, x[0].astype("complex128")))
    pivots = np.int32([[2, 3, 2, 3], [0, 1, 2, 3], [3, 3, 3, 3]])
    for inverse in (True, False):
        op = PivotToPermutations(inverse=inverse)
        cases.append(case(f"pivots-{inverse}", op, pivots[0]))
        cases.append(case(f"pivots-{inverse}-many", Blockwise(op), pivots))
    return cases


def _systems(lower: bool, b_ndim: int) -> Build:
    props = {"lower": lower, "b_ndim": b_ndim}
    return _all(
        *(Solve(assume_a=kind, **props) for kind in ("gen", "sym", "her")),
        *(SolveTriangular(unit_diagonal=unit, **props) for unit in (True, False)),
        CholeskySolve(**props),
    )


def _positive(lower: bool) -> Build:
    return _all(Solve(assume_a="pos", lower=lower, b_ndim=2))


def _solver_cases() -> list[Case]:
    cases: list[Case] = []
    for lower in (True, False):
        build = _systems(lower, 2)

        def make(*a: Any, lower: bool = lower) -> list[np.ndarray]:
            return [half(positive(*a), lower), normal(*a, 4, 2)]

        cases += _everywhere(f"solve-{lower}", build, make)
        a, b = make("complex128")
        cases += [
            # PyTensor rewrites this solution, and then reads either triangle.
            case(f"solve-positive-{lower}", _positive(lower), positive("float64", 2), b.real[None]),
            case(f"solve-positive-{lower}-one", _positive(lower), positive("complex128"), b),
            case(f"solve-{lower}-vector", _systems(lower, 1), a, b[:, 0]),
            case(f"solve-{lower}-vectors", _systems(lower, 1), np.stack([a, 2 * a]), b[None, :, 0]),
            case(f"solve-{lower}-repeated", build, a[None], np.stack([b, b * 2])),
            case(f"solve-{lower}-mixed", build, a.real, b.real.astype("float32")),
            case(f"solve-{lower}-integers", build, a.real, np.arange(8).reshape(4, 2)),
        ]
    singular = np.tril(np.stack([np.ones((3, 3)), np.eye(3), np.zeros((3, 3))]))
    # As wide as the matrix: otherwise the Op's result for a singular matrix has a wrong shape.
    solve = _all(*(op(b_ndim=2, lower=True) for op in (Solve, SolveTriangular)))
    cases.append(case("solve-singular", solve, singular, singular))
    return cases


def _function_cases() -> list[Case]:
    functions = _all(MatrixInverse(), Det(), SLogDet(), Expm(), MatrixPinv(hermitian=False))
    cases = _everywhere("functions", functions, lambda *a: [square(*a) / 3])
    for shape in ((5, 3), (3, 5)):
        pinv = MatrixPinv(hermitian=False)
        cases.append(case(f"pinv-{shape}", Blockwise(pinv), normal("complex64", 2, *shape)))
    hermitian = _all(MatrixPinv(hermitian=True))
    for dtype in ("float32", "complex128"):
        cases.append(case(f"pinv-hermitian-{dtype}", hermitian, positive(dtype, 2)))
    exact = _all(MatrixInverse(), Det(), SLogDet())
    singular = np.stack([np.ones((3, 3)), np.eye(3), np.full((3, 3), np.nan)])
    cases += [
        case("functions-integers", exact, np.int64([[1, 2], [3, 5]])),
        case("functions-empty", exact, np.ones((0, 3, 3))),
        case("det-singular", _all(Det()), singular),
        case("slogdet-singular", _all(SLogDet()), singular[:2]),
        case("pinv-singular", _all(MatrixPinv(hermitian=False)), singular[:2]),
    ]
    for dtype in ("float32", "float64"):
        x = square(dtype, n=6).reshape(6, 2, 3)
        cases += [
            case(f"tensorinv-{dtype}", TensorInv(ind=1), x),
            case(f"tensorsolve-{dtype}", TensorSolve(), x, normal(dtype, 6)),
            case(f"tensorsolve-{dtype}-axes", TensorSolve(axes=(0,)), x, normal(dtype, 2, 3)),
        ]
    blocks = [sample("float32", (2, 3)), sample("int8", (1, 1)), normal("complex64", 3, 0)]
    many = [np.stack([blocks[0]] * 2), blocks[1][None], np.stack([blocks[2]] * 2)]
    cases += [
        case("block-diagonal", BlockDiagonal(3), *blocks),
        case("block-diagonal-many", Blockwise(BlockDiagonal(3)), *many),
    ]
    return cases


def _gradients(x: Variable) -> list[Variable]:
    costs = [
        pt.linalg.cholesky(x).sum(), pt.linalg.slogdet(x)[1].sum(), pt.linalg.inv(x).sum(),
        pt.linalg.solve(x, x[..., ::-1, :]).sum(), pt.linalg.eigh(x)[0].prod(axis=-1).sum(),
        (pt.linalg.qr(x)[1] ** 2).sum(),
        pt.linalg.solve(x, x[..., 0], assume_a="pos", b_ndim=1).sum(), pt.linalg.expm(x / 9).sum(),
    ]  # fmt: skip
    return [pytensor.grad(cost, x) for cost in costs]


LINALG_CASES: list[Case] = [
    *_decomposition_cases(),
    *_solver_cases(),
    *_function_cases(),
    case("linalg-gradients", _gradients, positive("float64")),
]
