"""Recording a step: what may be recorded, and that warming up leaves no trace."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.executor import Function
from pytensor.compile.mode import Mode
from torch.utils._python_dispatch import TorchDispatchMode

from examples.resident_step import ResidentStep
from tandem.backend import (
    DeviceLinker,
    ProductPrecision,
    capture,
    device_mode,
    device_shared,
    on_stream,
)
from tests.support.check_function import DEVICE
from tests.support.simulated_graphs import SimulatedGraph
from tests.support.simulated_graphs import simulated_graphs as simulated_graphs

# Tensors without values, and a device that is not the CPU: what a GPU program needs to run here.
AFAR = torch.device("meta")


def test_a_captured_step_is_the_step_and_warming_up_leaves_no_trace() -> None:
    plain, captured = ResidentStep(DEVICE), ResidentStep(DEVICE)
    before = captured.state()
    replay = capture(captured.functions)
    for name, value in captured.state().items():
        np.testing.assert_array_equal(value, before[name])
    for rate in (0.01, 0.02):
        for step, run in ((plain, plain.run), (captured, replay)):
            step.rate.set_value(np.float32(rate))
            run()
    expected = plain.state()
    for name, value in captured.state().items():
        np.testing.assert_array_equal(value, expected[name])
    assert (expected["fc8.weight"] != before["fc8.weight"]).any()


def test_variables_that_overlap_get_their_values_back() -> None:
    memory = np.zeros(4)
    whole, first = (device_shared(None, memory=part) for part in (memory, memory[:2]))
    steps = [
        pytensor.function([], updates=[(v, v + number)], mode=DEVICE)
        for number, v in enumerate((whole, first), 1)
    ]
    capture(steps)
    np.testing.assert_array_equal(memory, np.zeros(4))


def test_gradient_and_update_in_one_function_are_the_two() -> None:
    plain, fused = ResidentStep(DEVICE), ResidentStep(DEVICE)
    (step,) = fused.compile(DEVICE, fused=True)
    for _ in range(3):
        plain.run()
        step()
    for name, weight in plain.weights.items():
        expected = weight.get_value()
        np.testing.assert_allclose(fused.weights[name].get_value(), expected, 1e-5, 1e-6)


def test_functions_that_need_the_host_are_refused() -> None:
    a = device_shared(np.zeros(3, "float32"), "a")
    x = pt.fvector("x")
    host = pytensor.shared(np.ones(3, "float32"), "elsewhere")
    cases = {
        "inputs": pytensor.function([x], [], updates=[(a, a + x)], mode=DEVICE),
        "1 outputs": pytensor.function([], [a.sum()], mode=DEVICE),
        "not on the device": pytensor.function([], [], updates=[(a, a + host)], mode=DEVICE),
        "reads values": pytensor.function([], [], updates=[(a, a + pt.sum(a[a > 0]))], mode=DEVICE),
    }
    for reason, function in cases.items():
        with pytest.raises(ValueError, match=reason):
            capture([function])
    with pytest.raises(ValueError, match="at least 1"):
        capture([], warmups=0)


def test_a_cpu_has_no_streams() -> None:
    with on_stream("cpu", None), on_stream("cpu", 1):
        assert torch.ones(2).sum() == 2


class Crossings(TorchDispatchMode):
    """Notes what would make the host wait for a GPU, or a GPU for the host."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = torch.utils._pytree.tree_leaves((args, kwargs, result))
        places = {t.device.type for t in tensors if isinstance(t, torch.Tensor)}
        masked = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in self.WAITS or places == {"cpu", "meta"} or masked:
            self.found.append(str(func))
        return result


def crossings(function: Function) -> Crossings:
    """Run a function's program on tensors without values that say that they are on a GPU."""
    seen = Crossings()
    inputs = [i.value[0] if isinstance(i.value, list) else i.value for i in function.maker.inputs]
    tensors = [getattr(value, "storage", [value])[0] for value in inputs]
    afar = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=AFAR) for t in tensors]

    def from_numbers(*_: object, **options: Any) -> torch.Tensor:
        seen.found.append("torch.tensor")
        return torch.empty(1, device=AFAR)

    # It makes a tensor on the host and copies it, which no dispatcher sees.
    with seen, torch.no_grad(), mock.patch.object(torch, "tensor", from_numbers):
        function.vm.program.run(*afar)
    return seen


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_training_step_never_makes_the_host_wait(precision: str, compiled: bool) -> None:
    """The program that is written for a GPU, run without one; compiled, what the compiler reads."""
    step = ResidentStep(DEVICE)
    linker = DeviceLinker(AFAR, compiled, ProductPrecision(precision, channels_last=True))
    for function in step.compile(Mode(linker, DEVICE.provided_optimizer)):
        seen = crossings(function)
        assert seen.count > 10
        assert not seen.found


