"""Batch normalisation by sums over all rows, on PyTorch's kernels or on loops of our own."""

from collections.abc import Callable
from typing import Any

import torch
from pytensor.graph.basic import Apply

from tandem.backend.lowering.registry import Lowering, computed, lower
from tandem.ops import BatchNormBySums, BatchNormBySumsGrad, ChannelGradientSums, ChannelSums

Tensor = torch.Tensor


def _kernels(device: torch.device, compiled: bool) -> Any:
    """The module of loops for a CPU; else PyTorch's kernels, under the same names."""
    if compiled or device.type != "cpu":
        return _TorchKernels
    from tandem.backend import global_norm_loops  # imports numba

    return global_norm_loops


@lower.register(ChannelSums)
def lower_sums(op: ChannelSums, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return _lowered(_kernels(device, compiled).channel_sums, node, 2)


@lower.register(ChannelGradientSums)
def lower_gradient_sums(
    op: ChannelGradientSums, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return _lowered(_kernels(device, compiled).channel_gradient_sums, node, 4)


@lower.register(BatchNormBySumsGrad)
def lower_gradient(
    op: BatchNormBySumsGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return _lowered(_kernels(device, compiled).gradient_by_sums, node, 7)


@lower.register(BatchNormBySums)
def lower_batch_norm(
    op: BatchNormBySums, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    epsilon, kernels = op.epsilon, _kernels(device, compiled)

    def normalize(
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        pivot: Tensor,
        sums: Tensor,
        count: Tensor,
        valid: Tensor | None,
    ) -> tuple[Tensor, ...]:
        values = count.clamp(min=1)
        moved = sums[0] / values
        variance = (sums[1] / values - moved * moved).clamp(min=0)
        mean = torch.where(count > 0, pivot + moved, 0).to(x.dtype)
        inverse = torch.rsqrt(variance + epsilon).to(x.dtype)
        unbiased = (variance * values / (count - 1).clamp(min=1)).to(x.dtype)
        y = kernels.normalize(x, scale, shift, mean, inverse, valid)
        return y, mean, unbiased, inverse

    return _lowered(normalize, node, 6)


def _lowered(kernel: Callable[..., Any], node: Apply, inputs: int) -> Lowering:
    """The call of a kernel whose argument after `inputs` is None where rows are all valid."""
    if len(node.inputs) > inputs:
        return computed(kernel)
    return computed(lambda *tensors: kernel(*tensors, None))


class _TorchKernels:
    """The functions of `tandem.backend.global_norm_loops` on any device; `valid` stays there."""

    @staticmethod
    def channel_sums(x: Tensor, pivot: Tensor, valid: Tensor | None) -> Tensor:
        x, count = _kept(x, valid), _count(x, valid)
        mean = _sum(x) / count.clamp(min=1).to(x.dtype)
        centred = _kept(x - _across(mean, x), valid)
        moved = mean.double() - pivot.double()
        squares = _sum(centred * centred).double() + count * moved * moved
        return torch.stack([count * moved, squares])

    @staticmethod
    def normalize(
        x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
    ) -> Tensor:
        centred = _kept(x - _across(mean, x), valid)
        return centred * _across(inverse * scale, x) + _across(shift, x)

    @staticmethod
    def channel_gradient_sums(
        x: Tensor, g: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
    ) -> Tensor:
        slope, centred = _kept(g, valid), _kept(x - _across(mean, x), valid)
        return torch.stack([_sum(slope * centred) * inverse, _sum(slope)])

    @staticmethod
    def gradient_by_sums(
        x: Tensor,
        g: Tensor,
        scale: Tensor,
        mean: Tensor,
        inverse: Tensor,
        sums: Tensor,
        count: Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        along, level = sums / count.clamp(min=1).to(x.dtype)
        centred = x - _across(mean, x)
        dx = g - _across(level, x) - centred * _across(along * inverse, x)
        return _kept(dx * _across(scale * inverse, x), valid)


def _kept(x: Tensor, valid: Tensor | None) -> Tensor:
    """Images with 0 in the rows that are not valid."""
    if valid is None:
        return x
    rows = torch.arange(len(x), device=x.device) < valid
    return torch.where(rows.view(-1, *[1] * (x.ndim - 1)), x, 0)


def _count(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return how many values of a channel count, float64."""
    area = x.shape[2:].numel()
    if valid is None:
        return torch.full((), len(x) * area, dtype=torch.float64, device=x.device)
    return (valid.clamp(0, len(x)) * area).double()


def _sum(x: Tensor) -> Tensor:
    """Sum of each channel."""
    return x.sum((0, *range(2, x.ndim)))


def _across(vector: Tensor, x: Tensor) -> Tensor:
    """A number of each channel, to be combined with images."""
    return vector.view(-1, *[1] * (x.ndim - 2))
