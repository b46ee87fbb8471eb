"""Batch normalisation on PyTorch's kernels: the functions of `norm_loops` for any device.

`valid`, a number of rows, stays on the device: a step that is captured reads it in each replay.
"""

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
aten = torch.ops.aten


def batch_norm(
    x: Tensor, scale: Tensor, shift: Tensor, valid: Tensor | None, rows: int, epsilon: float
) -> tuple[Tensor, ...]:
    """Compute the outputs of `tandem.ops.BatchNorm` without `relu`."""
    if valid is None:
        return _by_group(x, scale, shift, rows, epsilon)
    groups = _Groups(x, valid, rows)
    means, squares = groups.measure(x)
    variances = squares / groups.divisor
    inverses = torch.rsqrt(variances + epsilon)
    counts = groups.counts.to(x.dtype).unsqueeze(1)
    weights = counts / counts.sum().clamp(min=1)
    unbiased = variances * groups.divisor / (groups.values - 1).clamp(min=1)
    reported = ((weights * each).sum(0) for each in (means, unbiased))
    return groups.normalize(x, scale, shift, means, inverses), *reported, means, inverses


def batch_norm_gradient(
    x: Tensor,
    scale: Tensor,
    shift: None,
    g: Tensor,
    means: Tensor,
    inverses: Tensor,
    valid: Tensor | None,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the outputs of `tandem.ops.BatchNormGrad` without `relu`."""
    if valid is None:
        return _gradient_by_group(rows, x, scale, g, means, inverses)
    groups = _Groups(x, valid, rows)
    products, sums = groups.gradient_sums(x, g, means, inverses)
    along, level = products / groups.divisor, sums / groups.divisor
    dx = groups.gradient(x, g, scale, means, inverses, along, level)
    return dx, products.sum(0), sums.sum(0)


def channel_sums(x: Tensor, pivot: Tensor, valid: Tensor | None) -> Tensor:
    """Compute the output of `tandem.ops.ChannelSums`."""
    groups = _Groups(x, valid)
    (mean,), (squares,) = groups.measure(x)
    moved, count = mean.double() - pivot.double(), groups.values[0].double()
    return torch.stack([count * moved, squares.double() + count * moved * moved])


def normalize(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
) -> Tensor:
    """Compute ``scale (x - mean) inverse + shift``, and the shift in rows that are not valid."""
    return _Groups(x, valid).normalize(x, scale, shift, mean, inverse)


def channel_gradient_sums(
    x: Tensor, g: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
) -> Tensor:
    """Compute the output of `tandem.ops.ChannelGradientSums`."""
    return torch.cat(_Groups(x, valid).gradient_sums(x, g, mean, inverse))


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
    """Compute the output of `tandem.ops.BatchNormBySumsGrad`."""
    along, level = sums / count.clamp(min=1).to(x.dtype)
    return _Groups(x, valid).gradient(x, g, scale, mean, inverse, along, level)


class _Groups:
    """Images as (group, row, channel, ...), and which rows count; without `rows`, one group."""

    def __init__(self, x: Tensor, valid: Tensor | None, rows: int | None = None) -> None:
        groups = 1 if rows is None else -(-len(x) // rows)
        rows = max(1, len(x)) if rows is None else rows
        self._batch, self._missing = len(x), groups * rows - len(x)
        self._shape = (groups, rows, *x.shape[1:])
        self._axes = (1, *range(3, x.ndim + 1))
        numbers = torch.arange(groups * rows, device=x.device)
        last = self._batch if valid is None else valid
        self.counts = (last - numbers[::rows]).clamp(0, rows)  # rows that count, of each group
        self._kept = None  # all
        if valid is not None or self._missing:
            self._kept = (numbers < last).view(groups, rows, *[1] * (x.ndim - 1))
        self.values = (self.counts * x.shape[2:].numel()).unsqueeze(1)
        self.divisor = self.values.clamp(min=1).to(x.dtype)

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means, and sums of squares about them, (group, channel)."""
        part = self._split(x)
        means = self._sum(part) / self.divisor
        centred = self._only_kept(part - self._across(means))
        return means, self._sum(centred * centred)

    def normalize(
        self, x: Tensor, scale: Tensor, shift: Tensor, means: Tensor, inverses: Tensor
    ) -> Tensor:
        centred = self._only_kept(self._split(x) - self._across(means))
        return self._join(centred * self._across(inverses * scale) + self._across(shift))

    def gradient_sums(
        self, x: Tensor, g: Tensor, means: Tensor, inverses: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of scale and shift, (group, channel)."""
        slope, normal = self._split(g), self._normal(x, means, inverses)
        return self._sum(slope * normal), self._sum(slope)

    def gradient(
        self,
        x: Tensor,
        g: Tensor,
        scale: Tensor,
        means: Tensor,
        inverses: Tensor,
        along: Tensor,
        level: Tensor,
    ) -> Tensor:
        """Gradient of x, of the means of both sums."""
        normal = self._normal(x, means, inverses)
        dx = self._split(g) - self._across(level) - normal * self._across(along)
        return self._join(self._only_kept(dx * self._across(scale * inverses)))

    def _normal(self, x: Tensor, means: Tensor, inverses: Tensor) -> Tensor:
        moved = self._split(x) - self._across(means)
        return self._only_kept(moved * self._across(inverses))

    def _split(self, x: Tensor) -> Tensor:
        """Images by group, with 0 in the rows that do not count."""
        whole = F.pad(x, (0, 0) * (x.ndim - 1) + (0, self._missing)) if self._missing else x
        return self._only_kept(whole.view(self._shape))

    def _only_kept(self, x: Tensor) -> Tensor:
        return x if self._kept is None else torch.where(self._kept, x, 0)

    def _join(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[: self._batch]

    def _sum(self, x: Tensor) -> Tensor:
        """(group, channel)."""
        return x.sum(self._axes)

    def _across(self, vector: Tensor) -> Tensor:
        """A vector of each group, or of all, to be combined with images."""
        return vector.view(-1, 1, vector.shape[-1], *[1] * (len(self._axes) - 1))


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
