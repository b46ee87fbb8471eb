"""Convolution and its gradients on PyTorch's kernels.

On a CPU PyTorch has two libraries for them: oneDNN, which multiplies each pixel with each tap, and
NNPACK, which multiplies Fourier transforms of tiles, with three to five times fewer products and
less rounding (Mathieu, Henaff, LeCun 2014, section 2). PyTorch by default uses oneDNN if available.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from pytensor.graph.basic import Apply, Variable

from tandem.backend.lowering.registry import Lowering, computed, lower, static_shape
from tandem.ops.conv import Conv2d, Conv2dInputGrad, Conv2dWeightGrad

Tensor = torch.Tensor
aten = torch.ops.aten


@lower.register(Conv2d)
def lower_conv2d(op: Conv2d, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    stride, pad, groups = op.stride, op.pad, op.groups

    def direct(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.conv2d(x, w, b, stride, pad, 1, groups)

    x, w, _ = node.inputs
    if _has_transforms(device) and _pays(stride, x, w, node.outputs[0]):
        return computed(_Transformed(pad, groups, direct), factors=2, images=True)
    return computed(direct, factors=2, images=True)


@lower.register(Conv2dInputGrad)
def lower_conv2d_input_grad(
    op: Conv2dInputGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    direct = _gradient(op, 0)
    x, w, g = node.inputs
    size = static_shape(w)
    if not (_has_transforms(device) and _pays(op.stride, g, w, x)) or size is None:
        return computed(direct, factors=3, images=True)
    pad = size[2] - 1 - op.pad
    call = _TransformedGradient(pad, op.groups, direct) if pad >= 0 else direct
    return computed(call, factors=3, images=True)


@lower.register(Conv2dWeightGrad)
def lower_conv2d_weight_grad(
    op: Conv2dWeightGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return computed(_gradient(op, 1), factors=3, images=True)


def _gradient(
    op: Conv2dInputGrad | Conv2dWeightGrad, which: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make PyTorch's call for one of a convolution's gradients: 0 the images', 1 the filters'."""
    stride, pad, groups = [op.stride] * 2, [op.pad] * 2, op.groups
    wanted = [which == 0, which == 1, False]

    def gradient(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return aten.convolution_backward(
            g, x, w, None, stride, pad, [1, 1], False, [0, 0], groups, wanted
        )[which]

    return gradient


@torch.library.custom_op("tandem::transformed_convolution", mutates_args=())
def _transformed_convolution(
    x: Tensor, w: Tensor, b: Tensor | None, pad: int, groups: int
) -> Tensor:
    """A convolution of stride 1 by NNPACK, which has no groups; an operator of our own, since
    ``torch.compile`` can't read PyTorch's."""
    biases = [None] * groups if b is None else b.chunk(groups)
    results = [
        aten._nnpack_spatial_convolution(
            x_part.contiguous(), w_part.contiguous(), b_part, [pad, pad], [1, 1]
        )
        for x_part, w_part, b_part in zip(x.chunk(groups, 1), w.chunk(groups), biases, strict=True)
    ]
    return results[0] if groups == 1 else torch.cat(results, dim=1)


@_transformed_convolution.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, pad: int, groups: int) -> Tensor:
    rows, columns = (n + 2 * pad - w.shape[2] + 1 for n in x.shape[2:])
    return x.new_empty((x.shape[0], w.shape[0], rows, columns))


@dataclass(frozen=True)
class _Transformed:
    """A convolution of stride 1 by NNPACK; operands that aren't float32 go to `direct`."""

    pad: int
    groups: int
    direct: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if x.dtype != torch.float32:
            return self.direct(x, w, b)
        return _transformed_convolution(x, w, b, self.pad, self.groups)


@dataclass(frozen=True)
class _TransformedGradient:
    """The gradient of a convolution of stride 1 with respect to its images, by NNPACK.

    It is the convolution of g with each filter turned by 180 degrees, inputs and outputs exchanged,
    and padded so that it has x's size again.
    """

    pad: int
    groups: int
    direct: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        if g.dtype != torch.float32:
            return self.direct(x, w, g)
        filters, channels, *window = w.shape
        by_group = w.reshape(self.groups, filters // self.groups, channels, *window)
        turned = by_group.transpose(1, 2).flip(3, 4)
        turned = turned.reshape(self.groups * channels, filters // self.groups, *window)
        return _transformed_convolution(g, turned, None, self.pad, self.groups)


def _has_transforms(device: torch.device) -> bool:
    # The query also sets NNPACK up, which its operator doesn't do by itself (PyTorch 2.13).
    return device.type == "cpu" and torch.backends.nnpack.is_available()


_LEAST_TILES = 16  # in a minibatch, to make up for transforming the filters
_LEAST_SAVING = 2.5  # factor in multiplications, to make up for transforming images and results


def _pays(stride: int, x: Variable, w: Variable, y: Variable) -> bool:
    """Whether NNPACK should compute the convolution y of x with w.

    It uses tiles of 16 x 16 pixels and Fourier's transform unless four tiles of 8 x 8 suffice, for
    which, with 3 x 3 filters, it uses Winograd's: that rounds a hundred times more coarsely than
    the sum itself, and is avoided. The limits are where it became faster on a CPU with AVX2.
    """
    shapes = static_shape(x), static_shape(w), static_shape(y)
    if None in shapes or stride != 1 or x.type.dtype != "float32":
        return False
    (batch, *_), (*_, side, columns), (*_, height, width) = cast(Any, shapes)
    if side != columns or not 3 <= side <= 8:
        return False
    large, small = (-(-height // (n - side)) * -(-width // (n - side)) for n in (17, 9))
    # Half of the transform of real numbers, with four multiplications per complex product.
    saving = side**2 * height * width / (16 * 16 / 2 * 4 * large)
    return small > 4 * large and batch * large >= _LEAST_TILES and saving >= _LEAST_SAVING
