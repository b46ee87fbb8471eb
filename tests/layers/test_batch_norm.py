"""The builder of batch normalisation: which statistics it uses and reports."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem import layers
from tandem.layers import Parameters, Training
from tandem.ops import BatchNorm, BatchNormInference
from tests.support.norm_oracles import EPSILON, batch_norm_by_loops, norm_arrays
from tests.support.op_checks import MODE


def built(training, shape, frozen=()):
    """Images, parameters, the output, and what it is computed of."""
    parameters = Parameters("float64", layers.norm("layer1.bn1", shape[1]))
    rng = np.random.default_rng(3)
    for value in parameters.values():
        value.set_value(rng.uniform(0.5, 2, shape[1]))
    x = pt.tensor("x", shape=(None, *shape[1:]))
    y = layers.batch_norm(x, parameters, "layer1.bn1", training, EPSILON)
    return x, parameters, y


def training_pass(**options):
    return Training(pt.lscalar(), pt.lscalar(), pt.lvector(), **options)


@pytest.mark.parametrize("shape", [(6, 3, 2, 2), (6, 3)])
@pytest.mark.parametrize("valid", [None, 0, 1, 5])
@pytest.mark.parametrize("rows", [2, None])
def test_training_normalises_groups_and_reports_their_statistics(shape, valid, rows):
    symbol = None if valid is None else pt.lscalar("valid")
    training = training_pass(valid=symbol, rows=rows)
    x, parameters, y = built(training, shape)
    names = ["layer1.bn1.running_mean", "layer1.bn1.running_var"]
    assert list(training.statistics) == names
    inputs = [x] if valid is None else [x, symbol]
    function = pytensor.function(inputs, [y, *training.statistics.values()], mode=MODE)
    values = norm_arrays(shape)[0]
    found = function(values) if valid is None else function(values, valid)
    scale, shift, *_ = (v.get_value() for v in parameters.values())
    expected = batch_norm_by_loops(values, scale, shift, rows or 6, 6 if valid is None else valid)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", [None, "layer1", "layer1.bn1"])
def test_validation_and_frozen_layers_use_the_running_averages(frozen):
    training = None if frozen is None else training_pass(frozen=frozenset({frozen}))
    x, parameters, y = built(training, (4, 3, 2, 2))
    function = pytensor.function([x], y, mode=MODE)
    found = [node.op for node in function.maker.fgraph.apply_nodes]
    assert any(isinstance(op, BatchNormInference) for op in found)
    assert not any(isinstance(op, BatchNorm) for op in found)
    assert training is None or not training.statistics
    values = norm_arrays((4, 3, 2, 2))[0]
    scale, shift, mean, variance = (v.get_value()[:, None, None] for v in parameters.values())
    expected = (values - mean) / np.sqrt(variance + EPSILON) * scale + shift
    np.testing.assert_allclose(function(values), expected, rtol=1e-12)


def test_another_frozen_layer_is_none_of_its_business():
    training = training_pass(frozen=frozenset({"layer", "layer1.bn"}), rows=2)
    built(training, (4, 3))
    assert len(training.statistics) == 2
