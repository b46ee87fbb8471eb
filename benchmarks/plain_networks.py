"""VGG, ResNet, wide ResNet and GoogLeNet as PyTorch users write them, as peers.

Names of parameters are torchvision's where torchvision has the network. Nothing here is imported
from it: it has no wheel for every CPU.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AUXILIARY_WEIGHT = 0.3  # of each auxiliary head's cost (Szegedy et al. 2015)


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation of each run of `rows` rows, as several trainers without communication do.

    The running averages take the mean over the groups, weighted by their numbers of rows.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, rows: int) -> None:
        super().__init__(channels)
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


Norm = Callable[[int], nn.Module]  # makes the normalisation of a number of channels


def _conv(
    inputs: int, filters: int, size: int, stride: int = 1, pad: int | None = None
) -> nn.Conv2d:
    return nn.Conv2d(inputs, filters, size, stride, size // 2 if pad is None else pad, bias=False)


class VGG(nn.Module):
    """VGG (Simonyan, Zisserman 2015) by the filters of its layers, "M" being a pooling."""

    layers: ClassVar = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")  # VGG-11

    def __init__(self, classes: int, crop: int) -> None:
        super().__init__()
        features: list[nn.Module] = []
        channels = 3
        for filters in self.layers:
            if isinstance(filters, int):
                features += [nn.Conv2d(channels, filters, 3, 1, 1), nn.ReLU(inplace=True)]
                channels = filters
            else:
                features.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(
            nn.Linear(channels * (crop // 32) ** 2, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3; the shortcut skips pixels and adds zeros (option A)."""

    def __init__(self, inputs: int, filters: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, filters, 3, stride), norm(filters)
        self.conv2, self.bn2 = _conv(filters, filters, 3), norm(filters)
        self.stride, self.added = stride, filters - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1 or self.added:
            half = self.added // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return F.relu(out + x)


class CifarResNet(nn.Module):
    """ResNet for pictures of 32 pixels (He et al. 2016, section 4.2), of 6 n + 2 layers."""

    def __init__(self, depth: int, classes: int = 10, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 16, 3), norm(16)
        channels = 16
        for number, filters in enumerate((16, 32, 64), start=1):
            blocks = []
            for block in range((depth - 2) // 6):
                stride = 2 if number > 1 and block == 0 else 1
                blocks.append(BasicBlock(channels, filters, stride, norm))
                channels = filters
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for number in (1, 2, 3):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(x.mean((2, 3)))


class WideBlock(nn.Module):
    """Pre-activated block of a wide ResNet."""

    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), _conv(inputs, filters, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(filters), _conv(filters, filters, 3)
        self.shortcut = _conv(inputs, filters, 1, stride) if inputs != filters else None

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(first))))
        return out + (x if self.shortcut is None else self.shortcut(first))


class WideResNet(nn.Module):
    """Wide ResNet (Zagoruyko, Komodakis 2016) of 6 n + 4 layers, `factor` times as wide."""

    def __init__(self, depth: int, factor: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = _conv(3, 16, 3)
        blocks: list[nn.Module] = []
        channels = 16
        for number, filters in enumerate((16 * factor, 32 * factor, 64 * factor)):
            for block in range((depth - 4) // 6):
                blocks.append(WideBlock(channels, filters, 2 if number and block == 0 else 1))
                channels = filters
        self.blocks, self.bn = nn.Sequential(*blocks), nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.blocks(self.conv1(x)))).mean((2, 3)))


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels; the middle one has the stride (version 1.5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != 4 * width:
            projection = _conv(inputs, 4 * width, 1, stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """ResNet-50, version 1.5 (He et al. 2016; torchvision)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        channels = 64
        for number, (width, count) in enumerate(
            zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)
        ):
            blocks = []
            for block in range(count):
                stride = 2 if number and block == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = 4 * width
            setattr(self, f"layer{number + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for number in (1, 2, 3, 4):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(x.mean((2, 3)))


class BasicConv2d(nn.Module):
    """Convolution, batch normalisation with epsilon 0.001, ReLU."""

    def __init__(self, inputs: int, filters: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = _conv(inputs, filters, size, stride)
        self.bn = nn.BatchNorm2d(filters, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four branches; the third has 3 x 3 for the paper's 5 x 5, as in torchvision."""

    def __init__(self, inputs: int, *filters: int) -> None:
        super().__init__()
        one, few3, three, few5, five, pooled = filters
        self.branch1 = BasicConv2d(inputs, one, 1)
        self.branch2 = nn.Sequential(BasicConv2d(inputs, few3, 1), BasicConv2d(few3, three, 3))
        self.branch3 = nn.Sequential(BasicConv2d(inputs, few5, 1), BasicConv2d(few5, five, 3))
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1, ceil_mode=True), BasicConv2d(inputs, pooled, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class InceptionAux(nn.Module):
    """Auxiliary head."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.conv = BasicConv2d(inputs, 128, 1)
        self.fc1, self.fc2 = nn.Linear(2048, 1024), nn.Linear(1024, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(F.adaptive_avg_pool2d(x, (4, 4))).flatten(1)
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.7, self.training))


class GoogLeNet(nn.Module):
    """GoogLeNet with batch normalisation, as torchvision's; logits of its heads in training."""

    inceptions: ClassVar = {
        "3a": (192, 64, 96, 128, 16, 32, 32),
        "3b": (256, 128, 128, 192, 32, 96, 64),
        "4a": (480, 192, 96, 208, 16, 48, 64),
        "4b": (512, 160, 112, 224, 24, 64, 64),
        "4c": (512, 128, 128, 256, 24, 64, 64),
        "4d": (512, 112, 144, 288, 32, 64, 64),
        "4e": (528, 256, 160, 320, 32, 128, 128),
        "5a": (832, 256, 160, 320, 32, 128, 128),
        "5b": (832, 384, 192, 384, 48, 128, 128),
    }

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 64, 7, 2)
        self.conv2, self.conv3 = BasicConv2d(64, 64, 1), BasicConv2d(64, 192, 3)
        for name, filters in self.inceptions.items():
            setattr(self, f"inception{name}", Inception(*filters))
        self.aux1, self.aux2 = InceptionAux(512, classes), InceptionAux(528, classes)
        self.fc = nn.Linear(1024, classes)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(self.conv1(x), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.conv3(self.conv2(x)), 3, 2, ceil_mode=True)
        heads = []
        for name in self.inceptions:
            if name == "4a":
                x = F.max_pool2d(x, 3, 2, ceil_mode=True)
            if name == "5a":
                x = F.max_pool2d(x, 2, 2, ceil_mode=True)
            x = getattr(self, f"inception{name}")(x)
            if self.training and name in ("4a", "4d"):
                heads.append((self.aux1 if name == "4a" else self.aux2)(x))
        logits = self.fc(F.dropout(x.mean((2, 3)), 0.2, self.training))
        return (logits, *heads) if self.training else logits


def cost(outputs: Any, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, with those of auxiliary heads by their weight."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, labels)
    logits, *heads = outputs
    auxiliary = sum(F.cross_entropy(head, labels) for head in heads)
    return F.cross_entropy(logits, labels) + AUXILIARY_WEIGHT * auxiliary
