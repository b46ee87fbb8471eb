"""Other engines as contenders: they compute what ours computes, and are measured in turn."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from benchmarks import engines
from benchmarks.engines import compared, jax_step, noise, onnx_runtime, openvino
from examples.resident_step import Sizes
from tandem.backend import device_mode

TINY = Sizes(batch=2)


def logits(images: np.ndarray) -> np.ndarray:
    """Ours, of the first weights."""
    net = TINY.network()
    x = pt.tensor(dtype="float32", shape=images.shape)
    values = dict(net.initial_values(seed=1))
    givens = [(v, pt.constant(values[name])) for name, v in net.parameters.items()]
    return pytensor.function([x], net.logits(x, None), givens=givens, mode=device_mode())(images)


@pytest.mark.parametrize("engine", [onnx_runtime, openvino], ids=["onnxruntime", "openvino"])
def test_an_engine_computes_the_networks_logits(engine: Any) -> None:
    pytest.importorskip(engine.__name__.replace("_runtime", "runtime"))
    (found,) = engine(TINY, 1)()
    expected = logits(noise(TINY))
    np.testing.assert_allclose(found, expected, 1e-4, 1e-5 * np.abs(expected).max())


def test_jax_makes_steps() -> None:
    pytest.importorskip("jax")
    step = jax_step(TINY, 1)
    one, two = ({name: np.array(value) for name, value in step().items()} for _ in range(2))
    assert set(one) == set(TINY.network().parameters)
    for name, value in one.items():
        assert np.isfinite(value).all()
        assert (value != two[name]).any()


@pytest.mark.slow
def test_contenders_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.CONTENDERS, "missing", ("no_such_engine", onnx_runtime))
    found = compared(["ours", "ONNX Runtime", "missing"], TINY, 1, rounds=2)
    assert list(found) == ["ours", "ONNX Runtime"]
    assert all(len(m.seconds) == 2 for m in found.values())
