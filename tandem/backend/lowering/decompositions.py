"""Factors of matrices and their eigenvalues, of one matrix or of many.

Vectors that are unique only up to a sign or a phase have those that PyTorch's LAPACK, or the GPU's
library, gives them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.decomposition.eigen import Eig, Eigh, Eigvalsh
from pytensor.tensor.linalg.decomposition.lu import LU, LUFactor, PivotToPermutations
from pytensor.tensor.linalg.decomposition.qr import QR
from pytensor.tensor.linalg.decomposition.svd import SVD
from torch.nn.functional import pad

from tandem.backend.lowering.blockwise import lowers_batched
from tandem.backend.lowering.registry import Lowering, computed, torch_dtype, unsupported

Tensor = torch.Tensor


def as_linalg_error(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a call raise NumPy's LinAlgError where PyTorch's fails."""

    def raising(*operands: Tensor) -> Any:
        try:
            return call(*operands)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise np.linalg.LinAlgError(str(error)) from error

    return raising


def require_square(x: Tensor, what: str) -> None:
    """Raise SciPy's ValueError for a matrix that is not square."""
    if x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{what} is expected to be square but has the shape: {tuple(x.shape)}.")


def nan_where(failed: Tensor, x: Tensor, core_ndim: int = 2) -> Tensor:
    """Replace whole matrices by NaN, where the flag of their leading axes is set."""
    return torch.where(failed[(..., *[None] * core_ndim)], torch.nan, x)


