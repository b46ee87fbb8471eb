"""The networks of `tandem.models` as PyTorch users write them, as oracles.

Names of parameters are those of ours, but for fully connected weights, which are (out, in) here.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGENET_STD = (58.395, 57.12, 57.375)
CIFAR_STD = (62.99, 62.09, 66.70)
GOOGLE_STD = (127.5, 127.5, 127.5)
INCEPTIONS = {
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
VGG_STAGES = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class PlainNetwork(nn.Module):
    """Base: takes pictures of 0 to 255 minus their mean, and divides them by a deviation.

    In training, `auxiliary` holds the outputs of auxiliary heads.
    """

    def __init__(self, std: Sequence[float]) -> None:
        super().__init__()
        self.std = tuple(std)
        self.auxiliary: list[Tensor] = []

    def scaled(self, images: Tensor) -> Tensor:
        return images / images.new_tensor(self.std).reshape(1, -1, 1, 1)

    def load(self, values: Mapping[str, np.ndarray]) -> None:
        """Take all parameters and running averages of a network of ours."""
        own = {k: v for k, v in self.state_dict().items() if not k.endswith("num_batches_tracked")}
        if {*own} != {*values}:
            raise KeyError(f"parameters differ: {sorted({*own} ^ {*values})}")
        with torch.no_grad():
            for name, tensor in own.items():
                value = torch.from_numpy(values[name])
                tensor.copy_(value.T if value.ndim == 2 else value)

    def loss(self, images: Tensor, labels: Tensor, weight: float = 0.3) -> Tensor:
        """Mean cross-entropy, with that of auxiliary heads in training."""
        self.auxiliary.clear()
        total = F.cross_entropy(self(images), labels)
        for logits in self.auxiliary:
            total = total + weight * F.cross_entropy(logits, labels)
        return total


class PlainVGG(PlainNetwork):
    def __init__(
        self, depth: int, crop_size: int, classes: int, width: float = 1.0, norm: bool = False
    ) -> None:
        super().__init__(IMAGENET_STD)
        layers: list[nn.Module] = []
        channels = 3
        for count, filters in zip(VGG_STAGES[depth], (64, 128, 256, 512, 512), strict=True):
            filters = max(1, round(filters * width))
            for _ in range(count):
                layers.append(nn.Conv2d(channels, filters, 3, padding=1))
                layers += [nn.BatchNorm2d(filters)] * norm + [nn.ReLU(inplace=True)]
                channels = filters
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        units, hidden = channels * (crop_size // 32) ** 2, max(1, round(4096 * width))
        self.classifier = nn.Sequential(
            nn.Linear(units, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(self.scaled(images)).flatten(1))


class _Basic(nn.Module):
    """Two convolutions of 3x3; `padded` is option A of the paper."""

    expansion = 1

    def __init__(self, channels: int, filters: int, stride: int, padded: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.stride, self.missing = stride, filters - channels if padded else 0
        if not padded:
            self.downsample = _downsample(channels, filters, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.missing:
            half = self.missing // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        elif getattr(self, "downsample", None) is not None:
            x = self.downsample(x)
        return F.relu(x + y)


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.conv3 = nn.Conv2d(filters, 4 * filters, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * filters)
        self.downsample = _downsample(channels, 4 * filters, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def _downsample(channels: int, filters: int, stride: int) -> nn.Module | None:
    if stride == 1 and channels == filters:
        return None
    return nn.Sequential(
        nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters)
    )


class PlainResNet(PlainNetwork):
    """ResNet-18, 34 and 50 (version 1.5)."""

    def __init__(self, depth: int, classes: int, width: float = 1.0) -> None:
        super().__init__(IMAGENET_STD)
        kind: type[_Basic] | type[_Bottleneck] = _Bottleneck if depth == 50 else _Basic
        first = max(1, round(64 * width))
        self.conv1 = nn.Conv2d(3, first, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        channels = first
        counts = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}[depth]
        for stage, count in enumerate(counts):
            blocks = []
            for block in range(count):
                filters = max(1, round(64 * 2**stage * width))
                blocks.append(kind(channels, filters, 2 if stage and not block else 1))
                channels = filters * kind.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(self.scaled(images))))
        x = F.max_pool2d(x, 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class PlainCifarResNet(PlainNetwork):
    """ResNet-20, 32, 44, 56 and 110 for CIFAR."""

    def __init__(
        self, depth: int, classes: int, width: float = 1.0, projection: bool = False
    ) -> None:
        super().__init__((1.0, 1.0, 1.0))
        channels = max(1, round(16 * width))
        self.conv1 = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        for stage in range(3):
            blocks = []
            for block in range((depth - 2) // 6):
                filters = max(1, round(16 * 2**stage * width))
                stride = 2 if stage and not block else 1
                blocks.append(_Basic(channels, filters, stride, padded=not projection))
                channels = filters
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(self.scaled(images))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


class _WideBlock(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.dropout = dropout
        same = stride == 1 and channels == filters
        self.shortcut = None if same else nn.Conv2d(channels, filters, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        x = x if self.shortcut is None else self.shortcut(y)
        y = F.relu(self.bn2(self.conv1(y)))
        y = F.dropout(y, self.dropout, self.training) if self.dropout else y
        return x + self.conv2(y)


class PlainWideResNet(PlainNetwork):
    def __init__(self, depth: int, width: float, classes: int, dropout: float = 0.0) -> None:
        super().__init__(CIFAR_STD)
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        channels = 16
        for stage in range(3):
            blocks = []
            for block in range((depth - 4) // 6):
                filters = max(1, round(16 * 2**stage * width))
                stride = 2 if stage and not block else 1
                blocks.append(_WideBlock(channels, filters, stride, dropout))
                channels = filters
            self.add_module(f"block{stage + 1}", nn.Sequential(*blocks))
        self.bn1 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(self.scaled(images))
        x = self.block3(self.block2(self.block1(x)))
        return self.fc(F.relu(self.bn1(x)).mean((2, 3)))


class _Convolution(nn.Module):
    """Convolution, normalisation, ReLU, as in torchvision's GoogLeNet."""

    def __init__(self, channels: int, filters: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, size, stride, size // 2, bias=False)
        self.bn = nn.BatchNorm2d(filters, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class _InceptionBN(nn.Module):
    def __init__(self, channels: int, *filters: int) -> None:
        super().__init__()
        ones, reduced3, threes, reduced5, fives, pooled = filters
        self.branch1 = _Convolution(channels, ones, 1)
        self.branch2 = nn.Sequential(
            _Convolution(channels, reduced3, 1), _Convolution(reduced3, threes, 3)
        )
        self.branch3 = nn.Sequential(
            _Convolution(channels, reduced5, 1), _Convolution(reduced5, fives, 3)
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1, ceil_mode=True), _Convolution(channels, pooled, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class _HeadBN(nn.Module):
    def __init__(self, channels: int, scaled: Callable[[int], int], classes: int) -> None:
        super().__init__()
        self.conv = _Convolution(channels, scaled(128), 1)
        self.fc1 = nn.Linear(16 * scaled(128), scaled(1024))
        self.fc2 = nn.Linear(scaled(1024), classes)
        self.dropout = 0.7

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(F.adaptive_avg_pool2d(x, 4)).flatten(1)
        return self.fc2(F.dropout(F.relu(self.fc1(x)), self.dropout, self.training))


class PlainGoogLeNetBN(PlainNetwork):
    def __init__(
        self, classes: int, width: float = 1.0, auxiliaries: bool = True, dropout: float = 0.2
    ) -> None:
        super().__init__(GOOGLE_STD)
        scaled = _scale(width)
        self.conv1 = _Convolution(3, scaled(64), 7, 2)
        self.conv2 = _Convolution(scaled(64), scaled(64), 1)
        self.conv3 = _Convolution(scaled(64), scaled(192), 3)
        channels = scaled(192)
        for name, (_, *sizes) in INCEPTIONS.items():
            filters = [scaled(size) for size in sizes]
            self.add_module(f"inception{name}", _InceptionBN(channels, *filters))
            channels = filters[0] + filters[2] + filters[4] + filters[5]
            if auxiliaries and name in ("4a", "4d"):
                head = _HeadBN(channels, scaled, classes)
                self.add_module("aux1" if name == "4a" else "aux2", head)
        self.fc = nn.Linear(channels, classes)
        self.dropout, self.has_heads = dropout, auxiliaries

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(self.scaled(images)), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.conv3(self.conv2(x)), 3, 2, ceil_mode=True)
        for name in INCEPTIONS:
            x = self.get_submodule(f"inception{name}")(x)
            if name in ("3b", "4e"):
                x = F.max_pool2d(x, 3 if name == "3b" else 2, 2, ceil_mode=True)
            if name in ("4a", "4d") and self.has_heads and self.training:
                self.auxiliary.append(self.get_submodule("aux1" if name == "4a" else "aux2")(x))
        return self.fc(F.dropout(x.mean((2, 3)), self.dropout, self.training))


class PlainGoogLeNet(PlainNetwork):
    """BVLC's, with local response normalisation: `nn.LocalResponseNorm` divides alpha by 5.

    `head_side` is the number of averages on each side with which an auxiliary head begins.
    """

    def __init__(
        self,
        classes: int,
        width: float = 1.0,
        auxiliaries: bool = True,
        dropout: float = 0.4,
        head_side: int = 4,
    ) -> None:
        super().__init__((1.0, 1.0, 1.0))
        scaled = _scale(width)
        self.conv1 = _named({"7x7_s2": nn.Conv2d(3, scaled(64), 7, 2, 3)})
        self.conv2 = _named(
            {
                "3x3_reduce": nn.Conv2d(scaled(64), scaled(64), 1),
                "3x3": nn.Conv2d(scaled(64), scaled(192), 3, 1, 1),
            }
        )
        self.norm = nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0)
        channels = scaled(192)
        for name, (_, *sizes) in INCEPTIONS.items():
            ones, reduced3, threes, reduced5, fives, pooled = (scaled(size) for size in sizes)
            ways = {
                "1x1": nn.Conv2d(channels, ones, 1),
                "3x3_reduce": nn.Conv2d(channels, reduced3, 1),
                "3x3": nn.Conv2d(reduced3, threes, 3, 1, 1),
                "5x5_reduce": nn.Conv2d(channels, reduced5, 1),
                "5x5": nn.Conv2d(reduced5, fives, 5, 1, 2),
                "pool_proj": nn.Conv2d(channels, pooled, 1),
            }
            self.add_module(f"inception_{name}", _named(ways))
            channels = ones + threes + fives + pooled
            if auxiliaries and name in ("4a", "4d"):
                head = _head(channels, scaled, classes, head_side)
                self.add_module("loss1" if name == "4a" else "loss2", head)
        self.loss3 = _named({"classifier": nn.Linear(channels, classes)})
        self.dropout, self.head_dropout, self.has_heads = dropout, 0.7, auxiliaries

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1["7x7_s2"](self.scaled(images)))
        x = self.norm(F.max_pool2d(x, 3, 2, ceil_mode=True))
        x = F.relu(self.conv2["3x3_reduce"](x))
        x = self.norm(F.relu(self.conv2["3x3"](x)))
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)
        for name in INCEPTIONS:
            x = _inception(self.get_submodule(f"inception_{name}"), x)
            if name in ("3b", "4e"):
                x = F.max_pool2d(x, 3, 2, ceil_mode=True)
            if name in ("4a", "4d") and self.has_heads and self.training:
                self.auxiliary.append(
                    self._head(self.get_submodule(f"loss{1 + (name == '4d')}"), x)
                )
        return self.loss3["classifier"](F.dropout(x.mean((2, 3)), self.dropout, self.training))

    def _head(self, head: nn.Module, x: Tensor) -> Tensor:
        x = F.relu(head["conv"](F.avg_pool2d(x, 5, 3, ceil_mode=True))).flatten(1)
        return head["classifier"](
            F.dropout(F.relu(head["fc"](x)), self.head_dropout, self.training)
        )


