"""Models of `keras.applications` at small pictures against Keras, with the same weights."""

import gc

import numpy as np
import pytensor
import pytest

from tests.support.keras_models import DEVICE, keras, network_of, ours, theirs

QUICK = {"MobileNet": 32}
SLOW = {
    **{f"ConvNeXt{size}": 32 for size in ("Tiny", "Small", "Base")},
    **{f"DenseNet{depth}": 32 for depth in (121, 169, 201)},
    **{f"EfficientNetB{n}": 32 for n in range(8)},
    **{f"EfficientNetV2{size}": 32 for size in ("B0", "B1", "B2", "B3", "S", "M", "L")},
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNetV3Small": 32,
    "MobileNetV2": 32,
    "MobileNetV3Large": 32,
    **{f"ResNet{depth}": 32 for depth in ("50", "101", "152", "50V2", "101V2", "152V2")},
    "VGG16": 32,
    "VGG19": 32,
    "Xception": 71,
}


@pytest.mark.parametrize(
    ("name", "side"),
    [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())],
)
def test_outputs_are_those_of_keras(name: str, side: int) -> None:
    keras.utils.set_random_seed(1)
    make = getattr(keras.applications, name)
    model = make(weights=None, classes=10, input_shape=(side, side, 3), classifier_activation=None)
    rng = np.random.default_rng(0)
    rows = rng.uniform(0, 255, (4, side, side, 3)).astype(np.float32)
    rows *= np.linspace(0.1, 1, 12, dtype=np.float32).reshape(4, 1, 1, 3)
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    if name.startswith("EfficientNetB"):  # of which statistics make rounding grow
        for layer in norms:
            layer.moving_mean.assign(rng.uniform(-0.2, 0.2, layer.moving_mean.shape))
            layer.moving_variance.assign(rng.uniform(0.5, 1, layer.moving_mean.shape))
    else:  # averages of this minibatch keep a spread of outputs; of few pixels they may be 0
        floor = 0.5 if name == "EfficientNetV2L" else 1.0  # so deep, more takes the spread away
        for layer in norms:
            layer.momentum = 0.0
        model(rows, training=True)
        for layer in norms:
            variance = np.asarray(layer.moving_variance.numpy())
            layer.moving_variance.assign(variance + floor * variance.mean())
    network = network_of(model)
    numbers = sum(v.get_value(borrow=True).size for v in network.parameters.values())
    floats = [v for v in model.weights if "float" in v.dtype]
    assert numbers == sum(int(np.prod(v.shape)) for v in floats)
    images = network.images()
    function = pytensor.function([images], network.logits(images, None), mode=DEVICE)
    expected = model.predict(rows, verbose=0)
    scale = abs(expected).max()
    assert abs(expected - expected.mean(0)).max() > 2e-5 * scale
    np.testing.assert_allclose(function(rows) / scale, expected / scale, rtol=0, atol=1e-5)
    if name == "MobileNetV3Small":
        rows /= 255  # of which gradients are not too large
        (_, slopes), (_, exact) = ours(network, [rows]), theirs(model, [rows])
        for key, value in exact.items():
            scale = abs(value).max()
            np.testing.assert_allclose(
                slopes[key], value, rtol=1e-3, atol=1e-4 * scale, err_msg=key
            )
    del model, network, function
    gc.collect()
