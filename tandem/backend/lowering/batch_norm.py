"""Batch normalisation on PyTorch's kernels, or on loops of our own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pytensor.graph.basic import Apply

from tandem.backend import norm_kernels
from tandem.backend.lowering.registry import Lowering, computed, lower, unsupported
from tandem.ops import (
    BatchNorm,
    BatchNormBySums,
    BatchNormBySumsGrad,
    BatchNormGrad,
    BatchNormInference,
    ChannelGradientSums,
    ChannelSums,
)

Tensor = torch.Tensor


def _kernels(device: torch.device, compiled: bool) -> Any:
    """The module of loops for a CPU; else that of PyTorch's kernels, with the same functions."""
    if compiled or device.type != "cpu":
        return norm_kernels
    from tandem.backend import norm_loops  # imports numba

    return norm_loops


def _kernels_with(relu: bool, node: Apply, device: torch.device, compiled: bool) -> Any:
    kernels = _kernels(device, compiled)
    if relu and kernels is norm_kernels:
        raise unsupported(node, "its loops are for a CPU, without torch.compile")
    return kernels


@lower.register(BatchNorm)
def lower_batch_norm(op: BatchNorm, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    kernels = _kernels_with(op.relu, node, device, compiled)
    rows, epsilon, adds, relu = op.rows, op.epsilon, op.adds, (True,) * op.relu

    def normalize(x: Tensor, scale: Tensor, shift: Tensor, *more: Tensor) -> Any:
        other, valid = more[:adds], more[adds] if len(more) > adds else None
        return kernels.batch_norm(x, scale, shift, valid, rows, epsilon, *relu, *other)

    return computed(normalize)


@lower.register(BatchNormGrad)
def lower_batch_norm_grad(
    op: BatchNormGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    kernels, rows, relu = _kernels_with(op.relu, node, device, compiled), op.rows, op.relu

    def gradient(x: Tensor, scale: Tensor, *more: Tensor) -> Any:
        shift = more[0] if relu else None
        g, means, inverses, *valid = more[relu:]
        last = valid[0] if valid else None
        return kernels.batch_norm_gradient(x, scale, shift, g, means, inverses, last, rows)

    return computed(gradient)


@lower.register(BatchNormInference)
def lower_batch_norm_inference(
    op: BatchNormInference, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    epsilon = op.epsilon

    def normalize(
        x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor
    ) -> Tensor:
        return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, epsilon)

    return computed(normalize)


# Stages


@lower.register(ChannelSums)
def lower_sums(op: ChannelSums, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return _stage(_kernels(device, compiled).channel_sums, node, 2)


@lower.register(ChannelGradientSums)
def lower_gradient_sums(
    op: ChannelGradientSums, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return _stage(_kernels(device, compiled).channel_gradient_sums, node, 4)


@lower.register(BatchNormBySumsGrad)
def lower_gradient_by_sums(
    op: BatchNormBySumsGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return _stage(_kernels(device, compiled).gradient_by_sums, node, 7)


@lower.register(BatchNormBySums)
def lower_batch_norm_by_sums(
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

    return _stage(normalize, node, 6)


def _stage(kernel: Callable[..., Any], node: Apply, inputs: int) -> Lowering:
    """The call of a kernel whose argument after `inputs` is None where rows are all valid."""
    if len(node.inputs) > inputs:
        return computed(kernel)
    return computed(lambda *tensors: kernel(*tensors, None))
