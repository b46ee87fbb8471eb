"""A trainer's functions, where those of a GPU are recorded."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest

from tandem.backend import Captured, DeviceSharedVariable, device_shared
from tandem.config.schema import make_config
from tandem.errors import InputError
from tandem.memory.flat import FlatLayout
from tandem.training import functions
from tandem.training.functions import DeviceFunctions
from tandem.training.graphs import FunctionGraph


def recording(total: DeviceSharedVariable, change: Any) -> DeviceFunctions:
    """Functions of which one adds to a variable; the device is a CPU that records as a GPU does."""
    graph = FunctionGraph(minibatch={}, numbers={}, updates=[(total, total + change)])
    memory: Any = SimpleNamespace(device="cpu", records=True)
    return DeviceFunctions({"step": lambda: graph}, make_config({}), memory)


def test_a_step_is_recorded() -> None:
    total = device_shared(np.zeros((2, 2)))
    step = recording(total, 1.0).record("step", None)
    assert isinstance(step, Captured)
    step()
    np.testing.assert_array_equal(total.get_value(), np.ones((2, 2)))


def test_a_step_that_computes_on_the_host_is_called(caplog: pytest.LogCaptureFixture) -> None:
    total = device_shared(np.eye(2))
    with caplog.at_level(logging.WARNING):
        step = recording(total, pt.linalg.schur(total)[0]).record("step", None)
    assert not isinstance(step, Captured)
    assert "steps take longer: step can't be recorded: it computes on the host" in caplog.text
    step()
    np.testing.assert_array_equal(total.get_value(), 2 * np.eye(2))


def test_memory_is_checked_before_a_function_is_called() -> None:
    x = pt.tensor("images", dtype="float32", shape=(10, 100))
    total = device_shared(np.zeros((10, 10), np.float32))
    graph = FunctionGraph({"images": x}, {}, updates=[(total, total + pt.dot(x, x.T))])
    memory: Any = SimpleNamespace(device="cpu", records=False)
    functions = DeviceFunctions({"step": lambda: graph}, make_config({}), memory)
    found: list[int] = []

    def check(nbytes: int) -> None:
        found.append(nbytes)
        if len(found) == 1:
            raise InputError("too much")

    functions.check = check
    slot: Any = SimpleNamespace(images=np.ones((10, 100), np.float32))
    with pytest.raises(InputError, match="too much"):
        functions("step", slot)
    assert not total.get_value().any()
    functions("step", slot)
    functions("step", slot)
    assert len(found) == 2
    assert found[0] == found[1] >= 400
    assert (total.get_value() == 200).all()


@pytest.mark.parametrize("convolutions", ["direct", "winograd"])
def test_convolutions_are_those_of_the_run(
    convolutions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(functions, "device_mode", lambda *_, **options: given.append(options))
    memory: Any = SimpleNamespace(device="cpu", records=False, layout=None)
    config = make_config({"convolutions": convolutions})
    DeviceFunctions({}, config, memory, lambda name: None)
    assert [options["convolutions"] for options in given] == [convolutions] * 2


def test_gradients_in_buckets_are_recorded() -> None:
    layout = FlatLayout.of({"early": (100,), "late": (100,), "bias": (3,)}, "float64")
    reported: list[str] = []
    gradients = {
        name: device_shared(np.zeros(shape), "gradient/" + name) for name, shape in layout.shapes
    }
    finite = device_shared(np.zeros((), np.int64), "finite")
    x, y = device_shared(np.ones(100)), device_shared(np.ones(3))
    late, bias = pt.exp(x), pt.exp(y)
    early = pt.sqrt(x) * late.sum()
    checked = (finite, pt.isfinite(early.sum()).astype("int64"))
    updates = [checked, *zip(gradients.values(), (early, late, bias), strict=True)]
    graph = FunctionGraph({}, {}, updates)
    memory: Any = SimpleNamespace(device="cpu", records=True, layout=layout)
    config = make_config({"exchange": "gradients", "bucket_mb": 0.0015, "devices": ["cpu"]})
    functions = DeviceFunctions({"gradients": lambda: graph}, config, memory, reported.append)
    step = functions.record("gradients", None)
    assert isinstance(step, Captured)
    assert not reported
    step()
    # The vector is divided from its end; other variables are not the exchange's.
    assert [set(reported[:2]), reported[2:]] == [{"late", "bias"}, ["early"]]
