"""Convolution and its gradients on PyTorch's kernels.

On a CPU PyTorch's library for them is oneDNN, which multiplies each pixel with each tap. Where
`tandem.processor.prefers_winograd`, loops of our own compute those of 3 x 3 and 5 x 5 taps with 2.8
to 4 times fewer products, if there are enough channels. oneDNN has an order of its own for
filters, in which those that are constants are kept; others are brought into it by each call. It
could rectify results as it writes them, but would make 0 of NaN. Its gradients of filters are slow
with AVX2: without AVX-512 another loop computes most of the rest, or MKL.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pytensor.graph.basic import Apply, Constant

from tandem.backend.lowering.registry import Lowering, computed, lower, torch_dtype
from tandem.ops.base import count_windows
from tandem.ops.conv import (
    Conv2d,
    Conv2dBiasGrad,
    Conv2dInputGrad,
    Conv2dWeightGrad,
    winograd_pays,
)
from tandem.processor import describe_processor, has_short_vectors

Tensor = torch.Tensor
aten = torch.ops.aten

_FEWEST_FILTERS, _FEWEST_PRODUCTS = 16, 128  # of a group; of filters and taps


@lower.register(Conv2d)
def lower_conv2d(op: Conv2d, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    stride, pad, groups, dilation = op.stride, op.pad, op.groups, op.dilation

    def direct(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if b is None or b.dtype == x.dtype:
            return F.conv2d(x, w, b, stride, pad, dilation, groups)
        # Factors are rounded and a bias is not; torch.compile fuses the sum with what follows.
        return F.conv2d(x, w, None, stride, pad, dilation, groups).to(b.dtype) + b[:, None, None]

    _, w, b = node.inputs
    fixed = isinstance(w, Constant) and device.type == "cpu" and not compiled
    call: Callable[..., Tensor] = direct
    if fixed and torch.backends.mkldnn.is_available():
        call = _with_kept_filters(op, w.type.shape, direct)
    variant: Callable[..., Tensor] | None = None
    if winograd_pays(node, fixed) and device.type == "cpu":
        variant = _by_winograd(op, fixed, compiled)
    without_bias = isinstance(b, Constant) and not np.any(b.data)
    omit = frozenset([2]) if without_bias else frozenset[int]()
    return computed(call, factors=(0, 1), images=True, winograd=variant, omit=omit)


def _by_winograd(op: Conv2d, fixed: bool, compiled: bool) -> Callable[..., Tensor]:
    """Make a call that transforms the filters, once if they are always the same."""
    pad, groups = op.pad, op.groups
    convolve = _winograd_operator if compiled else _winograd
    kept: list[Tensor] = []

    def by_winograd(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if not fixed:
            return convolve(x, w, b, pad, groups, False)
        from tandem.backend import winograd_loops  # imports numba

        if not kept:
            kept.append(winograd_loops.transform_filters(w, groups))
        return winograd_loops.convolve(x, kept[0], b, len(w), w.shape[2], pad)

    return by_winograd


def _with_kept_filters(
    op: Conv2d, shape: tuple[Any, ...], direct: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Make a call that is always given the same filters, of those that PyTorch's compiler uses."""
    _, channels, *taps = shape
    # oneDNN may crash where a single tap is dilated, which means nothing.
    dilation = [1 if tap == 1 else d for tap, d in zip(taps, op.dilation, strict=True)]
    sizes = [*op.pad], [*op.stride], dilation, op.groups
    kept: list[Tensor] = []

    def convolve(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        last = x.is_contiguous(memory_format=torch.channels_last)
        fits = x.ndim == 4 and x.shape[1] == channels * op.groups
        if x.dtype != torch.float32 or not (last and fits and x.numel()):
            return direct(x, w, b)
        if not kept:
            kept.append(torch.ops.mkldnn._reorder_convolution_weight(w, *sizes, [*x.shape]))
        return torch.ops.mkldnn._convolution_pointwise(x, kept[0], b, *sizes, "none", [], "")

    return convolve


@lower.register(Conv2dInputGrad)
def lower_conv2d_input_grad(
    op: Conv2dInputGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    convolve = _winograd_operator if compiled else _winograd

    def by_winograd(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        if len(x) != len(g):
            raise ValueError(f"g has {len(g)} pictures, expected {len(x)}")
        pad = [w.shape[2] - 1 - p for p in op.pad]
        return convolve(g, w, None, pad, op.groups, True)

    variant = by_winograd if winograd_pays(node) and device.type == "cpu" else None
    return computed(_gradient(op, 0), factors=(0, 1, 2), images=True, winograd=variant)


@lower.register(Conv2dWeightGrad)
def lower_conv2d_weight_grad(
    op: Conv2dWeightGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    gradient = _winograd_gradient_operator if compiled else _winograd_gradient

    def by_winograd(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return gradient(x, w, g, op.pad, op.groups)

    on_cpu, direct = device.type == "cpu", _gradient(op, 1)
    beside = on_cpu and not compiled and op.dilation == (1, 1) and _vectors_are_short()
    call = _gradient_beside_onednn(op, direct) if beside else direct
    variant = by_winograd if on_cpu and winograd_pays(node) else None
    return computed(call, factors=(0, 1, 2), images=True, winograd=variant)


def _gradient_beside_onednn(
    op: Conv2dWeightGrad, direct: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make a call that takes a product by MKL or our loop where these are faster."""
    stride, pad, groups = op.stride, op.pad, op.groups
    whole = stride == (1, 1) and pad == (0, 0) and groups == 1

    def gradient(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        last = all(v.is_contiguous(memory_format=torch.channels_last) for v in (x, g))
        sizes = zip(x.shape[2:], w.shape[2:], stride, pad, strict=True)
        results = len(x), len(w), *(count_windows(*each) for each in sizes)
        divided = x.shape[1] == w.shape[1] * groups and len(w) % groups == 0
        fits = divided and g.shape == results  # else PyTorch says what does not
        single = all(v.dtype == torch.float32 and v.numel() for v in (x, w, g))
        filters, taps = len(w) // groups, w.shape[2:].numel()
        if not (last and fits and single) or filters < _FEWEST_FILTERS:
            return direct(x, w, g)
        if taps == 1 and whole and w.shape[1] >= _FEWEST_FILTERS:
            pixels, by_pixel = (v.permute(0, 2, 3, 1).reshape(-1, v.shape[1]) for v in (x, g))
            return torch.mm(by_pixel.t(), pixels).view(w.shape)
        if taps == 1 or filters * taps < _FEWEST_PRODUCTS:
            return direct(x, w, g)
        from tandem.backend.filter_loops import filter_gradient  # imports numba

        return filter_gradient(x, w, g, stride, pad, groups)

    return gradient


@cache
def _vectors_are_short() -> bool:
    return has_short_vectors(describe_processor())


@lower.register(Conv2dBiasGrad)
def lower_conv2d_bias_grad(
    op: Conv2dBiasGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    return computed(lambda g: g.sum((0, 2, 3), dtype=dtype), factors=(0,), images=True)


def _gradient(
    op: Conv2dInputGrad | Conv2dWeightGrad, which: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make PyTorch's call for one of a convolution's gradients: 0 the images', 1 the filters'."""
    stride, pad, groups, dilation = [*op.stride], [*op.pad], op.groups, [*op.dilation]
    wanted = [which == 0, which == 1, False]

    def gradient(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return aten.convolution_backward(
            g, x, w, None, stride, pad, dilation, False, [0, 0], groups, wanted
        )[which]

    return gradient


def _winograd(
    x: Tensor, w: Tensor, b: Tensor | None, pad: Sequence[int], groups: int, turned: bool
) -> Tensor:
    """A convolution of stride 1 by Winograd's products, with the filters or with them turned."""
    from tandem.backend.winograd_loops import convolve, transform_filters  # imports numba

    filters = transform_filters(w, groups, turned)
    return convolve(x, filters, b, _results(w, groups, turned), w.shape[2], pad)


# `torch.compile` can't read loops of numba, and takes operators. Elsewhere the functions are
# called: the first call of such an operator imports the compiler, which takes 3 s.
_winograd_operator = torch.library.custom_op("tandem::winograd", mutates_args=())(_winograd)


@_winograd_operator.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor | None, pad: Sequence[int], groups: int, turned: bool
) -> Tensor:
    area = (n + 2 * p - w.shape[2] + 1 for n, p in zip(x.shape[2:], pad, strict=True))
    shape = (x.shape[0], _results(w, groups, turned), *area)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _results(w: Tensor, groups: int, turned: bool) -> int:
    return w.shape[1] * groups if turned else w.shape[0]


def _winograd_gradient(x: Tensor, w: Tensor, g: Tensor, pad: Sequence[int], groups: int) -> Tensor:
    """The gradient of filters of such a convolution."""
    from tandem.backend.winograd_loops import filter_gradient  # imports numba

    return filter_gradient(x, w, g, pad, groups)


_winograd_gradient_operator = torch.library.custom_op("tandem::winograd_gradient", mutates_args=())(
    _winograd_gradient
)


@_winograd_gradient_operator.register_fake
def _(x: Tensor, w: Tensor, g: Tensor, pad: Sequence[int], groups: int) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)