def _inception(ways: nn.ModuleDict, x: Tensor) -> Tensor:
    threes = ways["3x3"](F.relu(ways["3x3_reduce"](x)))
    fives = ways["5x5"](F.relu(ways["5x5_reduce"](x)))
    pooled = ways["pool_proj"](F.max_pool2d(x, 3, 1, 1))
    return F.relu(torch.cat([ways["1x1"](x), threes, fives, pooled], 1))


def _head(channels: int, scaled: Callable[[int], int], classes: int, side: int) -> nn.ModuleDict:
    return _named(
        {
            "conv": nn.Conv2d(channels, scaled(128), 1),
            "fc": nn.Linear(scaled(128) * side**2, scaled(1024)),
            "classifier": nn.Linear(scaled(1024), classes),
        }
    )


class PlainDenseNet(PlainNetwork):
    """DenseNet-BC: of 121 layers for ImageNet, or of 100 for CIFAR."""

    def __init__(self, depth: int, classes: int, width: float = 1.0) -> None:
        super().__init__((1.0, 1.0, 1.0) if depth == 100 else IMAGENET_STD)
        growth = max(1, round((12 if depth == 100 else 32) * width))
        channels = max(1, round((24 if depth == 100 else 64) * width))
        if depth == 100:
            first = {"conv0": nn.Conv2d(3, channels, 3, 1, 1, bias=False)}
        else:
            first = {
                "conv0": nn.Conv2d(3, channels, 7, 2, 3, bias=False),
                "norm0": nn.BatchNorm2d(channels),
                "relu0": nn.ReLU(inplace=True),
                "pool0": nn.MaxPool2d(3, 2, 1),
            }
        self.features = nn.Sequential(OrderedDict(first))
        counts = (16, 16, 16) if depth == 100 else (6, 12, 24, 16)
        for number, count in enumerate(counts, 1):
            block = nn.Sequential()
            for layer in range(1, count + 1):
                block.add_module(f"denselayer{layer}", _DenseLayer(channels, growth))
                channels += growth
            self.features.add_module(f"denseblock{number}", block)
            if number < len(counts):
                transition = _transition(channels)
                self.features.add_module(f"transition{number}", transition)
                channels //= 2
        self.features.add_module(f"norm{len(counts) + 1}", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(F.relu(self.features(self.scaled(images))).mean((2, 3)))


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(y)))], 1)


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
            pool=nn.AvgPool2d(2, 2),
        )
    )


