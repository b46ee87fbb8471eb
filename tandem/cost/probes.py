"""Small networks whose layers stand for those of larger ones, to measure a machine by."""

from dataclasses import dataclass

from pytensor.tensor.variable import TensorVariable

from tandem.layers import (
    Builder,
    LayeredNetwork,
    global_average_pool,
    max_pool,
    relu,
    relu6,
    response_norm,
)
from tandem.models.pictures import IMAGENET_STD


@dataclass(frozen=True)
class Probe:
    """A network and the minibatch that it is measured with."""

    network: type[LayeredNetwork]
    crop_size: int
    batch_size: int
    width: float = 1.0


class LargeFilters(LayeredNetwork):
    """Large filters, groups and response normalisation, as in AlexNet."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("conv1", x, self.scaled(96), 11, 4, 0, bias=0.0)
        x = response_norm(max_pool(relu(x), 3, 2))
        x = net.convolution("conv2", x, self.scaled(256), 5, groups=2, bias=0.0)
        x = response_norm(max_pool(relu(x), 3, 2))
        x = relu(net.convolution("conv3", x, self.scaled(384), 3, bias=0.0))
        x = relu(net.convolution("conv4", x, self.scaled(256), 3, groups=2, bias=0.0))
        return net.fully_connected("fc", global_average_pool(max_pool(x, 3, 2)), self.classes)


class SmallFilters(LayeredNetwork):
    """Filters of 3x3 on images of every size, as in VGG."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = relu(net.convolution("conv0", x, self.scaled(64), 3, bias=0.0, input_std=IMAGENET_STD))
        for number, filters in enumerate((64, 128, 256, 512, 512), 1):
            x = relu(net.convolution(f"conv{number}", x, self.scaled(filters), 3, bias=0.0))
            x = max_pool(x, 2, 2)
        return net.fully_connected("fc", global_average_pool(x), self.classes)


class FullyConnected(LayeredNetwork):
    """Large products, and dropout, as at the end of AlexNet and VGG."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        for number in range(2):
            x = relu(net.fully_connected(f"fc{number}", x, self.scaled(4096)))
            x = net.dropout(x, 0.5)
        return net.fully_connected("fc", x, self.classes)


class Bottlenecks(LayeredNetwork):
    """Blocks of 1x1, 3x3 and 1x1 with batch normalisation beside a shortcut, as in ResNet-50."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("conv1", x, self.scaled(64), 7, 2, input_std=IMAGENET_STD)
        x = max_pool(relu(net.batch_norm("bn1", x)), 3, 2, pad=1)
        for stage in range(4):
            filters = self.scaled(64 * 2**stage)
            for block in range(2):
                x = _bottleneck(
                    net, f"{stage}.{block}", x, filters, 2 if stage and not block else 1
                )
        return net.fully_connected("fc", global_average_pool(x), self.classes)


class Depthwise(LayeredNetwork):
    """A filter for each channel between convolutions of 1x1, as in MobileNet."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("conv", x, self.scaled(32), 3, 2, input_std=IMAGENET_STD)
        x = relu6(net.batch_norm("bn", x))
        for number, (filters, stride) in enumerate(((24, 2), (32, 2), (64, 2), (64, 1))):
            channels = x.type.shape[1] * 6
            y = _normed(net, f"{number}.expand", x, channels, 1)
            y = _normed(net, f"{number}.depthwise", y, channels, 3, stride, groups=channels)
            x = net.convolution(f"{number}.project", y, self.scaled(filters), 1)
        return net.fully_connected("fc", global_average_pool(x), self.classes)


# Minibatches of usual sizes: with smaller ones rates are lower. A kind's rate is that of all its
# lines together, so that Depthwise, with many elementwise lines, has the smallest share.
PROBES = (
    Probe(LargeFilters, 227, 64),
    Probe(SmallFilters, 224, 4),
    Probe(FullyConnected, 32, 64),
    Probe(Bottlenecks, 224, 16),
    Probe(Depthwise, 224, 2),
)


def _normed(
    net: Builder,
    name: str,
    x: TensorVariable,
    filters: int,
    size: int,
    stride: int = 1,
    groups: int = 1,
) -> TensorVariable:
    """A convolution, batch normalisation and ReLU up to 6."""
    x = net.convolution(name, x, filters, size, stride, groups=groups)
    return relu6(net.batch_norm(f"{name}.bn", x))


def _bottleneck(
    net: Builder, name: str, x: TensorVariable, filters: int, stride: int
) -> TensorVariable:
    """A block of ResNet-50, with a projection where the shape changes."""
    y = net.convolution(f"{name}.conv1", x, filters, 1)
    y = relu(net.batch_norm(f"{name}.bn1", y))
    y = net.convolution(f"{name}.conv2", y, filters, 3, stride)
    y = relu(net.batch_norm(f"{name}.bn2", y))
    y = net.convolution(f"{name}.conv3", y, 4 * filters, 1)
    y = net.batch_norm(f"{name}.bn3", y)
    if stride > 1 or x.type.shape != y.type.shape:
        x = net.convolution(f"{name}.shortcut", x, 4 * filters, 1, stride)
        x = net.batch_norm(f"{name}.shortcut.bn", x)
    return relu(y + x)