@pytest.mark.parametrize("fault", ["reads a value", "copies from the host", "counts by a mask"])
def test_a_wait_would_be_seen(fault: str) -> None:
    x = device_shared(np.zeros(3, "float32"), "x")
    update = {
        "reads a value": x[: pt.argmax(x) + 3] * 2,
        "copies from the host": x + x.shape.astype("float32"),
        "counts by a mask": x + pt.sum(x[x > 0]),
    }[fault]
    mode = Mode(DeviceLinker(AFAR), optimizer=None)
    function = pytensor.function([], [], updates=[(x, update)], mode=mode)
    try:
        found = crossings(function).found
    except (RuntimeError, NotImplementedError) as error:
        found = [str(error)]
    assert any(name in found[0] for name in ("item", "nonzero", "torch.tensor")), found


class SmallStep:
    """A function in two segments and one behind it, with values that are alive at the cut."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float]] = []  # names, and what was in the variable
        self.x, self.a, self.b, self.sum, self.last = self.variables = [
            device_shared(np.full(shape, 0.5), name)
            for name, shape in (("x", 3), ("a", 3), ("b", 3), ("sum", ()), ("last", ()))
        ]
        first = pt.exp(self.x)
        second = pt.sqrt(first) * first
        sums = self.sum + (second + first).sum()
        mode = device_mode(on_gradient_ready=self.report, buckets=["a", ["b", "sum"]])
        self.functions = [
            pytensor.function([], updates=updates, mode=mode)
            for updates, mode in (
                ([(self.a, first * 2), (self.b, second), (self.sum, sums)], mode),
                ([(self.last, self.sum + self.a.sum()), (self.x, self.x + 1)], DEVICE),
            )
        ]
        (run,) = (f.vm.jit_fn for f in self.functions[:1])
        assert [segment.gives for segment in run.segments] != [(), ()]

    def report(self, name: str) -> None:
        variable = {v.name: v for v in self.variables}[name]
        self.reports.append((name, float(variable.get_value().sum())))

    def state(self) -> list[np.ndarray]:
        return [variable.get_value() for variable in self.variables]

    def run(self) -> None:
        for function in self.functions:
            function()


def assert_same_steps(one: SmallStep, run: Callable[[], Any]) -> None:
    """Check that `run` makes the steps of `one`, with the same reports at the same time."""
    plain = SmallStep()
    for _ in range(3):
        run()
        plain.run()
        for value, expected in zip(one.state(), plain.state(), strict=True):
            np.testing.assert_array_equal(value, expected)
    assert [name for name, _ in plain.reports] == ["a", "b", "sum"] * 3
    assert one.reports == plain.reports


def test_reports_follow_the_segments_and_not_the_warm_up() -> None:
    step = SmallStep()
    replay = capture(step.functions)
    assert not step.reports
    assert_same_steps(step, replay)


def test_each_segment_is_a_graph_on_one_pool(simulated_graphs: list[SimulatedGraph]) -> None:
    """Values that are alive at a cut are found again where the graph before has written them."""
    step = SmallStep()
    before = step.state()
    replay = capture(step.functions, "cuda:0")
    for variable, value in zip(step.variables, before, strict=True):
        variable.set_value(value)  # unlike a GPU's, a simulated recording also does the work
    assert not step.reports
    assert_same_steps(step, replay)
    # Two segments, and the function behind them.
    assert [graph.replays for graph in simulated_graphs] == [3, 3, 3]
    capture(step.functions[::-1], "cuda:0", beside=replay)
    # A function in front of the segments is in the graph of the first.
    assert [graph.pool() for graph in simulated_graphs] == [simulated_graphs[0]] * 5


def test_functions_without_reports_are_one_graph(simulated_graphs: list[SimulatedGraph]) -> None:
    a = device_shared(np.zeros(3), "a")
    functions = [pytensor.function([], updates=[(a, a + n)], mode=DEVICE) for n in (1, 2)]
    replay = capture(functions, "cuda:0")
    a.set_value(np.zeros(3))
    replay()
    np.testing.assert_array_equal(a.get_value(), 3)
    assert [graph.replays for graph in simulated_graphs] == [1]
