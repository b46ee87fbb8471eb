"""What a lowering declares of its Op is all that decides order and memory of its results."""

import importlib
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from tandem.backend import DeviceLinker, Lowering, device_mode, device_shared, lower
from tests.support.check_function import DEVICE


@pytest.mark.parametrize("name", ["aliasing", "codegen", "linker", "mode", "precision", "schedule"])
def test_the_code_generator_names_no_op(name: str) -> None:
    module = importlib.import_module(f"tandem.backend.{name}")
    classes = {key for key, value in vars(module).items() if isinstance(value, type)}
    assert classes, "nothing was looked at"
    assert not {key for key in classes if issubclass(getattr(module, key), Op)}


class Toy(Op):
    """Twice its input, with a lowering that each test chooses."""

    def __init__(self, **declared: Any) -> None:
        self.lowering = Lowering(lambda x: x * 2, **declared)

    def make_node(self, x: pt.TensorVariable) -> Apply:
        return Apply(self, [x], [x.type()])

    def perform(self, node: Apply, inputs: list, outputs: list) -> None:
        outputs[0][0] = inputs[0] * 2


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    lower.register(Toy, lambda op, node, device, compiled: op.lowering)


def into(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2, out=out)


def updated(**declared: Any) -> str:
    """Check the update ``a <- 2 a`` and return its source."""
    a = device_shared(np.ones(3), "a")
    step = pytensor.function([], updates=[(a, Toy(**declared)(a))], mode=DEVICE)
    step()
    np.testing.assert_array_equal(a.get_value(), 2)
    return step.vm.program.source


def test_a_result_goes_where_its_lowering_permits() -> None:
    assert ".copy_(" not in updated(into=into, in_place=True, certain=True)
    assert ".copy_(" in updated(into=into, in_place=True)  # it may fail
    assert ".copy_(" in updated(into=into, certain=True)  # it reads what it would overwrite
    early = updated(certain=True).splitlines()
    assert [".copy_(" in line for line in early[1:3]] == [False, True]


@pytest.mark.parametrize("toy_is_last", [True, False])
def test_what_may_fail_comes_before_what_is_certain(toy_is_last: bool) -> None:
    a, b = (device_shared(np.ones(3), name) for name in "ab")
    x = pt.tensor("x", shape=(3,), dtype="float64")
    for certain in (True, False):
        updates = [(a, pt.exp(x)), (b, Toy(certain=certain)(x))]
        graph = updates if toy_is_last else updates[::-1]
        function = pytensor.function([x], updates=graph, mode=DEVICE)
        order = nodes(function)
        if certain:
            assert order == function.maker.fgraph.toposort()
        else:
            assert [isinstance(node.op, Toy) for node in order] == [True, False]


def nodes(function: Any) -> list[Apply]:
    program = function.vm.program
    return [program.nodes[line] for line in sorted(program.nodes)]


def test_an_operand_is_overwritten_after_its_last_use() -> None:
    def overwritten(x: torch.Tensor) -> torch.Tensor:
        seen.append(True)
        return x.mul_(2)

    seen: list[bool] = []
    x = pt.tensor("x", shape=(3,), dtype="float64")
    op = Toy(reuse={0: overwritten})
    once = pytensor.function([x], op(pt.exp(x)), mode=DEVICE)
    once(np.zeros(3))
    assert seen
    seen.clear()
    twice = pytensor.function([x], [op(pt.exp(x)), pt.exp(x)], mode=DEVICE)
    np.testing.assert_array_equal(twice(np.zeros(3)), [[2, 2, 2], [1, 1, 1]])
    assert not seen


def test_factors_of_a_product_are_rounded() -> None:
    x = pt.tensor("x", shape=(1,), dtype="float32")
    mode = device_mode(precision="bfloat16")
    value = np.float32([1 + 2.0**-10])
    for factors, expected in (((), 2 * value), ((0,), [2])):
        function = pytensor.function([x], Toy(factors=factors)(x), mode=mode)
        np.testing.assert_array_equal(function(value), expected)


@pytest.mark.parametrize("computes", [True, False])
def test_torch_compile_may_leave_out_what_only_moves_numbers(computes: bool) -> None:
    """Then the result counts as a view, and is copied before its operand is overwritten."""
    a = device_shared(np.ones(3), "a")
    linker = DeviceLinker(torch.device("cpu"), compiled=True)
    mode = Mode(linker, DEVICE.provided_optimizer)
    moved = Toy(computes=computes)(a)
    function = pytensor.function([], moved, updates=[(a, a + 1)], mode=mode)
    assert (function.vm.program.store_results is None) is computes


@pytest.mark.parametrize(
    ("part", "is_certain"),
    [
        (lambda x: x[:, 1:3], True),
        (lambda x: pt.inc_subtensor(x[:, ::2], x[:, 2:]), True),
        (lambda x: pt.inc_subtensor(x[:, :1], x[:1, :1]), False),  # repeated over the slice
        (lambda x: pt.inc_subtensor(x[0], x[1]), False),
        (lambda x: pt.split(x, [1, 3], axis=1)[0], True),
        (lambda x: pt.split(x, [1, 2], axis=1)[0], False),
        (lambda x: pt.alloc(x[:, :, None], 2, 4, 5), True),
    ],
)
def test_slices_splits_and_repetitions_that_fit_cannot_fail(part: Any, is_certain: bool) -> None:
    """Else all filters' gradients would wait for those of a shortcut or of a concatenation."""
    x = pt.tensor("x", shape=(2, 4), dtype="float64")
    found = part(pt.cos(x))
    a = device_shared(np.ones((2, 4)), "a")
    b = device_shared(np.ones(found.type.shape), "b")
    updates = [(a, pt.exp(x)), (b, found)]
    functions = [pytensor.function([x], updates=u, mode=DEVICE) for u in (updates, updates[::-1])]
    kept = [nodes(function) == function.maker.fgraph.toposort() for function in functions]
    assert all(kept) == is_certain
