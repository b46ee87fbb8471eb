"""Keras's layers: every Op of their graphs and gradients has a rule, and ranks agree."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode

from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.layers import Training
from tandem.placement import Partial, Placement, Shard, simulate
from tandem.training.division import divide
from tests.support.keras_layers import LAYERS, randomize
from tests.support.keras_models import keras, network_of
from tests.support.op_checks import plain_python

BATCH, ROWS = 8, 4
MODE = Mode("py", None)
SLOW = ("recurrent", "more of images")
UNDIVIDED = {"recurrent": [0, 1, 2, 6, 7]}
"""Numbers of layers that are loops over steps."""


def united(parts: list[Any], placement: Placement) -> np.ndarray:
    return np.concatenate(parts, placement.axis) if isinstance(placement, Shard) else sum(parts)


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYERS]
)
def test_two_ranks_compute_what_one_does(case: str) -> None:
    shape, make = LAYERS[case]
    for number, layer in enumerate(make(keras.layers)):
        x = keras.Input(shape)
        model = keras.Model(x, layer(x))
        randomize(model)
        network = network_of(model, dtype="float64")
        loops = [layer.name] if number in UNDIVIDED.get(case, ()) else []
        assert [*network.undivided] == loops
        if not loops:
            check(network, layer.name)


def test_a_loop_over_steps_is_refused() -> None:
    model = keras.Sequential([keras.Input((6, 4)), keras.layers.SimpleRNN(2, name="steps")])
    config = Config(fully_connected="sharded")
    assert divide(network_of(model), config, 2, 0) is None  # there is nothing to divide
    model.add(keras.layers.Dense(2))
    message = "fully_connected: found sharded with steps, a loop over steps, which trainers cannot"
    with pytest.raises(InputError, match=message):
        divide(network_of(model), config, 2, 0)


def check(network: Any, name: str) -> None:
    images = pt.tensor("images", shape=(BATCH, *network.shapes["input"]))
    numbers = [pt.tensor(dtype="int64", shape=()) for _ in range(3)]
    indices = pt.tensor(dtype="int64", shape=(BATCH,))
    training = Training(*numbers[:2], indices, numbers[2], ROWS)
    (y,) = network.outputs(images, training)
    if y.type.shape[0] is None:
        y = pt.specify_shape(y, (BATCH, *y.type.shape[1:]))
    learned = {n: v for n, v in network.parameters.items() if n not in network.untrained}
    rng = np.random.default_rng(3)
    cost = (y * rng.uniform(-2, 2, y.type.shape)).sum()
    slope, *slopes = pytensor.grad(cost, [images, *learned.values()], disconnected_inputs="ignore")
    sums = [*training.statistics.values()]
    given: dict[Any, Placement] = {images: Shard(0)}
    wanted: dict[Any, Placement] = {y: Shard(0), slope: Shard(0)}
    wanted |= dict.fromkeys(sums, Partial())
    sharded = network.placements("sharded")
    for (parameter, variable), gradient in zip(learned.items(), slopes, strict=True):
        wanted[gradient] = sharded.get(parameter, Partial())
        if parameter in sharded:
            given[variable] = sharded[parameter]
    values: dict[Any, Any] = {images: rng.uniform(-2, 2, images.type.shape)}
    values |= dict(zip(numbers, (5, 2, BATCH - 1), strict=True)) | {indices: np.arange(BATCH)}
    values |= {v: v.get_value() for v in network.parameters.values()}
    outputs = [y, slope, *sums, *slopes]
    with plain_python():
        whole, *_ = simulate(outputs, {}, {}, 1, values, mode=MODE)
        parts = simulate(outputs, given, wanted, 2, values, strict=True, mode=MODE)
    for output, expected, *own in zip(outputs, whole, *parts, strict=True):
        found = united(own, wanted[output])
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11, err_msg=name)
