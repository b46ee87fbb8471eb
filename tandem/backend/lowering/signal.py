"""Convolutions of signals, and Fourier transforms."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.fft import IRFFTOp, RFFTOp
from pytensor.tensor.fourier import Fourier
from pytensor.tensor.signal.conv import Convolve1d, Convolve2d
from torch.nn import functional as F

from tandem.backend.lowering.blockwise import lowers_batched
from tandem.backend.lowering.registry import (
    Lowering,
    computed,
    lower,
    torch_dtype,
    unsupported,
)

Tensor = torch.Tensor


@lowers_batched(Convolve1d, Convolve2d)
def lower_convolve(op: Convolve1d | Convolve2d, node: Apply, device: torch.device) -> Lowering:
    dtype, mode = torch_dtype(node.outputs[0]), node.inputs[2]
    if device.type == "cpu":
        raise unsupported(node, "on a CPU, PyTorch's call is slower than NumPy's and SciPy's")
    if not dtype.is_floating_point or any(n != 1 for n in getattr(mode.type, "shape", ())):
        raise unsupported(node, "the numbers are not real, or there are several modes")
    ndim = op.ndim
    convolve = _by_transforms if getattr(op, "method", "direct") == "fft" else _directly

    def call(x: Tensor, y: Tensor, mode: Any) -> Tensor:
        while isinstance(mode, Sequence):
            mode = mode[0]
        x, y = _longer_first(x.to(dtype), y.to(dtype), ndim, bool(mode))
        return convolve(x, y, ndim, bool(mode))

    return Lowering(call, host=frozenset((2,)), computes=True)


def _longer_first(x: Tensor, y: Tensor, ndim: int, full: bool) -> tuple[Tensor, Tensor]:
    lengths = list(zip(x.shape[-ndim:], y.shape[-ndim:], strict=True))
    if ndim == 1 and 0 in lengths[0]:
        raise ValueError("a convolution's operands cannot be empty")
    if all(n >= k for n, k in lengths):
        return x, y
    if not full and any(n > k for n, k in lengths):
        raise ValueError(
            "For 'valid' mode, one must be at least as large as the other in every dimension"
        )
    return y, x


def _directly(x: Tensor, y: Tensor, ndim: int, full: bool) -> Tensor:
    """Convolve each signal with its filter: PyTorch's grouped convolution, with turned filters."""
    batch = x.shape[:-ndim]
    signals = x.reshape(1, -1, *x.shape[-ndim:])
    filters = y.flip(tuple(range(-ndim, 0))).reshape(-1, 1, *y.shape[-ndim:])
    pads = [k - 1 for k in y.shape[-ndim:]] if full else 0
    call = F.conv1d if ndim == 1 else F.conv2d
    out = call(signals, filters, padding=pads, groups=math.prod(batch))
    return out.reshape(*batch, *out.shape[-ndim:])


def _by_transforms(x: Tensor, y: Tensor, ndim: int, full: bool) -> Tensor:
    axes = tuple(range(-ndim, 0))
    lengths = [x.shape[axis] + y.shape[axis] - 1 for axis in axes]
    out = torch.fft.irfftn(
        torch.fft.rfftn(x, lengths, axes) * torch.fft.rfftn(y, lengths, axes), lengths, axes
    )
    if full:
        return out
    return out[(..., *(slice(y.shape[axis] - 1, x.shape[axis]) for axis in axes))]


@lower.register(RFFTOp)
def lower_rfft(op: RFFTOp, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    _require_real(node)
    return computed(
        lambda x, lengths: torch.view_as_real(torch.fft.rfftn(x, lengths, _last(lengths, x.ndim))),
        host=frozenset((1,)),
        certain=False,
    )


@lower.register(IRFFTOp)
def lower_irfft(op: IRFFTOp, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    _require_real(node)

    def inverse(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        numbers = torch.complex(x[..., 0], x[..., 1])
        axes = _last(lengths, numbers.ndim)
        return torch.fft.irfftn(numbers, lengths, axes, norm="forward")

    return computed(inverse, host=frozenset((1,)), certain=False)


def _require_real(node: Apply) -> None:
    if node.inputs[0].type.dtype not in ("float32", "float64"):
        raise unsupported(node, "PyTorch transforms float32 and float64")


def _last(lengths: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim - len(lengths), ndim))


@lower.register(Fourier)
def lower_fourier(op: Fourier, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    x = node.inputs[0]
    if x.type.dtype == "float16":
        raise unsupported(node, "PyTorch transforms float32 and float64")
    transform: Callable[..., Tensor] = torch.fft.fft
    return computed(
        lambda x, length, axis: transform(x, int(length), int(axis)).to(torch.complex128),
        host=frozenset((1, 2)),
        certain=False,
    )
