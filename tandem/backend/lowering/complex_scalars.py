"""Scalar Ops on complex numbers, as elementwise PyTorch calls."""

from collections.abc import Callable

import pytensor.scalar as ps
import torch
from pytensor.graph.basic import Apply

from tandem.backend.lowering.registry import torch_dtype

Tensor = torch.Tensor

# Computed as for real numbers, in the common dtype of operands and result.
_SAME = """
Add Mul Sub TrueDiv EQ NEQ IsNan IsInf Switch Second Identity Cast Sqr Sqrt Neg Reciprocal
Exp Exp2 Expm1 Log Log2 Log10 Log1p Cos Sin Tan Cosh Sinh Tanh
ArcCos ArcSin ArcTan ArcCosh ArcSinh ArcTanh
"""
SAME_AS_REAL = frozenset(getattr(ps, name) for name in _SAME.split())


def is_complex(node: Apply) -> bool:
    """Return whether an operand or a result is complex."""
    return any(x.type.dtype.startswith("complex") for x in (*node.inputs, *node.outputs))


def _real(x: Tensor) -> Tensor:
    return x.real.clone()


def _imaginary(x: Tensor) -> Tensor:
    return x.imag.clone() if x.is_complex() else torch.zeros_like(x)


def _conjugate(x: Tensor) -> Tensor:
    return torch.conj_physical(x) if x.is_complex() else x.clone()


def _angle(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.angle(x)
    x = x if x.is_floating_point() else x.to(torch.float64)
    # Not torch.angle, which gives 0 for -0.0.
    return torch.atan2(torch.zeros_like(x), x)


def _power(x: Tensor, y: Tensor) -> Tensor:
    # Not NaN for a base of 0.
    return torch.where(y == 0, 1, torch.pow(x, y))


def _polar(radius: Tensor, angle: Tensor) -> Tensor:
    if (radius < 0).any():
        raise ValueError("polar radius must be non-negative")
    return torch.polar(radius, angle)


# By class: the dtype of the operands, given that of the result, or None for their own; and the
# call.
_CALLS: dict[type, tuple[Callable[[torch.dtype], torch.dtype] | None, Callable[..., Tensor]]] = {
    ps.Abs: (None, torch.abs),
    ps.Pow: (lambda result: result, _power),
    ps.Real: (None, _real),
    ps.Imag: (None, _imaginary),
    ps.Angle: (None, _angle),
    ps.Conj: (None, _conjugate),
    ps.Complex: (lambda result: result.to_real(), torch.complex),
    ps.ComplexFromPolar: (lambda result: result.to_real(), _polar),
}

COMPLEX_ONLY = frozenset((ps.Real, ps.Imag, ps.Angle, ps.Conj, ps.Complex, ps.ComplexFromPolar))
"""Ops that have to do with complex numbers alone, though they also take real ones."""


def complex_call(op: ps.ScalarOp, node: Apply) -> Callable[..., Tensor] | None:
    """Make the call of an Op that is computed in another way than for real numbers, or None."""
    if type(op) not in _CALLS:
        return None
    dtype_for, call = _CALLS[type(op)]
    result = torch_dtype(node.outputs[0])

    def convert_and_call(*operands: Tensor) -> Tensor:
        if dtype_for is not None:
            operands = tuple(x.to(dtype_for(result)) for x in operands)
        return call(*operands).to(result)

    return convert_and_call
