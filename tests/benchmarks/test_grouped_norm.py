"""Batch normalisation by groups of rows, against each group by itself."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.grouped_norm import GroupedBatchNorm2d, normalise_groups


def test_each_group_of_rows_is_normalised_by_itself() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(80, 3, 4, 4, dtype=torch.float64), GroupedBatchNorm2d(3, 32).double()
    nn.init.uniform_(norm.weight)
    groups = (x[:32], x[32:64], x[64:])
    expected = [
        (group - group.mean((0, 2, 3), keepdim=True))
        / (group.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        * norm.weight.view(1, 3, 1, 1)
        for group in groups
    ]
    torch.testing.assert_close(norm(x), torch.cat(expected))
    for average, first, found in (
        (norm.running_mean, 0.0, [group.mean((0, 2, 3)) for group in groups]),
        (norm.running_var, 1.0, [group.var((0, 2, 3)) for group in groups]),
    ):
        weighted = sum(len(g) / 80 * value for g, value in zip(groups, found, strict=True))
        torch.testing.assert_close(average, 0.9 * first + 0.1 * weighted)
    norm.eval()
    plain = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    torch.testing.assert_close(norm(x), plain)


def test_every_normalisation_of_a_network_is_replaced() -> None:
    inner = nn.Sequential(nn.BatchNorm2d(4, eps=1e-3), nn.ReLU())
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), inner)
    normalise_groups(network, 8)
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [(type(m), m.num_features, m.rows, m.eps) for m in norms] == [
        (GroupedBatchNorm2d, 4, 8, 1e-5),
        (GroupedBatchNorm2d, 4, 8, 1e-3),
    ]
