"""Scalar Ops as elementwise PyTorch calls, with PyTensor's rules for dtypes.

PyTorch's rules of type promotion differ from NumPy's (a 0-d tensor or a Python number weighs less
than an array, integers divide to the default float), so every operand is converted to the dtype in
which PyTensor computes before the call, and the result to PyTensor's output dtype after it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.scalar.math as psm
import torch
from pytensor.graph.basic import Apply
from pytensor.scalar.basic import Composite
from pytensor.scalar.loop import ScalarLoop
from pytensor.tensor.type import discrete_dtypes

from tandem.backend.lowering.complex_scalars import (
    COMPLEX_ONLY,
    SAME_AS_REAL,
    complex_call,
    is_complex,
)
from tandem.backend.lowering.registry import (
    SIGNED_ONLY,
    TORCH_DTYPES,
    constant_number,
    torch_dtype,
    unsupported,
)
from tandem.backend.lowering.scalar_graphs import Call, ScalarCall, composite_call, loop_call

# PyTorch stores these but computes little in them. int64 holds every value of the first two, and
# the bits of the third, which are all that `Kernel.bits` needs; results wrap around when they are
# converted back.
_COMPUTED_AS_INT64 = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True)
class Kernel:
    """An elementwise PyTorch call on tensors of one dtype."""

    call: Call
    numbers: tuple[int, ...] = ()  # operands that may be a Python number, to the same effect
    out: bool = False  # takes out=, possibly one of its operands
    variadic: bool = False  # more than two operands are combined from the left
    compare: bool = False  # operands have their common dtype, not that of the result
    condition: bool = False  # the first operand is always bool, and always a tensor
    bits: bool = False  # of integers, it gives the same bits whether these are signed or not


def _sign(x: torch.Tensor) -> torch.Tensor:
    # torch.sign gives 0 for NaN; NumPy keeps it.
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else x.sign()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    # torch.nn.functional.softplus drops the logarithm above a threshold, visibly in float64.
    return torch.clamp_min(x, 0) + torch.log1p(torch.exp(-torch.abs(x)))


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, torch.floor(x + 0.5), torch.ceil(x - 0.5))


def _integer_divide(x: torch.Tensor, y: Any) -> torch.Tensor:
    if x.is_floating_point() or (y if isinstance(y, int) else False):
        return torch.div(x, y, rounding_mode="floor")
    # NumPy gives 0 for an integer divided by 0; PyTorch fails.
    y = torch.as_tensor(y, device=x.device)
    quotient = torch.div(x, _without_zeros(y), rounding_mode="floor")
    return quotient.masked_fill_(y == 0, 0)


def _remainder(x: torch.Tensor, y: Any) -> torch.Tensor:
    if not x.is_floating_point():
        # NumPy gives 0 for an integer divided by 0, as for one divided by 1.
        return torch.remainder(x, _without_zeros(y) if isinstance(y, torch.Tensor) else y or 1)
    found = torch.remainder(x, y)
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and found.isnan().any():
        # PyTorch gives NaN also where the quotient is near the dtype's largest number.
        with np.errstate(all="ignore"):
            left = x.numpy()
            return torch.from_numpy(np.asarray(np.remainder(left, np.asarray(y, left.dtype))))
    return found


def _without_zeros(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x == 0, 1)


def _power(x: torch.Tensor, y: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    if not x.is_floating_point():
        # PyTorch gives 0 or 1.
        negative = bool((y < 0).any()) if isinstance(y, torch.Tensor) else y < 0
        if negative:
            raise ValueError("Integers to negative integer powers are not allowed.")
    return torch.pow(x, y, out=out)


def _lgamma(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == -math.inf, x, torch.lgamma(x))


def _hyperbolic(call: Call, odd: bool) -> Call:
    """Compute sinh or cosh, whose vectorised kernels overflow before the result does."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        if x.is_complex():
            return call(x)
        size = x.abs()
        half = torch.exp(size / 2)
        far = half * (half / 2)
        return torch.where(size > _FAR[x.dtype], far.copysign(x) if odd else far, call(x))

    return compute


# Beyond it, exp(-x) is lost in exp(x), and the kernels come near their limits.
_FAR = {torch.float16: 11.0, torch.float32: 80.0, torch.float64: 700.0}


