"""VGG-11 and ResNet-32 for CIFAR-10, written with `tandem.nn`."""

from tandem import nn


def _begin() -> list[nn.layers.Layer]:
    return [nn.layers.Input((32, 32, 3)), nn.layers.Rescaling(1 / 64, offset=-2)]


def vgg11() -> nn.Sequential:
    """Configuration A of Simonyan and Zisserman 2015 with batch normalisation and one layer of 10.

    As in PyDTNN's ``vgg11bn_cifar10``.
    """
    model = nn.Sequential(_begin(), name="vgg11")
    for filters in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"):
        if filters == "pool":
            model.add(nn.layers.MaxPooling2D(2))
            continue
        model.add(nn.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(nn.layers.BatchNormalization())
        model.add(nn.layers.ReLU())
    model.add(nn.layers.Flatten())
    model.add(nn.layers.Dense(10, activation="softmax"))
    return model


def _norm_conv(filters: int, strides: int = 1) -> list[nn.layers.Layer]:
    conv = nn.layers.Conv2D(
        filters,
        3,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )
    return [conv, nn.layers.BatchNormalization()]


def resnet32() -> nn.Sequential:
    """The network of 32 layers for CIFAR of He et al. 2016, section 4.2, with projections."""
    model = nn.Sequential([*_begin(), *_norm_conv(16), nn.layers.ReLU()], name="resnet32")
    for filters in (16, 32, 64):
        for block in range(5):
            strides = 2 if filters > 16 and block == 0 else 1
            residual = [
                *_norm_conv(filters, strides),
                nn.layers.ReLU(),
                *_norm_conv(filters),
            ]
            short = []
            if strides > 1:
                short = [
                    nn.layers.Conv2D(filters, 1, strides=2, use_bias=False),
                    nn.layers.BatchNormalization(),
                ]
            model.add(nn.layers.Residual(residual, short))
            model.add(nn.layers.ReLU())
    model.add(nn.layers.GlobalAveragePooling2D())
    model.add(nn.layers.Dense(10, activation="softmax"))
    return model
