"""What layers do in training: random masks, statistics, and graphs without copies."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.elemwise import DimShuffle

from tandem.errors import InputError
from tandem.layers import Training
from tests.support.keras_models import (
    DEVICE,
    keras,
    network_of,
    ours,
    random_rows,
    theirs,
    training_pass,
)

RANDOM = {
    "dropout": lambda m: m.Dropout(0.4),
    "dropout by channel": lambda m: m.SpatialDropout1D(0.4),
    "dropout by row": lambda m: m.Dropout(0.4, noise_shape=(None, 1, 1)),
    "noise": lambda m: m.GaussianNoise(0.3),
    "noisy factors": lambda m: m.GaussianDropout(0.3),
    "dropout of each step": lambda m: m.TimeDistributed(m.Dropout(0.4)),
    "dropout of one step of each": lambda m: m.TimeDistributed(
        keras.Sequential([m.Reshape((1, 8)), m.TimeDistributed(m.Dropout(0.4)), m.Flatten()])
    ),
}


@pytest.mark.parametrize("case", RANDOM)
def test_random_numbers_follow_from_the_row_and_have_the_mean_and_spread_of_keras(
    case: str,
) -> None:
    x = keras.Input((10, 8))
    model = keras.Model(x, RANDOM[case](keras.layers)(x))
    network = network_of(model)
    rows = np.ones((400, 10, 8), np.float32)
    images, indices = network.images(), pt.lvector("indices")
    seed, epoch = (pt.constant(np.int64(n)) for n in (1, 0))
    y = network.outputs(images, Training(seed, epoch, indices))[0]
    function = pytensor.function([images, indices], y, mode=DEVICE)
    found = function(rows, np.arange(400))
    np.testing.assert_array_equal(function(rows[:2], np.array([7, 3])), found[[7, 3]])
    keras.utils.set_random_seed(1)
    expected = model(rows, training=True).detach().numpy()
    for axes in ((0, 1, 2), (1, 2), (1,), (2,)):  # means vary where masks have several places
        one, other = (values.mean(axes).std() for values in (found, expected))
        np.testing.assert_allclose(one, other, rtol=0.25, atol=0.02, err_msg=str(axes))
    np.testing.assert_allclose(found.mean(), expected.mean(), atol=0.2)
    np.testing.assert_allclose(found.std(), expected.std(), rtol=0.1)


@pytest.mark.parametrize(
    ("shape", "rows"), [((4, 3, 2), 3), ((4, 3, 2), None), ((5,), 32), ((6, 3), 32)]
)
def test_batch_normalisation_in_training_is_that_of_keras(shape: Any, rows: int | None) -> None:
    m = keras.layers
    x = keras.Input(shape)
    model = keras.Model(x, m.BatchNormalization(momentum=0.7, name="norm")(m.PReLU()(x)))
    network, given, training = network_of(model), random_rows(model), training_pass(rows=rows)
    slope = np.random.default_rng(1).uniform(-1, 1, (3, int(np.prod(shape))))
    (found, slopes), (expected, exact) = (
        ours(network, given, training, slope),
        theirs(model, given, training=True, slope=slope),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for name, value in exact.items():
        np.testing.assert_allclose(slopes[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    images, last = network.images(), training_pass(rows=rows)
    network.outputs(images, last)
    names = ["norm.running_mean", "norm.running_var"]
    statistics = pytensor.function([images], [last.statistics[n] for n in names], mode=DEVICE)
    after = model.get_layer("norm").get_weights()[2:]
    for name, new, old in zip(names, statistics(given[0]), (0, 1), strict=True):
        assert network.parameters.declared[name].keep == 0.7
        assert network.untrained == tuple(names)
        np.testing.assert_allclose(0.7 * old + 0.3 * new, after[name == names[1]], rtol=1e-5)


def test_what_has_statistics_of_steps_is_refused() -> None:
    m, x = keras.layers, keras.Input((4, 3))
    one, norm = keras.Input((4, 1, 3)), m.TimeDistributed(m.BatchNormalization())
    for inputs, y in (
        (x, norm(x)),
        (x, m.BatchNormalization()(m.Masking()(x))),
        (one, m.TimeDistributed(m.TimeDistributed(m.BatchNormalization()))(one)),
    ):
        network = network_of(keras.Model(inputs, y))
        with pytest.raises(InputError, match=r"found .* expected"):
            network.outputs(network.images(), training_pass())


def test_nothing_is_shuffled_between_convolutions() -> None:
    """Only the input is, in the compiled graph of a step."""
    m = keras.layers
    x = keras.Input((8, 8, 3))
    y = m.Conv2D(4, 3, padding="same")(x)
    for _ in range(2):
        z = m.ReLU()(m.BatchNormalization()(m.Conv2D(4, 3, padding="same")(y)))
        z = m.Dropout(0.2)(m.Activation("silu")(m.DepthwiseConv2D(3, padding="same")(z)))
        y = m.Conv2D(4, 1)(y)
        y = m.Concatenate()([m.MaxPooling2D(3, 1, "same")(m.Multiply()([y, z])), z * 2.0])
    model = keras.Model(x, m.Dense(2)(m.GlobalAveragePooling2D()(y)))
    network = network_of(model)
    images, training = network.images(), training_pass()
    cost = network.outputs(images, training)[0].sum()
    wanted = [v for n, v in network.parameters.items() if n not in network.untrained]
    gradients: Any = pytensor.grad(cost, wanted)
    outputs = [*gradients, *training.statistics.values()]
    function = pytensor.function([images], outputs, mode=DEVICE)
    shuffles = [
        node
        for node in function.maker.fgraph.apply_nodes
        if isinstance(node.op, DimShuffle)
        and len(node.op.shuffle) == 4
        and node.op.shuffle != (0, 1, 2, 3)
    ]
    assert len(shuffles) <= 1
