"""Pooling and borders of images on PyTorch's kernels."""

import torch
import torch.nn.functional as F
from pytensor.graph.basic import Apply

from tandem.backend.lowering.registry import Lowering, computed, lower
from tandem.ops.pad import Pad2d
from tandem.ops.pool import AveragePool2d, AveragePool2dGrad, MaxPool2d, MaxPool2dGrad

Tensor = torch.Tensor
aten = torch.ops.aten


@lower.register(MaxPool2d)
def lower_max_pool2d(op: MaxPool2d, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    windows = [*op.size], [*op.stride], [*op.pad], [1, 1], op.ceil
    if compiled or device.type != "cpu":
        return computed(lambda x: aten.max_pool2d_with_indices(x, *windows))
    # Of planes, PyTorch's kernel takes several times as long.
    return computed(lambda x: aten.max_pool2d_with_indices(_channels_last(x), *windows))


@lower.register(MaxPool2dGrad)
def lower_max_pool2d_grad(
    op: MaxPool2dGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    windows = [*op.size], [*op.stride], [*op.pad], [1, 1], op.ceil

    def gradient(x: Tensor, argmax: Tensor, g: Tensor) -> Tensor:
        # With different layouts PyTorch's kernel takes five times as long.
        x, g = _laid_out_as(argmax, x), _laid_out_as(argmax, g)
        return aten.max_pool2d_with_indices_backward(g, x, *windows, argmax)

    return computed(gradient)


@lower.register(AveragePool2d)
def lower_average_pool2d(
    op: AveragePool2d, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    windows = [*op.size], [*op.stride], [*op.pad], op.ceil, op.count_pad
    return computed(lambda x: aten.avg_pool2d(x, *windows))


@lower.register(AveragePool2dGrad)
def lower_average_pool2d_grad(
    op: AveragePool2dGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    windows = [*op.size], [*op.stride], [*op.pad], op.ceil, op.count_pad

    def gradient(x: Tensor, g: Tensor) -> Tensor:
        return aten.avg_pool2d_backward(_laid_out_as(x, g), x, *windows, None)

    return computed(gradient)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _laid_out_as(other: Tensor, x: Tensor) -> Tensor:
    last = other.is_contiguous(memory_format=torch.channels_last)
    return _channels_last(x) if last else x


@lower.register(Pad2d)
def lower_pad2d(op: Pad2d, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    top, bottom, left, right = op.sides
    return computed(lambda x: F.pad(x, (left, right, top, bottom)))
