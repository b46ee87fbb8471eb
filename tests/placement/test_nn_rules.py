"""The layers of `tandem.nn`: every Op of their graphs and gradients has a rule, and ranks agree."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode

from tandem import nn
from tandem.layers import Training
from tandem.nn.layers import BuildContext
from tandem.nn.network import symbolic_shape
from tandem.placement import Partial, Placement, Shard, simulate
from tests.support.layer_cases import CASES, parameters_of, random_values
from tests.support.op_checks import plain_python

BATCH, ROWS = 8, 4
MODE = Mode("py", None)


def united(parts: list[Any], placement: Placement) -> np.ndarray:
    return np.concatenate(parts, placement.axis) if isinstance(placement, Shard) else sum(parts)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(name: str) -> None:
    build, shapes = CASES[name]
    layer = build(nn.layers)
    parameters = parameters_of(layer, shapes)
    inputs = [pt.tensor(shape=(BATCH, *symbolic_shape(shape))) for shape in shapes]
    numbers = [pt.tensor(dtype="int64", shape=()) for _ in range(3)]
    indices = pt.tensor(dtype="int64", shape=(BATCH,))
    training = Training(*numbers[:2], indices, numbers[2], ROWS)
    y = layer.build(BuildContext("it", parameters, training), *inputs)
    if y.type.shape[0] is None:
        y = pt.specify_shape(y, (BATCH, *y.type.shape[1:]))
    learned = [v for n, v in parameters.items() if "running" not in n]
    slopes = random_values(y.type.shape, 3)
    gradients = pytensor.grad((y * slopes).sum(), [*inputs, *learned])
    rows, sums = [y, *gradients[: len(inputs)]], [*training.statistics.values()]
    given: dict[Any, Placement] = dict.fromkeys(inputs, Shard(0))
    wanted: dict[Any, Placement] = dict.fromkeys(rows, Shard(0)) | dict.fromkeys(sums, Partial())
    for parameter, gradient in zip(learned, gradients[len(inputs) :], strict=True):
        wanted[gradient] = Partial()
        if layer.__class__ is nn.layers.Dense:
            given[parameter] = wanted[gradient] = Shard(parameter.type.ndim - 1)
    values = dict(zip(inputs, (random_values(x.type.shape, 5) for x in inputs), strict=True))
    values |= dict(zip(numbers, (5, 2, BATCH - 1), strict=True)) | {indices: np.arange(BATCH)}
    values |= {v: v.get_value() for v in parameters.values()}
    outputs = [*rows, *sums, *gradients[len(inputs) :]]
    with plain_python():
        whole, *_ = simulate(outputs, {}, {}, 1, values, mode=MODE)
        parts = simulate(outputs, given, wanted, 2, values, strict=True, mode=MODE)
    for output, expected, *own in zip(outputs, whole, *parts, strict=True):
        found = united(own, wanted[output])
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
