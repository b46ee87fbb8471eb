"""Calls of a program wrapped by an observer: all of them, and without another bit."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import device_mode, device_shared
from tandem.errors import InputError


class Observer:
    """Wraps calls, and records each call's node and seconds."""

    def __init__(self) -> None:
        self.made: list[Apply] = []
        self.called: list[tuple[Apply, float]] = []

    def __call__(self, node: Apply, call: Callable[..., Any]) -> Callable[..., Any]:
        self.made.append(node)

        def observed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            result = call(*arguments)
            self.called.append((node, time.perf_counter() - begun))
            return result

        return observed


def run(step: ResidentStep) -> list[np.ndarray]:
    for _ in range(2):
        step.run()
    return [v.get_value() for v in (*step.weights.values(), *step.momenta.values(), step.loss)]


def nodes_of(function: Any) -> list[Apply]:
    """The nodes of a compiled function, in their order."""
    return [*function.vm.program.nodes.values()]


@pytest.mark.parametrize("segments", [False, True])
def test_every_node_is_observed_in_its_order_and_no_bit_changes(segments: bool) -> None:
    observer = Observer()
    cut: Any = {"on_gradient_ready": lambda name: None} if segments else {}
    plain = run(ResidentStep(device_mode(**cut), Sizes(batch=2)))
    step = ResidentStep(device_mode(observe=observer, **cut), Sizes(batch=2))
    nodes = [node for function in step.functions for node in nodes_of(function)]
    for ours, theirs in zip(run(step), plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    called = [node for node, _ in observer.called]
    assert list(dict.fromkeys(called)) == nodes
    assert len(called) == 2 * len(observer.made)


def test_copies_and_conversions_belong_to_nodes() -> None:
    observer = Observer()
    x = pt.tensor("x", shape=(4, 4), dtype="float32")
    total = device_shared(np.zeros((4, 4), np.float32), "total")
    mode = device_mode(observe=observer, precision="bfloat16")
    f = pytensor.function([x], [], updates=[(total, total.T + x @ x)], mode=mode)
    (add,) = (n for n in nodes_of(f) if n.outputs[0] in f.maker.fgraph.outputs)
    (dot,) = (n for n in nodes_of(f) if type(n.op).__name__ == "Dot")
    assert observer.made.count(dot) == 2  # one conversion, of the operand that it takes twice
    assert observer.made.count(add) == 2  # its result is copied into the variable
    f(np.eye(4, dtype=np.float32))
    np.testing.assert_array_equal(total.get_value(), np.eye(4))


def test_the_node_of_a_call_that_fails_is_named() -> None:
    x, y = (pt.tensor(name, shape=(None,), dtype="float32") for name in "xy")
    messages = []
    for observe in (None, Observer()):
        f = pytensor.function([x, y], pt.exp(x) + y, mode=device_mode(observe=observe))
        with pytest.raises(ValueError, match="must match the size") as caught:
            f(np.ones(2, np.float32), np.ones(3, np.float32))
        messages.append(caught.value.__notes__[0])
    assert messages[0] == messages[1]
    assert messages[0].startswith("while PyTorch computed Add(")


def test_a_loop_is_one_call() -> None:
    observer = Observer()
    x = pt.tensor("x", shape=(5,), dtype="float64")
    sums = pytensor.scan(lambda a, b: a + b, x, [pt.zeros(())], return_updates=False)
    f = pytensor.function([x], sums, mode=device_mode(observe=observer))
    np.testing.assert_array_equal(f(np.ones(5)), np.arange(1, 6))
    assert {node for node, _ in observer.called} <= f.maker.fgraph.apply_nodes


def test_an_observer_and_compile_are_refused() -> None:
    with pytest.raises(InputError, match="with compile the calls of a program are fused"):
        device_mode(compile=True, observe=Observer())


@pytest.mark.slow
def test_calls_cover_a_step() -> None:
    observer = Observer()
    step = ResidentStep(device_mode(observe=observer), Sizes(16, 131, 131, 100, 1.0))
    step.run()
    shares = []
    for _ in range(5):
        observer.called.clear()
        begun = time.perf_counter()
        step.run()
        whole = time.perf_counter() - begun
        shares.append(sum(seconds for _, seconds in observer.called) / whole)
    assert max(shares) >= 0.97