class PlainMobileNetV2(PlainNetwork):
    def __init__(self, classes: int, width: float = 1.0, dropout: float = 0.2) -> None:
        super().__init__(IMAGENET_STD)
        channels = _eights(32 * width)
        features: list[nn.Module] = [_norm6(3, channels, 3, 2)]
        for expansion, filters, count, first in (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ):
            for block in range(count):
                outputs = _eights(filters * width)
                stride = 1 if block else first
                features.append(_Inverted(channels, outputs, expansion, stride))
                channels = outputs
        last = _eights(1280 * max(1.0, width))
        self.features = nn.Sequential(*features, _norm6(channels, last, 1))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(self.scaled(images)).mean((2, 3)))


class _Inverted(nn.Module):
    def __init__(self, channels: int, filters: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = channels * expansion
        layers = [] if expansion == 1 else [_norm6(channels, hidden, 1)]
        layers.append(_norm6(hidden, hidden, 3, stride, hidden))
        self.conv = nn.Sequential(
            *layers, nn.Conv2d(hidden, filters, 1, bias=False), nn.BatchNorm2d(filters)
        )
        self.adds = stride == 1 and channels == filters

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


def _norm6(
    channels: int, filters: int, size: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    convolution = nn.Conv2d(channels, filters, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters), nn.ReLU6(inplace=True))


def _eights(filters: float) -> int:
    rounded = max(8, int(filters + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * filters else rounded


def _scale(width: float) -> Callable[[int], int]:
    return lambda units: max(1, round(units * width))


def _named(modules: dict[str, nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict(modules)
