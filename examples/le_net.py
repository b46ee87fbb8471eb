"""LeNet: how another network than AlexNet is written for the same programs.

python train.py --network examples.le_net:LeNet --crop_size 28 --data_folder data/small
"""

from pytensor.tensor.variable import TensorVariable

from tandem.layers import Builder, LayeredNetwork, max_pool, relu

CONTRAST = (64.0, 64.0, 64.0)  # about what pictures of 0 to 255 minus their mean vary by


class LeNet(LayeredNetwork):
    """Two convolutions with ReLU and max pooling, then two fully connected layers.

    Sizes are those of the LeNet in Caffe's examples: 20 and 50 filters, 500 units.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels.
    classes : int
        Number of classes.
    width : float
        Factor on the numbers of filters and hidden units.
    dtype : str
        float32 or float64.

    Raises
    ------
    ValueError
        The input is too small for two convolutions and poolings.

    References
    ----------
    LeCun, Bottou, Bengio, Haffner 1998, "Gradient-based learning applied to document recognition",
    Proceedings of the IEEE 86 (11).
    """

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("conv1", x, self.scaled(20), 5, pad=0, bias=0.0, input_std=CONTRAST)
        x = max_pool(relu(x), 2, 2)
        x = net.convolution("conv2", x, self.scaled(50), 5, pad=0, bias=0.0)
        x = max_pool(relu(x), 2, 2)
        x = relu(net.fully_connected("fc3", x, self.scaled(500)))
        return net.fully_connected("fc4", x, self.classes)
