"""Recurrent steps: values and gradients are PyTorch's layers', gradients those of differences."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import device_mode
from tandem.backend.recurrent_loops import _tanh
from tandem.ops import GRUSteps, GRUStepsGrad, LSTMSteps, LSTMStepsGrad, gru, lstm
from tests.support.op_checks import check_gradient, check_shapes, evaluate

STEPS, BATCH, INPUTS, UNITS = 4, 3, 5, 2


def arrays(gates: int, steps: int = STEPS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(gates)
    shapes = {
        "x": (steps, BATCH, INPUTS),
        "kernel": (INPUTS, gates * UNITS),
        "weight": (UNITS, gates * UNITS),
        "bias": (2, gates * UNITS),
        "h0": (BATCH, UNITS),
        "c0": (BATCH, UNITS),
    }
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def outputs_of(kind: str, v: dict[str, Any]) -> list[Any]:
    z = pt.dot(v["x"], v["kernel"]) + v["bias"][0]
    if kind == "lstm":
        return [*lstm(z + v["bias"][1], v["weight"], v["h0"], v["c0"])]
    return [gru(z, v["weight"], v["bias"][1], v["h0"])]


def torchs(kind: str, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of PyTorch's layer, and gradients of a weighted sum of the hidden states."""
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](INPUTS, UNITS, dtype=torch.float64)
    # PyTorch's GRU has the reset gate first.
    order = np.r_[0 : 4 * UNITS] if kind == "lstm" else np.r_[UNITS : 2 * UNITS, :UNITS, 4:6]
    names = {"kernel": "weight_ih_l0", "weight": "weight_hh_l0"}
    with torch.no_grad():
        for ours, theirs in names.items():
            getattr(layer, theirs).copy_(torch.tensor(values[ours].T[order]))
        for number, theirs in enumerate(("bias_ih_l0", "bias_hh_l0")):
            getattr(layer, theirs).copy_(torch.tensor(values["bias"][number][order]))
    states = [torch.tensor(values[n])[None].requires_grad_() for n in ("h0", "c0")]
    x = torch.tensor(values["x"], requires_grad=True)
    h, _ = layer(x, tuple(states) if kind == "lstm" else states[0])
    (h * factors(h.shape)).sum().backward()
    back = np.argsort(order)
    gradients = [x.grad, *(getattr(layer, theirs).grad[back].T for theirs in names.values())]
    return [value.detach().numpy() for value in (h, *gradients, states[0].grad[0])]


def factors(shape: Any) -> torch.Tensor:
    return torch.linspace(-1, 1, int(np.prod(shape)), dtype=torch.float64).reshape(tuple(shape))