def _clip(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    # Not torch.clamp, which gives `high` where low > high, and NaN where a bound is NaN.
    return torch.where(x < low, low, torch.where(x > high, high, x))


def _in_float64(call: Call) -> Call:
    """Compute as SciPy does, which rounds once; PyTorch's float32 overflows earlier."""
    return lambda x: call(x.to(torch.float64)).to(x.dtype)


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtri(x / 2) / -math.sqrt(2)


def _trigamma(x: torch.Tensor) -> torch.Tensor:
    # Not torch.polygamma, which keeps only nine digits.
    return torch.where(x == torch.inf, 0, torch.special.zeta(2.0, x))


# PyTorch has these under the same name in lower case, with ``out=``.
_SAME_NAME = """
Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTan2 ArcTanh Ceil Cos Deg2Rad Exp Exp2 Expm1 Floor
Log Log10 Log1p Log2 Rad2Deg Reciprocal Sin Sqrt Tan Tanh Trunc Erf Erfc Erfinv Sigmoid
"""

_KERNELS: dict[type, Kernel] = {
    **{
        getattr(ps if hasattr(ps, name) else psm, name): Kernel(
            getattr(torch, name.lower()), out=True
        )
        for name in _SAME_NAME.split()
    },
    ps.Neg: Kernel(torch.neg, out=True, bits=True),
    ps.Add: Kernel(torch.add, numbers=(1,), out=True, variadic=True, bits=True),
    ps.Mul: Kernel(torch.mul, numbers=(1,), out=True, variadic=True, bits=True),
    ps.Sub: Kernel(torch.sub, numbers=(1,), out=True, bits=True),
    ps.TrueDiv: Kernel(torch.div, numbers=(1,), out=True),
    ps.IntDiv: Kernel(_integer_divide, numbers=(1,)),
    ps.Mod: Kernel(_remainder, numbers=(1,)),
    ps.Pow: Kernel(_power, numbers=(1,), out=True),
    ps.ScalarMaximum: Kernel(torch.maximum, out=True, variadic=True),
    ps.ScalarMinimum: Kernel(torch.minimum, out=True, variadic=True),
    ps.EQ: Kernel(torch.eq, numbers=(1,), compare=True, bits=True),
    ps.NEQ: Kernel(torch.ne, numbers=(1,), compare=True, bits=True),
    ps.LT: Kernel(torch.lt, numbers=(1,), compare=True),
    ps.GT: Kernel(torch.gt, numbers=(1,), compare=True),
    ps.LE: Kernel(torch.le, numbers=(1,), compare=True),
    ps.GE: Kernel(torch.ge, numbers=(1,), compare=True),
    ps.IsNan: Kernel(torch.isnan, compare=True),
    ps.IsInf: Kernel(torch.isinf, compare=True),
    ps.OR: Kernel(torch.bitwise_or, out=True, variadic=True, bits=True),
    ps.AND: Kernel(torch.bitwise_and, out=True, variadic=True, bits=True),
    ps.XOR: Kernel(torch.bitwise_xor, out=True, variadic=True, bits=True),
    ps.Invert: Kernel(torch.bitwise_not, out=True, bits=True),
    ps.Clip: Kernel(_clip),
    ps.Sign: Kernel(_sign),
    ps.Sqr: Kernel(torch.square, out=True, bits=True),
    ps.RoundHalfToEven: Kernel(torch.round, out=True),
    ps.RoundHalfAwayFromZero: Kernel(_round_half_away),
    ps.Sinh: Kernel(_hyperbolic(torch.sinh, odd=True)),
    ps.Cosh: Kernel(_hyperbolic(torch.cosh, odd=False)),
    psm.Softplus: Kernel(_softplus),
    psm.Log1mexp: Kernel(_log1mexp),
    psm.GammaLn: Kernel(_lgamma),
    psm.Psi: Kernel(torch.digamma, out=True),
    psm.TriGamma: Kernel(_in_float64(_trigamma)),
    psm.Erfcx: Kernel(_in_float64(torch.special.erfcx)),
    psm.Erfcinv: Kernel(_in_float64(_erfcinv)),
    psm.I0: Kernel(_in_float64(torch.special.i0)),
    psm.I1: Kernel(_in_float64(torch.special.i1)),
    ps.Switch: Kernel(torch.where, numbers=(1, 2), condition=True, bits=True),
}

# These leave a bool as it is; PyTorch refuses it, or gives an integer.
_IDENTITIES_ON_BOOL = (ps.Abs, ps.Sign, ps.Sqr, ps.Ceil, ps.Floor, ps.Trunc, ps.RoundHalfToEven)
# PyTorch computes these with integers only.
_NOT_OF_BOOL = (ps.IntDiv, ps.Mod, ps.Pow)


def covered_scalar_ops() -> frozenset[type]:
    """Return the classes of scalar Ops that `scalar_call` supports."""
    others = {ps.Cast, ps.Second, ps.Identity, Composite, ScalarLoop}
    return frozenset(_KERNELS) | COMPLEX_ONLY | others


def scalar_call(op: ps.ScalarOp, node: Apply) -> ScalarCall:
    """Make a call on tensors of a scalar Op, with the dtypes of `node`."""
    if isinstance(op, Composite):
        return composite_call(op, scalar_call)
    if isinstance(op, ScalarLoop):
        return loop_call(op, scalar_call)
    if type(op) in COMPLEX_ONLY or is_complex(node):
        special = complex_call(op, node)
        if special is not None:
            # It raises for a negative radius.
            return ScalarCall(special, opaque=isinstance(op, ps.ComplexFromPolar))
        if type(op) not in SAME_AS_REAL:
            raise unsupported(node, f"{type(op).__name__} has no PyTorch call on complex numbers")
    if isinstance(op, ps.Cast | ps.Identity):
        return _cast(node)
    if isinstance(op, ps.Second):
        return ScalarCall(_second, returns=(1,))
    if type(op) not in _KERNELS:
        raise unsupported(node, f"scalar Op {type(op).__name__} has no PyTorch call")
    dtype = node.outputs[0].type.dtype
    unsigned = isinstance(op, ps.Abs) and dtype.startswith("uint")
    if unsigned or (type(op) in _IDENTITIES_ON_BOOL and node.inputs[0].type.dtype == "bool"):
        return _cast(node)
    if type(op) in _NOT_OF_BOOL and dtype == "bool":
        raise unsupported(node, f"no PyTorch call for {type(op).__name__} of bools")
    kernel = _KERNELS[type(op)]
    _check_unsigned(op, node, kernel)
    call = _clamp(op, node) or _prepare(node, kernel)
    # It raises for a negative exponent.
    opaque = isinstance(op, ps.Pow) and dtype in discrete_dtypes and 1 not in call.omit
    return replace(call, opaque=opaque)


def _check_unsigned(op: ps.ScalarOp, node: Apply, kernel: Kernel) -> None:
    """Refuse what cannot be computed from the bits of 64-bit unsigned integers alone."""
    given = {x.type.dtype for x in node.inputs}
    if "uint64" not in given | {node.outputs[0].type.dtype}:
        return
    if kernel.compare or isinstance(op, ps.Clip):
        # NumPy compares a signed with an unsigned number by value, though their common dtype is
        # float64.
        exact = kernel.bits and not any(name.startswith("int") for name in given)
        exact |= any(name.startswith("float") for name in given)
    else:
        exact = kernel.bits or node.outputs[0].type.dtype.startswith("float")
    if not exact:
        raise unsupported(node, SIGNED_ONLY)


def _operand_dtypes(node: Apply, kernel: Kernel) -> list[torch.dtype]:
    """Return the dtype to which each operand is converted before the call."""
    if kernel.compare:
        group = TORCH_DTYPES[ps.upcast(*(x.type.dtype for x in node.inputs))]
    else:
        group = torch_dtype(node.outputs[0])
    dtypes = [torch.int64 if group in _COMPUTED_AS_INT64 else group] * len(node.inputs)
    return [torch.bool, *dtypes[1:]] if kernel.condition else dtypes


def _prepare(node: Apply, kernel: Kernel) -> ScalarCall:
    dtypes = _operand_dtypes(node, kernel)
    numbers = _bound_numbers(node, kernel, dtypes)
    casts = [
        None if torch_dtype(x) == dtype else dtype
        for position, (x, dtype) in enumerate(zip(node.inputs, dtypes, strict=True))
        if position not in numbers
    ]
    result = torch_dtype(node.outputs[0])
    computed = torch.bool if kernel.compare else dtypes[-1]
    call, takes_out = _bind(kernel, len(node.inputs), numbers)
    into = call if takes_out and computed == result else None
    return ScalarCall(
        _with_casts(call, casts, None if computed == result else result),
        omit=frozenset(numbers),
        into=None if into is None else _with_casts(into, casts, None),
        returns=(0,) if len(node.inputs) == 1 and kernel.variadic else (),
    )


def _number(variable: Any, dtype: torch.dtype) -> bool | int | float:
    """Return a one-element constant as a Python number, rounded to `dtype`."""
    return torch.from_numpy(np.array(variable.data)).to(dtype).item()


def _bound_numbers(
    node: Apply, kernel: Kernel, dtypes: Sequence[torch.dtype]
) -> dict[int, bool | int | float]:
    """Find constant operands that the call can take as Python numbers.

    At least one operand stays a tensor: it carries dtype and device.
    """
    any_position = kernel.variadic and bool(kernel.numbers)
    found = {
        position: _number(operand, dtypes[position])
        for position, operand in enumerate(node.inputs)
        if constant_number(operand) is not None and (any_position or position in kernel.numbers)
    }
    carriers = set(range(int(kernel.condition), len(node.inputs))) - set(found)
    return found if carriers else {}


def _bind(kernel: Kernel, count: int, numbers: dict[int, Any]) -> tuple[Call, bool]:
    """Put the constant operands into the call; report whether it still takes ``out=``."""
    call = kernel.call
    if kernel.variadic and count != 2:
        return _variadic(call, list(numbers.values()), kernel.out), False
    if not numbers:
        return call, kernel.out
    if count == 2:
        # A variadic call is commutative: a number on the left goes to the right.
        return _with_number(call, *numbers.values()), kernel.out
    return _with_numbers(call, sorted(numbers.items())), False


def _with_number(call: Call, *numbers: float) -> Call:
    """Put numbers behind the first operand."""

    def bound(x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return call(x, *numbers, **keywords)

    return bound


def _with_numbers(call: Call, numbers: Sequence[tuple[int, float]]) -> Call:
    def bound(*tensors: torch.Tensor) -> torch.Tensor:
        operands: list[Any] = list(tensors)
        for position, number in numbers:
            operands.insert(position, number)
        return call(*operands)

    return bound


def _variadic(call: Call, numbers: Sequence[float], takes_out: bool) -> Call:
    def combine(*tensors: torch.Tensor) -> torch.Tensor:
        first, *others = tensors
        if not takes_out or len(others) < 2 or any(x.shape != first.shape for x in others):
            return reduce(call, (*others, *numbers), first)
        total = call(first, others[0])
        for x in (*others[1:], *numbers):
            call(total, x, out=total)  # new memory would take longer to fill
        return total

    return combine


def _with_casts(
    call: Call, casts: Sequence[torch.dtype | None], result: torch.dtype | None
) -> Call:
    if result is None and not any(casts):
        return call

    def cast_and_call(*operands: torch.Tensor, **keywords: Any) -> torch.Tensor:
        ready = [x if cast is None else x.to(cast) for x, cast in zip(operands, casts, strict=True)]
        value = call(*ready, **keywords)
        return value if result is None else value.to(result)

    return cast_and_call


def _cast(node: Apply) -> ScalarCall:
    dtype = torch_dtype(node.outputs[0])
    if torch_dtype(node.inputs[0]) == dtype:
        return ScalarCall(lambda x: x, returns=(0,))
    return ScalarCall(lambda x: x.to(dtype))


def _second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.expand(torch.broadcast_shapes(x.shape, y.shape))


def _clamp(op: ps.ScalarOp, node: Apply) -> ScalarCall | None:
    """Bound a tensor by constants in one pass; None where the node does not permit it."""
    bounding = {ps.ScalarMaximum: 1, ps.ScalarMinimum: 1, ps.Clip: 2}.get(type(op))
    known = [i for i, x in enumerate(node.inputs) if constant_number(x) is not None]
    free = [x for i, x in enumerate(node.inputs) if i not in known]
    dtype = torch_dtype(node.outputs[0])
    if len(known) != bounding or len(free) != 1 or torch_dtype(free[0]) != dtype:
        return None
    if dtype in (torch.bool, *_COMPUTED_AS_INT64):
        return None
    bounds = [_number(node.inputs[position], dtype) for position in known]
    if isinstance(op, ps.Clip):
        clamp: Call = torch.clamp
        permitted = known == [1, 2] and bounds[0] <= bounds[1]
    else:
        clamp = torch.clamp_min if isinstance(op, ps.ScalarMaximum) else torch.clamp_max
        permitted = not np.isnan(bounds[0])
    call = _with_number(clamp, *bounds)
    return ScalarCall(call, omit=frozenset(known), into=call) if permitted else None
