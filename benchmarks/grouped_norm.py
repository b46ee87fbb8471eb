"""Batch normalisation by groups of rows in plain PyTorch, as a peer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation of each run of `rows` rows, as several trainers without communication do.

    The running averages take the mean over the groups, weighted by their numbers of rows.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, rows: int, epsilon: float = 1e-5) -> None:
        super().__init__(channels, epsilon)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.momentum is not None
        averages = (self.running_mean, self.running_var)
        results, totals = [], [torch.zeros_like(average) for average in averages]
        for group in x.split(self.rows):
            # With a momentum of 1 they become the group's own.
            found = [torch.zeros_like(average) for average in averages]
            results.append(F.batch_norm(group, *found, self.weight, self.bias, True, 1.0, self.eps))
            for total, own in zip(totals, found, strict=True):
                total += len(group) / len(x) * own
        for average, total in zip(averages, totals, strict=True):
            average.lerp_(total, self.momentum)
        return torch.cat(results)


def normalise_groups(module: nn.Module, rows: int) -> None:
    """Replace every batch normalisation of images below a module by one of groups of rows."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, GroupedBatchNorm2d(child.num_features, rows, child.eps))
        else:
            normalise_groups(child, rows)
