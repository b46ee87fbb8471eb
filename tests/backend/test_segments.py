"""Functions that are cut into segments: values, memory, reports, and what is compiled."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import DeviceLinker, Lowering, device_mode, device_shared, lower
from tandem.compilers import cpp_compiler
from tests.support.check_function import DEVICE

needs_compiler = pytest.mark.skipif(
    cpp_compiler() is None, reason="torch.compile needs a C++ compiler ($CXX, g++ or clang++)"
)

LAYERS = [["fc8", "fc7"], ["fc6"], ["conv5", "conv4", "conv3", "conv2", "conv1"]]
BUCKETS = [
    {f"gradient/{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    for layers in LAYERS
]


def segments(function: Any) -> Any:
    return function.vm.jit_fn.segments


def vector(name: str) -> Any:
    return pt.tensor(name, shape=(3,), dtype="float64")


def test_the_step_in_segments_computes_the_same_bits() -> None:
    plain, cut = ResidentStep(DEVICE, Sizes(batch=2)), ResidentStep(DEVICE, Sizes(batch=2))
    by_name = {str(v.name): v for v in (*cut.gradients.values(), cut.loss)}
    reported: dict[str, np.ndarray] = {}

    def report(name: str) -> None:
        reported[name] = by_name[name].get_value()

    gradient = cut.compile(device_mode(on_gradient_ready=report, buckets=BUCKETS))[0]
    for _ in range(2):
        reported.clear()
        plain.run()
        gradient()
        assert reported.keys() == by_name.keys()
        for name, value in reported.items():
            np.testing.assert_array_equal(value, by_name[name].get_value(), name)
        cut.functions[1]()
    expected = plain.state()
    for name, value in cut.state().items():
        np.testing.assert_array_equal(value, expected[name], name)
    # Each bucket ends a segment; with the last are reported the variables of none.
    ready = [set(segment.ready) for segment in segments(gradient)]
    assert ready == [*BUCKETS[:2], BUCKETS[2] | {"loss"}]


class Call(Op):
    """An Op of which each use chooses its call."""

    def __init__(self, call: Callable[..., Any], **declared: Any) -> None:
        self.lowering = Lowering(call, **declared)

    def make_node(self, *inputs: pt.TensorVariable) -> Apply:
        return Apply(self, list(inputs), [inputs[0].type()])

    def perform(self, node: Apply, inputs: list, outputs: list) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """Register the Op in the process of these tests, and not where they are only collected."""
    lower.register(Call, lambda op, node, device, compiled: op.lowering)


def test_a_value_is_freed_after_its_last_use_in_a_later_segment() -> None:
    made: list[weakref.ref] = []
    alive: list[bool] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(result := x * 2))
        return result

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(made[-1]() is not None)
        return x + 1

    a, b, x = device_shared(np.zeros(3), "a"), device_shared(np.zeros(3), "b"), vector("x")
    value = Call(make, certain=True)(x)
    used = Call(look, certain=True)(value)  # by the first segment, and by the second
    other = Call(look, certain=True)(Call(lambda v: v + 1, certain=True)(value))
    mode = device_mode(on_gradient_ready=lambda name: None, buckets=["a", "b"])
    step = pytensor.function([x], updates=[(a, used), (b, other)], mode=mode)
    for _ in range(2):
        step(np.ones(3))
    assert [len(segment.takes) for segment in segments(step)] == [2, 2]
    assert alive == [True, False] * 2


def test_a_variable_that_is_read_later_is_written_and_reported_at_the_end() -> None:
    """The old value is read behind the cut, by a later bucket."""
    a, b, c = (device_shared(np.full(3, float(n)), name) for n, name in enumerate("abc", 1))
    x, reported = vector("x"), []
    mode = device_mode(on_gradient_ready=reported.append, buckets=["a", "c", "b"])
    updates = [(a, pt.exp(x)), (c, x * 5), (b, pt.sqrt(x) + a)]
    step = pytensor.function([x], updates=updates, mode=mode)
    for _ in range(2):
        before = a.get_value()
        step(np.ones(3))
        np.testing.assert_array_equal(b.get_value(), 1 + before)
        np.testing.assert_array_equal(a.get_value(), np.exp(np.ones(3)))
    assert reported == ["c", "a", "b"] * 2


def test_variables_in_one_memory_are_written_at_the_end() -> None:
    block = np.arange(4.0)
    a, b = (device_shared(None, n, memory=block[i : i + 3]) for i, n in enumerate("ab"))
    c, x = device_shared(np.zeros(3), "c"), vector("x")
    mode = device_mode(on_gradient_ready=lambda name: None, buckets=["a", "c"])
    step = pytensor.function([x], updates=[(a, pt.exp(x)), (c, pt.sqrt(x) + b)], mode=mode)
    step(np.zeros(3))
    np.testing.assert_array_equal(c.get_value(), [1, 2, 3])
    np.testing.assert_array_equal(block, [1, 1, 1, 3])
    assert [segment.ready for segment in segments(step)] == [("c",), ("a",)]


def test_nothing_is_written_or_reported_before_what_may_fail() -> None:
    a, b = device_shared(np.zeros(3), "a"), device_shared(np.zeros(3), "b")
    x, index, reported = vector("x"), pt.lscalar("index"), []
    mode = device_mode(on_gradient_ready=reported.append, buckets=["a", "b"])
    new = pt.exp(x)
    updates = [(a, new), (b, x * new[index])]
    step = pytensor.function([x, index], updates=updates, mode=mode)
    with pytest.raises(IndexError):
        step(np.ones(3), 7)
    assert not reported
    np.testing.assert_array_equal(a.get_value(), 0)
    step(np.ones(3), 2)
    assert reported == ["a", "b"]


def test_an_update_that_is_a_view_is_copied_at_the_cut() -> None:
    a, b = device_shared(np.zeros((2, 3)), "a"), device_shared(np.zeros((3, 2)), "b")
    x, reported = pt.tensor("x", shape=(3, 2), dtype="float64"), []
    new = pt.exp(x)
    mode = device_mode(on_gradient_ready=reported.append, buckets=["a", "b"])
    step = pytensor.function([x], updates=[(a, new.T), (b, new + 1)], mode=mode)
    step(np.ones((3, 2)))
    assert [segment.ready for segment in segments(step)] == [("a",), ("b",)]
    np.testing.assert_array_equal(a.get_value(), np.exp(np.ones((2, 3))))
    np.testing.assert_array_equal(b.get_value(), np.exp(np.ones((3, 2))) + 1)


def test_the_node_that_failed_is_named_in_a_later_segment() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    a, b, x = device_shared(np.zeros(3), "a"), device_shared(np.zeros(3), "b"), vector("x")
    mode = device_mode(on_gradient_ready=lambda name: None)
    failing = Call(fail, certain=True)(pt.exp(x))
    step = pytensor.function([x], updates=[(a, pt.exp(x)), (b, failing)], mode=mode)
    with pytest.raises(ValueError, match="shapes do not fit") as caught:
        step(np.ones(3))
    assert any("while PyTorch computed Call(" in note for note in caught.value.__notes__)


def test_an_error_of_a_report_is_raised() -> None:
    def report(name: str) -> None:
        raise ConnectionError("the other rank has ended")

    a, x = device_shared(np.zeros(3), "a"), vector("x")
    mode = device_mode(on_gradient_ready=report)
    step = pytensor.function([x], updates=[(a, pt.exp(x))], mode=mode)
    with pytest.raises(ConnectionError, match="has ended"):
        step(np.ones(3))


@pytest.mark.parametrize("compiled", [False, True])
def test_of_a_gradient_that_is_checked_only_the_finding_is_kept(compiled: bool) -> None:
    """The segments of a trainer's step: reshapes and slices cannot fail, so nothing waits."""
    a, b = device_shared(np.zeros((2, 6)), "a"), device_shared(np.zeros((3, 3)), "b")
    finite = device_shared(np.zeros((), bool), "finite")
    x = pt.tensor("x", shape=(3, 4), dtype="float64")
    first = pt.exp(x).reshape((2, 6))
    second = pt.sqrt(pt.exp(x)[:, :3])
    checks = [pt.isfinite(gradient.sum()) for gradient in (first, second)]
    mode = Mode(
        DeviceLinker(
            torch.device("cpu"),
            compiled,
            on_gradient_ready=lambda name: None,
            buckets=["a", ["b", "finite"]],
        ),
        DEVICE.provided_optimizer,
    )
    updates = [(finite, checks[0] & checks[1]), (a, first), (b, second)]
    step = pytensor.function([x], updates=updates, mode=mode)
    run = step.vm.program.run
    one, two = run.segments
    assert (one.ready, two.ready) == (("a",), ("finite", "b"))
    shapes = [given.variable.type.shape for given in step.maker.inputs]
    values = {name: torch.ones(s).double() for name, s in zip(run.inputs, shapes, strict=True)}
    assert [tuple(value.shape) for value in one(values)] == [()]


