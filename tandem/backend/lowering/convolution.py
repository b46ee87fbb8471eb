"""Convolution and its gradients on PyTorch's kernels.

On a CPU PyTorch has two libraries for them: oneDNN, which multiplies each pixel with each tap, and
NNPACK, which multiplies Fourier transforms of tiles, with three to five times fewer products and
less rounding (Mathieu, Henaff, LeCun 2014, section 2). PyTorch by default uses oneDNN if available.
`tandem.processor.prefers_fft` decides by the processor. oneDNN has an order of its own for filters,
in which those that are constants are kept; others are brought into it by each call. Its gradients
of filters are slow with AVX2: without AVX-512 a loop of our own computes most of them, or MKL.

NNPACK's pool of threads and PyTorch's would wait for each other, so NNPACK is kept to one thread,
and several calls of it run side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from pytensor.graph.basic import Apply, Constant

from tandem.backend.lowering.registry import Lowering, computed, lower, torch_dtype
from tandem.ops.base import count_windows
from tandem.ops.conv import (
    TILE,
    Conv2d,
    Conv2dBiasGrad,
    Conv2dInputGrad,
    Conv2dWeightGrad,
    fft_pays,
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

    convolve = _fft_convolution_operator if compiled else _fft_convolution

    def by_fft(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return convolve(x, w, b, pad[0], groups)

    _, w, b = node.inputs
    call: Callable[..., Tensor] = direct
    if isinstance(w, Constant) and device.type == "cpu" and not compiled:
        call = _with_kept_filters(op, w, direct) if torch.backends.mkldnn.is_available() else direct
    variant = by_fft if fft_pays(node) and device.type == "cpu" else None
    without_bias = isinstance(b, Constant) and not np.any(b.data)
    omit = frozenset([2]) if without_bias else frozenset[int]()
    return computed(call, factors=(0, 1), images=True, fft=variant, omit=omit)


def _with_kept_filters(
    op: Conv2d, filters: Constant, direct: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Make a call that is always given the same filters, of those that PyTorch's compiler uses."""
    _, channels, *taps = filters.data.shape
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
    size, groups = node.inputs[1].type.shape[2], op.groups
    convolve = _fft_convolution_operator if compiled else _fft_convolution

    def by_fft(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return convolve(g, _turned(w, groups), None, size - 1 - op.pad[0], groups)

    variant = by_fft if fft_pays(node) and device.type == "cpu" else None
    return computed(_gradient(op, 0), factors=(0, 1, 2), images=True, fft=variant)


@lower.register(Conv2dWeightGrad)
def lower_conv2d_weight_grad(
    op: Conv2dWeightGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    gradient = _fft_filter_gradient_operator if compiled else _fft_filter_gradient

    def by_fft(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return gradient(x, w, g, op.pad[0], op.groups)

    on_cpu, direct = device.type == "cpu", _gradient(op, 1)
    beside = on_cpu and not compiled and op.dilation == (1, 1) and _vectors_are_short()
    call = _gradient_beside_onednn(op, direct) if beside else direct
    # For filters of 3 x 3 the loop is the fastest.
    pays = on_cpu and fft_pays(node) and not (beside and node.inputs[1].type.shape[2] == 3)
    variant = by_fft if pays else None
    return computed(call, factors=(0, 1, 2), images=True, fft=variant)


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


def _fft_convolution(x: Tensor, w: Tensor, b: Tensor | None, pad: int, groups: int) -> Tensor:
    """A convolution of stride 1 by NNPACK, which has no groups."""
    from tandem.backend.image_loops import from_nchw

    y = _empty_result(x, w, pad)
    inputs, filters = w.shape[1], w.shape[0] // groups
    operands = []
    for group in range(groups):
        rows = slice(group * filters, (group + 1) * filters)
        images = x[:, group * inputs : (group + 1) * inputs].contiguous()
        operands.append((images, w[rows].contiguous(), None if b is None else b[rows]))
    for group, pictures, rows, planes in _convolve(operands, pad):
        first = group * filters
        from_nchw(planes, y[pictures], slice(first + rows.start, first + rows.stop))
    return y


# `torch.compile` can't read PyTorch's operator for NNPACK, and takes ours. Elsewhere the functions
# are called: the first call of such an operator imports the compiler, which takes 3 s.
_fft_convolution_operator = torch.library.custom_op("tandem::fft_convolution", mutates_args=())(
    _fft_convolution
)


@_fft_convolution_operator.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, pad: int, groups: int) -> Tensor:
    return _empty_result(x, w, pad)


def _fft_filter_gradient(x: Tensor, w: Tensor, g: Tensor, pad: int, groups: int) -> Tensor:
    """The gradient of filters of such a convolution: that of the images, as many pictures as they
    have channels, with g as its filters. What exceeds one of NNPACK's tiles is cut into several,
    each as a channel of its own, over which a convolution sums."""
    from tandem.backend.image_loops import to_tiles

    margin, length = w.shape[2] - 1, g.shape[2]
    size = -(-length // -(-length // (TILE - margin)))
    inputs, filters = w.shape[1], w.shape[0] // groups
    operands = []
    for group in range(groups):
        channels = slice(group * inputs, (group + 1) * inputs)
        images = to_tiles(x, channels, size + margin, size, pad)
        channels = slice(group * filters, (group + 1) * filters)
        operands.append((images, to_tiles(g, channels, size, size, 0), None))
    gradient = torch.empty_like(w, memory_format=torch.contiguous_format)
    for group, channels, rows, planes in _convolve(operands, 0):
        gradient[group * filters :][rows, channels] = planes.transpose(0, 1)
    return gradient


_fft_filter_gradient_operator = torch.library.custom_op(
    "tandem::fft_filter_gradient", mutates_args=()
)(_fft_filter_gradient)


@_fft_filter_gradient_operator.register_fake
def _(x: Tensor, w: Tensor, g: Tensor, pad: int, groups: int) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


def _convolve(
    operands: Sequence[tuple[Tensor, Tensor, Tensor | None]], pad: int
) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """Convolve images with filters and add a bias, for each group, by PyTorch's number of threads.

    The pictures and filters of a group are divided until there is a part for each thread, so that
    as few tiles as possible are transformed more than once. A part is given as group, pictures,
    filters and result.
    """
    threads = torch.get_num_threads()
    parts = -(-threads // len(operands))
    images, filters, _ = operands[0]
    tiles = max(1, images.shape[2] * images.shape[3] / TILE**2)

    def transformed(of_filters: int) -> float:
        return of_filters * len(images) * tiles + parts // of_filters * len(filters)

    divisors = [n for n in range(1, parts + 1) if parts % n == 0]
    of_filters = min(divisors, key=transformed)
    pieces = [
        (group, pictures, rows)
        for group in range(len(operands))
        for pictures in _slices(len(images), parts // of_filters)
        for rows in _slices(len(filters), of_filters)
    ]

    def convolve(piece: tuple[int, slice, slice]) -> Tensor:
        group, pictures, rows = piece
        x, w, b = operands[group]
        bias = None if b is None else b[rows]
        return aten._nnpack_spatial_convolution(x[pictures], w[rows], bias, [pad, pad], [1, 1])

    results = map(convolve, pieces) if threads == 1 else _helpers(threads).map(convolve, pieces)
    for piece, planes in zip(pieces, results, strict=True):
        yield *piece, planes


def _slices(length: int, parts: int) -> list[slice]:
    """Divide a length into parts that differ by at most one, none of them empty."""
    parts = min(length, parts)
    bounds = [length * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="convolution")


def _empty_result(x: Tensor, w: Tensor, pad: int) -> Tensor:
    """Allocate the result channels-last, as the kernels around it expect."""
    rows, columns = (n + 2 * pad - w.shape[2] + 1 for n in x.shape[2:])
    shape = (x.shape[0], w.shape[0], rows, columns)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _turned(w: Tensor, groups: int) -> Tensor:
    """Filters whose convolution with g is the gradient of a convolution's images, at stride 1.

    Each is turned by 180 degrees, and inputs and outputs are exchanged. With the padding ``size - 1
    - pad`` the result has the images' size again.
    """
    filters, channels, *window = w.shape
    by_group = w.reshape(groups, filters // groups, channels, *window)
    turned = by_group.transpose(1, 2).flip(3, 4)
    return turned.reshape(groups * channels, filters // groups, *window)


@cache
def has_nnpack() -> bool:
    """Return whether this PyTorch has NNPACK, which then has been set up with one thread."""
    # Only the query does so (PyTorch 2.13), and the first call makes a pool of PyTorch's threads.
    if not torch.backends.nnpack.is_available():
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        image, filters = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 3, 3)
        aten._nnpack_spatial_convolution(image, filters, None, [0, 0], [1, 1])
    finally:
        torch.set_num_threads(threads)
    return True
