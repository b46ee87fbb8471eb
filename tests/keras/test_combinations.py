"""Small networks by several optimizers against Keras's own `fit`, weights and states after it."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem.keras
from tests.keras.test_runs import assert_equal_weights, clone
from tests.support.keras_models import keras

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
ROWS, BATCH = 320, 16


def dense(m: Any) -> Any:
    x = keras.Input((6,))
    y = m.Dense(5, "tanh")(m.Dense(8, "gelu")(x))
    return keras.Model(x, m.Dense(3, "softmax")(y)), "sparse_categorical_crossentropy"


def convolution(m: Any) -> Any:
    x = keras.Input((7, 7, 2))
    y = m.Conv2D(4, 3, padding="same", strides=2, use_bias=False)(x)
    y = m.ReLU()(m.BatchNormalization(momentum=0.8)(y))
    y = m.MaxPooling2D(2, 1)(m.DepthwiseConv2D(3, padding="same", activation="tanh")(y))
    return keras.Model(x, m.Dense(3, "softmax")(m.Flatten()(y))), "sparse_categorical_crossentropy"


def recurrent(m: Any) -> Any:
    x = keras.Input((5, 3))
    y = m.GRU(4)(m.Bidirectional(m.LSTM(3, return_sequences=True))(x))
    return keras.Model(x, m.Dense(2)(y)), "huber"


def attention(m: Any) -> Any:
    x = keras.Input((5, 4))
    y = m.LayerNormalization()(m.Add()([x, m.MultiHeadAttention(2, 3)(x, x)]))
    return keras.Model(x, m.Dense(1, "sigmoid")(m.GlobalAveragePooling1D()(y))), "bce"


def shared(m: Any) -> Any:
    """Two inputs through one layer, and a second output."""
    left, right, layer = keras.Input((4,)), keras.Input((4,)), m.Dense(5, "elu")
    one, other = layer(left), layer(right)
    outputs = [m.Dense(2)(m.Concatenate()([one, other])), m.Dense(1)(m.Multiply()([one, other]))]
    return keras.Model([left, right], outputs), ["mse", "log_cosh"]


def separable(m: Any) -> Any:
    x = keras.Input((6, 6, 2))
    y = m.SeparableConv2D(4, 3, activation="relu", depthwise_regularizer="l2")(x)
    y = m.Dense(4, "softplus", kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2))(y)
    y = m.Dense(2, bias_regularizer="l1", activity_regularizer="l2")(m.GlobalAveragePooling2D()(y))
    y = m.ActivityRegularization(1e-3, 1e-2)(y)
    return keras.Model(x, y), "mse"


def frozen(m: Any) -> Any:
    model, loss = convolution(m)
    for layer in model.layers[:3]:
        layer.trainable = False
    return model, loss


def without_biases(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


NETWORKS: dict[str, Callable[[Any], Any]] = {
    each.__name__: each for each in (dense, convolution, recurrent, attention, shared, separable)
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda o: o.SGD(0.02, 0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda o: o.Adam(0.005, clipnorm=0.5),
    "AdamW": lambda o: o.AdamW(0.005, weight_decay=0.05),
    "RMSprop": lambda o: o.RMSprop(0.003, global_clipnorm=0.5),
    "Adagrad": lambda o: o.Adagrad(
        keras.optimizers.schedules.CosineDecay(0.05, 30, warmup_steps=5, warmup_target=0.1)
    ),
}
OPTIONS: dict[str, Callable[[Any], Any]] = {
    "amsgrad": lambda o: o.Adam(0.005, beta_2=0.9, amsgrad=True, use_ema=True, ema_momentum=0.9),
    "Nadam": lambda o: o.Nadam(0.005, clipvalue=0.02),
    "Adadelta": lambda o: o.Adadelta(0.5),
    "Adamax": lambda o: o.Adamax(0.005, weight_decay=0.01),
    "no decay of biases": lambda o: without_biases(o.AdamW(0.005, weight_decay=0.5)),
    "centred": lambda o: o.RMSprop(0.002, momentum=0.8, centered=True, clipvalue=0.1),
    "accumulated": lambda o: o.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.9), gradient_accumulation_steps=4
    ),
    "Lion": lambda o: o.Lion(
        0.001, weight_decay=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=7
    ),
}
QUICK = [("shared", "AdamW")]
OTHERS = [("frozen", "Adam"), *itertools.product(["dense"], OPTIONS)]
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in [*itertools.product(NETWORKS, OPTIMIZERS), *OTHERS]
]


def rows_of(model: Any, loss: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = [rng.normal(size=(ROWS, *t.shape[1:])).astype(np.float32) for t in model.inputs]
    if isinstance(loss, str) and loss.startswith("sparse"):
        y = [rng.integers(0, 3, ROWS)]
    else:
        y = [rng.integers(0, 2, (ROWS, *t.shape[1:])).astype(np.float32) for t in model.outputs]
    return (x[0], y[0]) if len(x) == 1 else (x, y)


@pytest.mark.parametrize(("network", "optimizer"), CASES)
def test_forty_steps_give_the_weights_of_keras(
    network: str, optimizer: str, tmp_path: Path
) -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    ours, loss = (NETWORKS | {"frozen": frozen})[network](keras.layers)
    x, y = rows_of(ours, loss)
    make = (OPTIMIZERS | OPTIONS)[optimizer]
    ours.compile(make(keras.optimizers), loss)
    theirs = clone(ours)
    theirs.compile(make(keras.optimizers), loss)  # a configuration lacks what does not decay
    tandem.keras.distribute(ours, ["cpu"], tmp_path / "run", norm_rows=BATCH, precision="float32")
    given = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    expected, found = theirs.fit(x, y, **given).history, ours.fit(x, y, **given).history
    assert [*found] == [*expected]
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-3), key
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations)
    assert_equal_weights(ours, theirs)
    for one, other in zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=2e-2, atol=2e-4)