@pytest.mark.slow
@needs_compiler
def test_each_segment_is_compiled_by_itself() -> None:
    a, total = device_shared(np.zeros(4), "a"), device_shared(np.zeros(()), "total")
    b, c = device_shared(np.zeros(4), "b"), device_shared(np.ones(4), "c")
    by_name = {"a": a, "b": b, "c": c, "total": total}
    x, seen = pt.tensor("x", shape=(4,), dtype="float64"), {}

    def report(name: str) -> None:
        seen[name] = by_name[name].get_value()
        by_name[name].set_value(np.full_like(seen[name], 1e9) if name == "a" else seen[name])

    first = pt.exp(x) * 2
    second = pt.sqrt(first) + 1
    updates = [
        (total, total + first.sum()),
        (c, second * c),
        (a, first),
        (b, second),
    ]
    mode = device_mode(compile=True, on_gradient_ready=report, buckets=[["a"], ["total", "b"], "c"])
    step = pytensor.function([x], updates=updates, mode=mode)
    assert [segment.ready for segment in segments(step)] == [("a",), ("total", "b"), ("c",)]
    torch._dynamo.utils.counters.clear()
    for call in (1, 2):
        step(np.zeros(4))
        result = np.full(4, np.sqrt(2) + 1)
        np.testing.assert_array_equal(seen["a"], np.full(4, 2.0))
        np.testing.assert_array_equal(a.get_value(), np.full(4, 1e9))
        np.testing.assert_allclose(seen["b"], result)
        np.testing.assert_allclose(seen["c"], result**call)
        assert seen["total"] == 8 * call
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert not torch._dynamo.utils.counters["graph_break"]
