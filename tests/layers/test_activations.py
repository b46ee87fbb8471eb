"""Values and gradients of activations are those of PyTorch, also far from 0."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
import torch.nn.functional as F

from tandem import layers
from tandem.backend import device_mode
from tests.support.op_checks import MODE

FUNCTIONS = {
    "relu": (layers.relu, F.relu),
    "elu": (layers.elu, F.elu),
    "elu of 0.3": (lambda x: layers.elu(x, 0.3), lambda x: F.elu(x, 0.3)),
    "leaky_relu": (layers.leaky_relu, F.leaky_relu),
    "leaky_relu of 0.2": (lambda x: layers.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.2)),
    "relu6": (layers.relu6, F.relu6),
    "sigmoid": (layers.sigmoid, torch.sigmoid),
    "tanh": (layers.tanh, torch.tanh),
    "softplus": (layers.softplus, F.softplus),
    "log_sigmoid": (layers.log_sigmoid, F.logsigmoid),
    "arctan": (layers.arctan, torch.arctan),
}
NEAR = np.array([-7.5, -6, -1, -0.3, -1e-6, 0, 1e-6, 0.3, 1, 5.9, 6.1, 7.5, 19, 25])
FAR = np.array([-1e30, -1e4, -800, -100, 100, 800, 1e4, 1e30])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", [MODE, device_mode(strict=True)], ids=["python", "device"])
def test_values_and_gradients_are_those_of_pytorch(name, dtype, mode):
    ours, theirs = FUNCTIONS[name]
    values = np.concatenate([NEAR, FAR]).astype(dtype)
    x = pt.tensor("x", dtype=dtype, shape=(None,))
    y = ours(x)
    function = pytensor.function([x], [y, pytensor.grad(y.sum(), x)], mode=mode)
    tensor = torch.from_numpy(values).requires_grad_()
    expected = theirs(tensor)
    (gradient,) = torch.autograd.grad(expected.sum(), tensor)
    tolerance = 1e-10 if dtype == "float64" else 3e-6
    for found, exact in zip(function(values), (expected, gradient), strict=True):
        assert found.dtype == np.dtype(dtype)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, exact.detach(), tolerance, tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nan_is_not_hidden(name):
    x = pt.dvector("x")
    function = pytensor.function([x], FUNCTIONS[name][0](x), mode=device_mode())
    assert np.isnan(function(np.array([np.nan, 1.0]))).tolist() == [True, False]
