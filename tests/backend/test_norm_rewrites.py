"""Batch normalisation with ReLU, and with a shortcut, in one pass over memory."""

from collections import Counter
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem import layers
from tandem.backend import device_mode
from tandem.layers import Parameters, Training
from tandem.ops import BatchNorm, BatchNormGrad, Relu, ReluGrad
from tests.support.check_function import PYTHON


def kind(op: Any) -> str | None:
    """Say what an Op does, if it takes part here."""
    if isinstance(op, BatchNorm | BatchNormGrad) and op.relu:
        return f"{type(op).__name__} with ReLU"
    return (
        type(op).__name__ if isinstance(op, BatchNorm | BatchNormGrad | Relu | ReluGrad) else None
    )


def kinds(function: Any) -> Counter[str]:
    return Counter(filter(None, (kind(node.op) for node in function.maker.fgraph.apply_nodes)))


class Block:
    """A convolution and a batch normalisation of images, in training."""

    def __init__(self, dtype: str = "float64", valid: bool = False) -> None:
        self.x = pt.tensor("x", dtype=dtype, shape=(6, 4, 5, 5))
        self.valid = pt.lscalar("valid")
        declared = [layers.weight("conv", (4, 4, 3, 3), 0.3), *layers.norm("bn", 4)]
        self.parameters = Parameters(dtype, declared)
        rng = np.random.default_rng(0)
        for value in self.parameters.values():
            value.set_value(rng.normal(size=value.get_value().shape).astype(dtype))
        keys = pt.lscalar(), pt.lscalar(), pt.lvector()
        self.training = Training(*keys, valid=self.valid if valid else None, rows=2)
        self.before = layers.convolution(self.x, self.parameters["conv.weight"], pad=1)
        self.y = layers.batch_norm(self.before, self.parameters, "bn", self.training)

    def check(self, *outputs: Any, valid: int = 6) -> Counter[str]:
        """Compare outputs, statistics and gradients with Python's; count the fused Ops."""
        cost = sum((output[:valid] ** 3).sum() for output in outputs)
        trained = [self.parameters[name] for name in ("conv.weight", "bn.weight", "bn.bias")]
        gradients = pytensor.grad(cost, [self.x, *trained])
        wanted = [*(y[:valid] for y in outputs), *self.training.statistics.values(), *gradients]
        values = np.random.default_rng(1).normal(size=(6, 4, 5, 5)).astype(self.x.type.dtype)
        found = []
        for mode in (device_mode(strict=True), PYTHON):
            function = pytensor.function(
                [self.x, self.valid], wanted, mode=mode, on_unused_input="ignore"
            )
            found.append((function, function(values, valid)))
        tolerance = 1e-9 if self.x.type.dtype == "float64" else 1e-3
        for one, other in zip(found[0][1], found[1][1], strict=True):
            np.testing.assert_allclose(one, other, tolerance, tolerance)
        return kinds(found[0][0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("valid", [None, 3])
def test_relu_is_done_where_images_are_normalised(dtype: str, valid: int | None) -> None:
    block = Block(dtype, valid is not None)
    found = block.check(layers.relu(block.y), valid=6 if valid is None else valid)
    assert found == {"BatchNorm with ReLU": 1, "BatchNormGrad with ReLU": 1}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("valid", [None, 5])
def test_a_shortcut_is_added_where_images_are_normalised(first: bool, valid: int | None) -> None:
    block = Block(valid=valid is not None)
    y = block.y + block.x if first else block.x + block.y
    found = block.check(layers.relu(y), valid=6 if valid is None else valid)
    # The shortcut has the gated gradient too.
    assert found == {"BatchNorm with ReLU": 1, "ReluGrad": 1, "BatchNormGrad": 1}


def test_images_that_are_read_before_relu_are_written() -> None:
    block = Block()
    found = block.check(layers.relu(block.y), block.y)
    assert found == {"BatchNorm": 1, "Relu": 1, "ReluGrad": 1, "BatchNormGrad": 1}


def test_a_sum_that_is_read_before_relu_is_written() -> None:
    block = Block()
    y = block.y + block.x
    found = block.check(layers.relu(y), y)
    assert found == {"BatchNorm": 1, "Relu": 1, "ReluGrad": 1, "BatchNormGrad": 1}


def test_what_is_repeated_over_pixels_is_no_shortcut() -> None:
    block = Block()
    found = block.check(layers.relu(block.y + block.x.mean(axis=(2, 3), keepdims=True)))
    assert "BatchNorm with ReLU" not in found


def test_what_has_another_dtype_is_no_shortcut() -> None:
    block = Block("float32")
    with pytensor.config.change_flags(on_opt_error="raise"):
        y = layers.relu(block.y + block.x.astype("float64"))
        function = pytensor.function([block.x], y, mode=device_mode())
    assert kinds(function) == {"BatchNorm": 1, "Relu": 1}


def test_what_depends_on_the_statistics_is_no_shortcut() -> None:
    """It cannot be an input of the Op that computes them."""
    block = Block()
    mean = block.training.statistics["bn.running_mean"].dimshuffle("x", 0, "x", "x")
    found = block.check(layers.relu(block.y + layers.relu(block.x - mean)))
    assert "BatchNorm with ReLU" not in found


def test_a_graph_for_the_compiler_is_left_to_it() -> None:
    block = Block("float32")
    function = pytensor.function([block.x], layers.relu(block.y), mode=device_mode(compile=True))
    assert kinds(function) == {"BatchNorm": 1, "Relu": 1}


def test_a_nan_passes() -> None:
    block = Block()
    function = pytensor.function(
        [block.x],
        [y := layers.relu(block.y), pytensor.grad(y.sum(), block.before)],
        mode=device_mode(),
    )
    values = np.random.default_rng(1).normal(size=(6, 4, 5, 5))
    values[1, 0, 0, 0] = np.nan
    y, gradient = function(values)
    assert np.isnan(y[:2]).all()
    assert np.isnan(gradient[:2]).all()
    assert not np.isnan(y[2:]).any()
    assert not np.isnan(gradient[2:]).any()
