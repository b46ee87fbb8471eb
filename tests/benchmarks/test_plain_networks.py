"""Plain PyTorch's networks have the published numbers of parameters; groups of rows by loops."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.plain_networks import (
    VGG,
    CifarResNet,
    GoogLeNet,
    GroupedBatchNorm2d,
    ResNet50,
    WideResNet,
    cost,
)

COUNTS = {
    "ResNet-20": (partial(CifarResNet, 20), 269_722),
    "ResNet-32": (partial(CifarResNet, 32), 464_154),
    "ResNet-56": (partial(CifarResNet, 56), 853_018),
    "ResNet-110": (partial(CifarResNet, 110), 1_727_962),
    "WRN-16-4": (partial(WideResNet, 16, 4), 2_748_890),
    "WRN-28-10": (partial(WideResNet, 28, 10), 36_479_194),
    "ResNet-50": (ResNet50, 25_557_032),
    "GoogLeNet": (GoogLeNet, 13_004_888),
    "VGG-11": (partial(VGG, 1000, 224), 132_863_336),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    make, expected = COUNTS[name]
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == expected


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


def test_auxiliary_heads_cost_in_training_alone() -> None:
    labels, (logits, first, second) = torch.tensor([1, 0]), torch.randn(3, 2, 4)
    whole = cost((logits, first, second), labels)
    parts = [F.cross_entropy(part, labels) for part in (logits, first, second)]
    torch.testing.assert_close(whole, parts[0] + 0.3 * (parts[1] + parts[2]))
    torch.testing.assert_close(cost(logits, labels), parts[0])
