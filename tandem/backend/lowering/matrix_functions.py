"""Linear systems, inverses, determinants and exponentials, of one matrix or of many."""

from collections.abc import Callable
from typing import Any

import torch
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.tensor.linalg.constructors import BlockDiagonal
from pytensor.tensor.linalg.inverse import MatrixInverse, MatrixPinv, TensorInv
from pytensor.tensor.linalg.products import Expm
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.lstsq import TensorSolve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.linalg.summary import Det, SLogDet

from tandem.backend.lowering.blockwise import lowers_batched
from tandem.backend.lowering.decompositions import as_linalg_error, nan_where, require_square
from tandem.backend.lowering.registry import Lowering, computed, lower, torch_dtype, unsupported

Tensor = torch.Tensor
Solver = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_PINV_TOLERANCE = 1e-15  # of NumPy, whatever the dtype


def _system(op: SolveBase, node: Apply, solve: Solver) -> Lowering:
    """Lower the solution of A x = b, by a function that also reports which matrices it failed on.

    `solve` takes b as a matrix.
    """
    dtype = torch_dtype(node.outputs[0])
    vector = op.b_ndim == 1

    def call(a: Tensor, b: Tensor) -> Tensor:
        require_square(a, "The matrix of a linear system")
        if a.shape[-1] != b.shape[-1 if vector else -2]:
            raise ValueError(f"incompatible dimensions ({tuple(a.shape)} and {tuple(b.shape)})")
        x, failed = solve(a.to(dtype), b.to(dtype).unsqueeze(-1) if vector else b.to(dtype))
        x = nan_where(failed, x).resolve_conj()
        return x.squeeze(-1) if vector else x

    return computed(call, certain=False)


def _mirrored(a: Tensor, lower: bool, conjugate: bool) -> Tensor:
    """Fill one triangle of a matrix with the other."""
    half = torch.tril(a, -1) if lower else torch.triu(a, 1)
    other = half.mT.conj() if conjugate else half.mT
    diagonal = torch.diagonal(a, dim1=-2, dim2=-1)
    return half + other + torch.diag_embed(diagonal.real if conjugate else diagonal)


@lowers_batched(Solve)
def lower_solve(op: Solve, node: Apply, device: torch.device) -> Lowering:
    if op.assume_a in ("tridiagonal", "banded"):
        raise unsupported(node, f"PyTorch has no solver for a {op.assume_a} matrix")

    def general(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if op.assume_a != "gen":
            a = _mirrored(a, op.lower, conjugate=a.is_complex() and op.assume_a == "her")
        x, info = torch.linalg.solve_ex(a, b)
        return x, info != 0

    def positive(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = torch.linalg.cholesky_ex(a, upper=not op.lower)
        return torch.cholesky_solve(b, factor, upper=not op.lower), info != 0

    return _system(op, node, positive if op.assume_a == "pos" else general)


@lowers_batched(SolveTriangular)
def lower_solve_triangular(op: SolveTriangular, node: Apply, device: torch.device) -> Lowering:
    upper, unit = not op.lower, op.unit_diagonal

    def solve(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.diagonal(a, dim1=-2, dim2=-1) == 0
        singular = torch.zeros_like(zeros[..., 0]) if unit else zeros.any(-1)
        return torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=unit), singular

    return _system(op, node, solve)


@lowers_batched(CholeskySolve)
def lower_cholesky_solve(op: CholeskySolve, node: Apply, device: torch.device) -> Lowering:
    upper = not op.lower

    def solve(factor: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        never = torch.zeros(factor.shape[:-2], dtype=torch.bool, device=factor.device)
        return torch.cholesky_solve(b, factor, upper=upper), never

    return _system(op, node, solve)


# NumPy's LinAlgError is a ValueError too, which is what Det raises for a single matrix.
_FUNCTIONS: dict[type[Op], Callable[[Tensor], Any]] = {
    MatrixInverse: torch.linalg.inv,
    Det: torch.linalg.det,
    SLogDet: torch.linalg.slogdet,
    Expm: torch.linalg.matrix_exp,
}


@lowers_batched(*_FUNCTIONS)
def lower_function(op: Op, node: Apply, device: torch.device) -> Lowering:
    function, dtype = _FUNCTIONS[type(op)], torch_dtype(node.outputs[0])
    call = as_linalg_error(lambda x: function(x.to(dtype)))
    return Lowering(call, computes=True, opaque=True)


@lowers_batched(MatrixPinv)
def lower_pinv(op: MatrixPinv, node: Apply, device: torch.device) -> Lowering:
    dtype, hermitian = torch_dtype(node.outputs[0]), op.hermitian

    def pinv(x: Tensor) -> Tensor:
        inverse = torch.linalg.pinv(x.to(dtype), rtol=_PINV_TOLERANCE, hermitian=hermitian)
        return inverse.resolve_conj()

    return Lowering(as_linalg_error(pinv), computes=True, opaque=True)


@lower.register(TensorInv)
def lower_tensor_inverse(
    op: TensorInv, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    if not (dtype.is_floating_point or dtype.is_complex):
        raise unsupported(node, "the inverse of integers is no integer")
    call = as_linalg_error(lambda x: torch.linalg.tensorinv(x, op.ind))
    return Lowering(call, computes=True, opaque=True)


@lower.register(TensorSolve)
def lower_tensor_solve(
    op: TensorSolve, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    if not (dtype.is_floating_point or dtype.is_complex):
        raise unsupported(node, "the solution for integers is no integer")
    call = as_linalg_error(
        lambda a, b: torch.linalg.tensorsolve(a.to(dtype), b.to(dtype), dims=op.axes)
    )
    return Lowering(call, computes=True, opaque=True)


@lowers_batched(BlockDiagonal)
def lower_block_diagonal(op: BlockDiagonal, node: Apply, device: torch.device) -> Lowering:
    dtype = torch_dtype(node.outputs[0])

    def block_diagonal(*blocks: Tensor) -> Tensor:
        rows, columns = (sum(x.shape[axis] for x in blocks) for axis in (-2, -1))
        first = blocks[0]
        out = first.new_zeros((*first.shape[:-2], rows, columns), dtype=dtype)
        row = column = 0
        for x in blocks:
            below, right = row + x.shape[-2], column + x.shape[-1]
            out[..., row:below, column:right] = x
            row, column = below, right
        return out

    return computed(block_diagonal)
