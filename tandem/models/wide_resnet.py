"""Wide residual networks for CIFAR: 6n + 4 layers, `width` times as many filters."""

from pytensor.tensor.variable import TensorVariable

from tandem.layers import Builder, LayeredNetwork, global_average_pool, relu
from tandem.models.options import Depth, Rate
from tandem.models.pictures import CIFAR_STD


class WideResNet(LayeredNetwork):
    """WRN-depth-width: residual blocks whose normalisation comes before each convolution.

    A convolution of 3x3 with 16 filters, three stages of n blocks of two convolutions of 3x3, of
    16, 32 and 64 times `width` filters, with stride 2 between stages, normalisation, and the
    average of all pixels: 6n + 4 layers. Where a shape changes, the shortcut is a convolution of
    1x1.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 32.
    classes : int
    width : float
        The paper's k, a factor on numbers of filters: 10 for WRN-28-10.
    dtype : str
    depth : int
        6n + 4: 16, 28, 40.
    dropout : float
        Probability that a unit between the convolutions of a block is dropped.

    References
    ----------
    Zagoruyko, Komodakis 2016, "Wide residual networks", BMVC, arXiv 1605.07146
    """

    def __init__(
        self,
        crop_size: int,
        classes: int,
        width: float,
        dtype: str,
        depth: Depth = 28,
        dropout: Rate = 0.0,
    ) -> None:
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"WideResNet: depth is {depth}, expected 6n + 4, such as 16, 28 or 40")
        self.depth, self.dropout = depth, dropout
        super().__init__(crop_size, classes, width, dtype)

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("conv1", x, 16, 3, input_std=CIFAR_STD)
        for stage in range(3):
            for block in range((self.depth - 4) // 6):
                stride = 2 if stage and not block else 1
                filters = self.scaled(16 * 2**stage)
                x = self.block(net, f"block{stage + 1}.{block}", x, filters, stride)
        x = relu(net.batch_norm("bn1", x))
        return net.fully_connected("fc", global_average_pool(x), self.classes)

    def block(
        self, net: Builder, name: str, x: TensorVariable, filters: int, stride: int
    ) -> TensorVariable:
        """Two normalised convolutions beside the shortcut."""
        y = relu(net.batch_norm(f"{name}.bn1", x))
        if stride > 1 or x.type.shape[1] != filters:
            x = net.convolution(f"{name}.shortcut", y, filters, 1, stride)
        y = net.convolution(f"{name}.conv1", y, filters, 3, stride)
        y = relu(net.batch_norm(f"{name}.bn2", y))
        if self.dropout:
            y = net.dropout(y, self.dropout)
        return x + net.convolution(f"{name}.conv2", y, filters, 3)