def _checked(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a matrix that SciPy refuses unless it is square and finite."""
    require_square(x, "Input array")
    return _finite(x.to(dtype))


def _finite(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("array must not contain infs or NaNs")
    return x


def _is_complex(node: Apply) -> bool:
    return any(x.type.dtype.startswith("complex") for x in node.inputs)


@lowers_batched(Cholesky)
def lower_cholesky(op: Cholesky, node: Apply, device: torch.device) -> Lowering:
    dtype, upper = torch_dtype(node.outputs[0]), not op.lower

    def cholesky(x: Tensor) -> Tensor:
        require_square(x, "Input array")
        factor, info = torch.linalg.cholesky_ex(x.to(dtype), upper=upper)
        return nan_where(info != 0, factor)

    return computed(cholesky, certain=False)


@lowers_batched(QR)
def lower_qr(op: QR, node: Apply, device: torch.device) -> Lowering:
    if op.pivoting:
        raise unsupported(node, "PyTorch has no QR decomposition with pivoting")
    dtype = torch_dtype(node.outputs[0])

    def triangle_only(x: Tensor) -> Tensor:
        # As LAPACK's result of x's shape: PyTorch leaves the zero rows out.
        r = torch.linalg.qr(x.to(dtype), mode="r").R
        return pad(r, (0, 0, 0, x.shape[-2] - r.shape[-2]))

    def reflections(x: Tensor) -> tuple[Tensor, ...]:
        h, scales = torch.geqrf(x.to(dtype))
        return h, scales, torch.triu(h[..., : scales.shape[-1], :])

    calls: dict[str, Callable[[Tensor], Any]] = {
        "full": lambda x: tuple(torch.linalg.qr(x.to(dtype), mode="complete")),
        "economic": lambda x: tuple(torch.linalg.qr(x.to(dtype), mode="reduced")),
        "r": triangle_only,
        "raw": reflections,
    }
    return computed(calls[op.mode])


def _permutation(pivots: Tensor, rows: int) -> Tensor:
    """Return the order of rows after the exchanges of rows that `pivots` lists, from 1."""
    *batch, columns = pivots.shape
    if not columns:
        return torch.arange(rows, device=pivots.device).expand(*batch, rows)
    shapes_only = torch.empty((), device=pivots.device).expand(*batch, rows, columns)
    return torch.lu_unpack(shapes_only, pivots, unpack_data=False)[0].argmax(-2)


@lowers_batched(LU)
def lower_lu(op: LU, node: Apply, device: torch.device) -> Lowering:
    dtype = torch_dtype(node.outputs[-1])

    def factorize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factors, pivots, _ = torch.linalg.lu_factor_ex(_finite(x.to(dtype)))
        _, lower, upper = torch.lu_unpack(factors, pivots, unpack_pivots=False)
        return _permutation(pivots, x.shape[-2]).argsort(-1), lower, upper

    def permuted(x: Tensor) -> tuple[Tensor, Tensor]:
        order, lower, upper = factorize(x)
        return torch.take_along_dim(lower, order.unsqueeze(-1), -2), upper

    def with_indices(x: Tensor) -> tuple[Tensor, ...]:
        order, *factors = factorize(x)
        return order.to(torch.int32), *factors

    def with_matrix(x: Tensor) -> tuple[Tensor, ...]:
        order, *factors = factorize(x)
        columns = torch.arange(order.shape[-1], device=x.device)
        return (order.unsqueeze(-1) == columns).to(torch_dtype(node.outputs[0])), *factors

    call = permuted if op.permute_l else with_indices if op.p_indices else with_matrix
    return Lowering(call, computes=True, opaque=True)


@lowers_batched(LUFactor)
def lower_lu_factor(op: LUFactor, node: Apply, device: torch.device) -> Lowering:
    if node.outputs[0].type.dtype not in ("float32", "float64", "complex64", "complex128"):
        raise unsupported(node, "its factors have another dtype")

    def lu_factor(x: Tensor) -> tuple[Tensor, Tensor]:
        require_square(x, "Input array")
        factors, pivots, info = torch.linalg.lu_factor_ex(x)
        return nan_where(info != 0, factors), pivots - 1

    return computed(lu_factor, certain=False)


@lowers_batched(PivotToPermutations)
def lower_pivots(op: PivotToPermutations, node: Apply, device: torch.device) -> Lowering:
    def permutation(pivots: Tensor) -> Tensor:
        order = _permutation(pivots.to(torch.int32) + 1, pivots.shape[-1])
        return order if op.inverse else order.argsort(-1)

    return computed(permutation)


@lowers_batched(SVD)
def lower_svd(op: SVD, node: Apply, device: torch.device) -> Lowering:
    dtype, full = torch_dtype(node.outputs[0]), op.full_matrices

    def values(x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x.to(torch_dtype(node.inputs[0]) if x.is_complex() else dtype))

    def svd(x: Tensor) -> tuple[Tensor, ...]:
        u, s, vh = torch.linalg.svd(x.to(dtype), full_matrices=full)
        return u, s, vh.resolve_conj()

    return Lowering(as_linalg_error(svd if op.compute_uv else values), computes=True, opaque=True)


@lowers_batched(Eig)
def lower_eig(op: Eig, node: Apply, device: torch.device) -> Lowering:
    result = torch_dtype(node.outputs[0])
    dtype = result if _is_complex(node) else result.to_real()
    call = as_linalg_error(lambda x: tuple(torch.linalg.eig(x.to(dtype))))
    return Lowering(call, computes=True, opaque=True)


@lowers_batched(Eigh, Eigvalsh)
def lower_eigh(op: Eigh | Eigvalsh, node: Apply, device: torch.device) -> Lowering:
    if len(node.inputs) == 2:
        raise unsupported(node, "PyTorch has no eigenvalues of a pair of matrices")
    dtype, triangle = torch_dtype(node.outputs[0]), "L" if op.lower else "U"
    if _is_complex(node):
        dtype = dtype.to_complex()  # of the vectors too, which the Op declares as real

    def vectors(x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.linalg.eigh(_checked(x, dtype), triangle))

    def values(x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(_checked(x, dtype), triangle)

    call = as_linalg_error(vectors if isinstance(op, Eigh) else values)
    return Lowering(call, computes=True, opaque=True)