@pytest.mark.parametrize("mode", [None, device_mode("cpu")], ids=["perform", "kernels"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_values_and_gradients_are_those_of_pytorch(kind: str, mode: Any) -> None:
    values = arrays(4 if kind == "lstm" else 3)
    inputs = {name: pt.tensor(name, shape=v.shape, dtype="float64") for name, v in values.items()}
    h = outputs_of(kind, inputs)[0]
    cost = (h * factors((STEPS, BATCH, UNITS)).numpy()).sum()
    gradients = pytensor.grad(cost, [inputs[n] for n in ("x", "kernel", "weight", "h0")])
    function = pytensor.function(
        [*inputs.values()],
        [h, *gradients],
        mode=mode or pytensor.compile.mode.Mode("py", None),
        on_unused_input="ignore",
    )
    for one, other in zip(function(*values.values()), torchs(kind, values), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_gradients_are_those_of_differences(kind: str) -> None:
    values = arrays(4 if kind == "lstm" else 3, steps=2)
    last = ["c0"] if kind == "lstm" else []
    names = ["x", "kernel", "weight", "bias", "h0", *last]

    def total(*variables: Any) -> Any:
        return sum(y.sum() for y in outputs_of(kind, dict(zip(names, variables, strict=True))))

    check_gradient(total, *(values[name] for name in names))


def cases() -> list[Any]:
    found = []
    for op, gradient, gates in ((LSTMSteps(), LSTMStepsGrad(), 4), (GRUSteps(), GRUStepsGrad(), 3)):
        v = arrays(gates)
        z = v["x"] @ v["kernel"]
        if gates == 4:
            given = [z, v["weight"], v["h0"], v["c0"]]
            h, c, all_gates = evaluate(op, *given)
            found += [(op, given), (gradient, [all_gates, v["weight"], v["c0"], c, h, c])]
        else:
            given = [z, v["weight"], v["bias"][1], v["h0"]]
            h, all_gates, inner = evaluate(op, *given)
            found += [(op, given), (gradient, [all_gates, v["weight"], inner, v["h0"], h, h])]
    return [pytest.param(*each, id=type(each[0]).__name__) for each in found]


@pytest.mark.parametrize(("op", "given"), cases())
def test_shapes_are_inferred_and_kernels_compute_what_perform_does(
    op: Any, given: list[np.ndarray]
) -> None:
    check_shapes(op, *given)
    for dtype, steps in (("float64", STEPS), ("float32", STEPS), ("float32", 0), ("float64", 0)):
        values = [v[:steps] if v.ndim == 3 else v for v in (v.astype(dtype) for v in given)]
        inputs = [pt.tensor(dtype=dtype, shape=(None,) * v.ndim) for v in values]
        found = pytensor.function(inputs, op(*inputs), mode=device_mode("cpu"))(*values)
        for one, other in zip(found, evaluate(op, *values, static=False), strict=True):
            assert one.dtype == other.dtype == dtype
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_rational_tanh_is_right_to_rounding() -> None:
    x = np.concatenate([np.linspace(-12, 12, 999), np.geomspace(1e-30, 1, 99)]).astype("float32")
    found = np.array([_tanh(v) for v in x])
    np.testing.assert_allclose(found, np.tanh(x.astype("float64")), rtol=5e-7)
    assert np.isnan(_tanh(np.float32(np.nan)))


@pytest.mark.parametrize("gates", [4, 3], ids=["lstm", "gru"])
def test_loops_of_float32_saturate_and_keep_nan_and_their_inputs(gates: int) -> None:
    """Units of a multiple of a vector's length and others; whether or not z is read afterwards."""
    rng = np.random.default_rng(1)
    for units in (16, 5):
        wide = gates * units
        shapes = [
            (3, 2, wide),
            (units, wide),
            *([(2, units)] * 2 if gates == 4 else [(wide,), (2, units)]),
        ]
        values = [
            rng.normal(0, scale, shape).astype("float32")
            for scale, shape in zip((20, 1, 1, 1), shapes, strict=True)
        ]
        values[0][1, 0, 1], values[0][2, 1] = np.nan, np.inf
        inputs = [pt.tensor(dtype="float32", shape=v.shape) for v in values]
        doubled = 2 * inputs[0]
        for others in ([], [doubled]):
            outputs = [*lstm(doubled, *inputs[1:])] if gates == 4 else [gru(doubled, *inputs[1:])]
            slopes = pytensor.grad(sum(y[:2, 1].sum() for y in outputs), inputs)
            found, expected = (
                pytensor.function(inputs, [*outputs, *slopes, *others], mode=mode)(*values)
                for mode in (device_mode("cpu"), pytensor.compile.mode.Mode("py", None))
            )
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_units_that_do_not_fit_are_refused() -> None:
    v = arrays(4)
    z = v["x"] @ v["kernel"]
    with pytest.raises(ValueError, match="units must be equal, got 2 and 3"):
        LSTMSteps()(z, v["weight"], np.zeros((BATCH, 3)), v["c0"])
    with pytest.raises(ValueError, match="gates of the units must be equal"):
        LSTMSteps()(z[:, :, :6], v["weight"], v["h0"], v["c0"])
    with pytest.raises(TypeError, match="one dtype"):
        GRUSteps()(z.astype("float32"), v["weight"], v["bias"][0], v["h0"])


@pytest.mark.parametrize(("op", "given"), cases())
def test_gates_of_another_number_are_refused(op: Any, given: list[np.ndarray]) -> None:
    """Loops would read and write beyond a row of them, as of an LSTM with a GRU's."""
    count = given[1].shape[1] // UNITS
    values = [v.astype("float32") for v in given]
    inputs = [pt.tensor(dtype="float32", shape=(None,) * v.ndim) for v in values]
    function = pytensor.function(inputs, op(*inputs), mode=device_mode("cpu"))
    for width in ((count - 1) * UNITS, (count + 1) * UNITS):
        wide = [
            np.resize(v, (*v.shape[:-1], width)) if v.shape[-1] == count * UNITS else v
            for v in values
        ]
        with pytest.raises(ValueError, match="columns of gates, expected"):
            function(*wide)


@pytest.mark.parametrize(("op", "given"), cases())
def test_first_states_of_other_rows_are_refused(op: Any, given: list[np.ndarray]) -> None:
    """Loops would read and write beyond them."""
    values = [v.astype("float32") for v in given]
    inputs = [pt.tensor(dtype="float32", shape=(None,) * v.ndim) for v in values]
    function = pytensor.function(inputs, op(*inputs), mode=device_mode("cpu"))
    firsts = [n for n, v in enumerate(values) if v.shape == given[-1].shape[-2:]]
    for number in firsts:
        for rows in (1, BATCH - 1, BATCH + 1):
            wrong = np.resize(values[number], (rows, values[number].shape[1]))
            with pytest.raises((ValueError, RuntimeError), match="shape"):
                function(*values[:number], wrong, *values[number + 1 :])
    assert firsts
