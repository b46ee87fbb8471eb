"""Batch normalisation on PyTorch's kernels, or on loops of our own."""

from typing import Any

import torch
import torch.nn.functional as F
from pytensor.graph.basic import Apply

from tandem.backend.lowering.registry import Lowering, computed, lower, unsupported
from tandem.ops.batch_norm import BatchNorm, BatchNormGrad, BatchNormInference
from tandem.ops.norm_relu import NormRelu, NormReluGrad

Tensor = torch.Tensor
aten = torch.ops.aten


def _loops(device: torch.device, compiled: bool) -> Any:
    """The module of loops for a CPU; None where PyTorch's kernels are used."""
    if compiled or device.type != "cpu":
        return None
    from tandem.backend import norm_loops  # imports numba

    return norm_loops


@lower.register(BatchNorm)
def lower_batch_norm(op: BatchNorm, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    rows, epsilon = op.rows, op.epsilon
    if loops := _loops(device, compiled):
        return computed(
            lambda x, scale, shift, valid=None: loops.batch_norm(
                x, scale, shift, valid, rows, epsilon
            )
        )
    if len(node.inputs) == 3:
        return computed(lambda x, scale, shift: _by_group(x, scale, shift, rows, epsilon))
    return computed(lambda x, scale, shift, valid: _masked(x, scale, shift, valid, rows, epsilon))


@lower.register(BatchNormGrad)
def lower_batch_norm_grad(
    op: BatchNormGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    rows = op.rows
    if loops := _loops(device, compiled):
        return computed(
            lambda x, scale, g, means, inverses, valid=None: loops.batch_norm_gradient(
                x, scale, g, means, inverses, valid, rows
            )
        )
    if len(node.inputs) == 5:
        return computed(lambda *inputs: _gradient_by_group(rows, *inputs))
    return computed(lambda *inputs: _masked_gradient(rows, *inputs))


@lower.register(NormRelu)
def lower_norm_relu(op: NormRelu, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    loops = _required_loops(node, device, compiled)
    rows, epsilon, adds = op.rows, op.epsilon, op.adds

    def normalize(x: Tensor, scale: Tensor, shift: Tensor, *more: Tensor) -> Any:
        other, valid = more[0] if adds else None, more[adds] if len(more) > adds else None
        return loops.batch_norm(x, scale, shift, valid, rows, epsilon, True, other)

    return computed(normalize)


@lower.register(NormReluGrad)
def lower_norm_relu_grad(
    op: NormReluGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    loops, rows = _required_loops(node, device, compiled), op.rows

    def gradient(x: Tensor, scale: Tensor, shift: Tensor, *more: Tensor) -> Any:
        g, means, inverses, *valid = more
        return loops.batch_norm_gradient(
            x, scale, g, means, inverses, valid[0] if valid else None, rows, shift
        )

    return computed(gradient)


def _required_loops(node: Apply, device: torch.device, compiled: bool) -> Any:
    loops = _loops(device, compiled)
    if loops is None:
        raise unsupported(node, "its loops are for a CPU, without torch.compile")
    return loops


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


def _by_group(
    x: Tensor, scale: Tensor, shift: Tensor, rows: int, epsilon: float
) -> tuple[Tensor, ...]:
    """Normalise groups whose rows are all valid, each by a call of PyTorch's kernel."""
    found = [
        aten.native_batch_norm(part, scale, shift, None, None, True, 0.0, epsilon)
        for part in x.split(rows)
    ]
    y, means, inverses = (
        parts[0] if len(parts) == 1 else torch.cat(parts)
        for parts in ([f[0] for f in found], *([f[i][None] for f in found] for i in (1, 2)))
    )
    area = x.shape[2:].numel()
    weights = [len(part) / len(x) for part in x.split(rows)]
    mean, variance = torch.zeros_like(scale), torch.zeros_like(scale)
    for group, part in enumerate(x.split(rows)):
        count = len(part) * area
        biased = (inverses[group] ** -2 - epsilon).clamp(min=0)
        mean = mean + weights[group] * means[group]
        variance = variance + weights[group] * count / max(1, count - 1) * biased
    return y, mean, variance, means, inverses


def _gradient_by_group(
    rows: int, x: Tensor, scale: Tensor, g: Tensor, means: Tensor, inverses: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        g = g.contiguous(memory_format=torch.channels_last)
    found = [
        aten.native_batch_norm_backward(
            slope, part, scale, None, None, mean, inverse, True, 0.0, [True, True, True]
        )
        for part, slope, mean, inverse in zip(
            x.split(rows), g.split(rows), means, inverses, strict=True
        )
    ]
    if len(found) == 1:
        return found[0]
    dscale, dshift = (torch.stack([f[i] for f in found]).sum(0) for i in (1, 2))
    return torch.cat([f[0] for f in found]), dscale, dshift


class _Groups:
    """Images as (group, row, channel, ...), and which rows count; `valid` stays on the device."""

    def __init__(self, x: Tensor, valid: Tensor, rows: int) -> None:
        self._batch, self._rows, groups = len(x), rows, -(-len(x) // rows)
        self._missing = groups * rows - len(x)
        self._shape = (groups, rows, *x.shape[1:])
        self._axes = (1, *range(3, x.ndim + 1))
        ones = [1] * (x.ndim - 1)
        numbers = torch.arange(groups * rows, device=x.device)
        self.counts = (valid - numbers[::rows]).clamp(0, rows)  # rows that count, of each group
        self.kept = (numbers < valid).view(groups, rows, *ones)
        self.values = (self.counts * x.shape[2:].numel()).unsqueeze(1)
        self.divisor = self.values.clamp(min=1).to(x.dtype)

    def split(self, x: Tensor) -> Tensor:
        """Images by group, with 0 in the rows that do not count."""
        whole = F.pad(x, (0, 0) * (x.ndim - 1) + (0, self._missing)) if self._missing else x
        return self.only_kept(whole.view(self._shape))

    def only_kept(self, x: Tensor) -> Tensor:
        return torch.where(self.kept, x, 0)

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[: self._batch]

    def sum(self, x: Tensor) -> Tensor:
        """(group, channel)."""
        return x.sum(self._axes)

    def across(self, vector: Tensor) -> Tensor:
        """A vector of each group, or of all, to be combined with images."""
        return vector.view(-1, 1, vector.shape[-1], *[1] * (len(self._axes) - 1))


def _masked(
    x: Tensor, scale: Tensor, shift: Tensor, valid: Tensor, rows: int, epsilon: float
) -> tuple[Tensor, ...]:
    groups = _Groups(x, valid, rows)
    part = groups.split(x)
    means = groups.sum(part) / groups.divisor
    centred = groups.only_kept(part - groups.across(means))
    variances = groups.sum(centred * centred) / groups.divisor
    inverses = torch.rsqrt(variances + epsilon)
    y = centred * groups.across(inverses * scale) + groups.across(shift)
    counts = groups.counts.to(x.dtype).unsqueeze(1)
    weights = counts / counts.sum().clamp(min=1)
    unbiased = variances * groups.divisor / (groups.values - 1).clamp(min=1)
    reported = ((weights * each).sum(0) for each in (means, unbiased))
    return groups.join(y), *reported, means, inverses


def _masked_gradient(
    rows: int,
    x: Tensor,
    scale: Tensor,
    g: Tensor,
    means: Tensor,
    inverses: Tensor,
    valid: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = _Groups(x, valid, rows)
    slope, inverse = groups.split(g), groups.across(inverses)
    normal = groups.only_kept((groups.split(x) - groups.across(means)) * inverse)
    sums, products = groups.sum(slope), groups.sum(slope * normal)
    mean, along = groups.across(sums / groups.divisor), groups.across(products / groups.divisor)
    dx = groups.only_kept((slope - mean - normal * along) * (groups.across(scale) * inverse))
    return groups.join(dx), products.sum(0), sums.sum(0)
