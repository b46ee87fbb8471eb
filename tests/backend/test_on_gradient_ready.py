"""The callback, in the middle of a function, when a variable has its new value."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import DeviceSharedVariable, device_mode, device_shared


class Listener:
    """Records each call, and the variables' values at that time."""

    def __init__(self, *variables: DeviceSharedVariable) -> None:
        self.called: list[str] = []
        self.values: list[np.ndarray] = []
        self.variables = {variable.name: variable for variable in variables}

    def __call__(self, name: str) -> None:
        self.called.append(name)
        if name in self.variables:
            self.values.append(self.variables[name].get_value())


def test_every_update_is_reported_once_when_its_value_is_in_place() -> None:
    a, b, c = (device_shared(np.full(3, float(n)), name) for n, name in enumerate("abc"))
    listener = Listener(a, b, c)
    x = pt.tensor("x", shape=(3,), dtype="float64")
    updates = [(a, x * 2), (b, b + x), (c, pt.concatenate([x[:1], a[1:]]))]
    step = pytensor.function([x], updates=updates, mode=device_mode(on_gradient_ready=listener))
    step(np.array([1.0, 2.0, 3.0]))
    assert sorted(listener.called) == ["a", "b", "c"]
    for name, value in zip(listener.called, listener.values, strict=True):
        np.testing.assert_array_equal(value, listener.variables[name].get_value())
    np.testing.assert_array_equal(c.get_value(), [1, 0, 0])


def test_a_function_does_not_read_a_value_after_its_callback() -> None:
    """The callback may overwrite it at once: other results do not change."""
    a, total = device_shared(np.zeros(4), "a"), device_shared(np.zeros(()), "total")
    x = pt.tensor("x", shape=(4,), dtype="float64")

    def spoil(name: str) -> None:
        if name == "a":
            a.set_value(np.full(4, 1e9))

    new = pt.exp(x) * 2
    updates = [(a, new), (total, (pt.sqrt(new) + new.sum()).sum())]
    step = pytensor.function([x], updates=updates, mode=device_mode(on_gradient_ready=spoil))
    step(np.zeros(4))
    assert total.get_value() == pytest.approx(4 * np.sqrt(2) + 4 * 8)
    np.testing.assert_array_equal(a.get_value(), np.full(4, 1e9))


def test_gradients_of_later_layers_are_reported_while_earlier_ones_are_computed() -> None:
    listener = Listener()
    step = ResidentStep(device_mode(on_gradient_ready=listener), Sizes(batch=2))
    step.functions[0]()
    layers = [name.removeprefix("gradient/").split(".")[0] for name in listener.called[:-1]]
    assert len(layers) == 16
    order = ["fc8", "fc7", "fc6", "conv5", "conv4", "conv3", "conv2", "conv1"]
    assert list(dict.fromkeys(layers)) == order
    # The first is reported before half of the calls are made.
    source = step.functions[0].vm.program.source
    assert source.index("def step1") < len(source) / 2
