"""Every lowering gives what PyTensor's own backend gives on the same graph."""

import functools
import itertools
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.scalar.basic import Composite, ScalarOp
from pytensor.scalar.loop import ScalarLoop
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise

from tandem.backend import device_mode, regions
from tandem.backend.lowering import (
    Lowering,
    collective,
    control_flow,
    host_rule,
    lower,
    pool_norm,
    recurrent,
)
from tandem.backend.lowering.scalars import covered_scalar_ops
from tandem.backend.schedule import Target, plan_node
from tests.support.check_function import DEVICE, PLAIN_DEVICE, PYTHON, assert_same, results
from tests.support.complex_cases import COMPLEX_CASES
from tests.support.linalg_cases import LINALG_CASES
from tests.support.lowering_cases import LOWERING_CASES, Case
from tests.support.selection_cases import GPU_CASES, SELECTION_CASES

CASES = [*LOWERING_CASES, *LINALG_CASES, *COMPLEX_CASES, *SELECTION_CASES]
GROUP = 25  # cases that are compiled together
HOST = Target(torch.device("cpu"), compiled=False)


@functools.cache
def computed(first: int, last: int) -> list[list[tuple[str, tuple[np.ndarray, ...]]]]:
    """What some cases compute in each mode, which compiles one function for all of them.

    For each case and output: its name and its values by PyTensor and by the device.
    """
    built = [case.build() for case in CASES[first:last]]
    inputs, outputs, values = (list(itertools.chain(*parts)) for parts in zip(*built, strict=True))
    by_mode = (results(inputs, outputs, values, m) for m in (PYTHON, PLAIN_DEVICE, DEVICE))
    found = zip(map(str, outputs), zip(*by_mode, strict=True), strict=True)
    return [list(itertools.islice(found, len(outputs))) for _, outputs, _ in built]


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_equals_pytensor(number: int) -> None:
    first = number - number % GROUP
    try:
        case = computed(first, first + GROUP)[number - first]
    except Exception:  # which of them is it?
        case = computed(number, number + 1)[0]
    for place, (name, (expected, *found)) in enumerate(case):
        for got in found:
            assert_same(got, expected, f"output {place}: {name}")


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_for_gpus_equal_pytensor(case: Case) -> None:
    """Their calls take tensors on any device."""
    inputs, outputs, values = case.build()
    node = outputs[0].owner
    lowering = lower(node.op, node, device=torch.device("cuda"), compiled=False)
    with pytest.raises(NotImplementedError, match="on a CPU"):
        lower(node.op, node, device=torch.device("cpu"), compiled=False)
    operands: list[Any] = []
    for index, operand in enumerate(results(inputs, node.inputs, values, PYTHON)):
        if index in lowering.host:
            operands.append(tuple(operand.tolist()) if operand.ndim else operand.item())
        elif index not in lowering.omit:
            operands.append(torch.from_numpy(operand))
    got = lowering.call(*operands)
    got = got if isinstance(got, tuple) else (got,)
    expected = results(inputs, outputs, values, PYTHON)
    for output, value, result in zip(outputs, expected, got, strict=True):
        assert_same(result.numpy(), value, str(output))


@functools.cache
def planned_nodes() -> tuple[tuple[Apply, bool], ...]:
    """All nodes of all cases, each with whether it is computed on the host."""
    nodes = []
    for case in CASES:
        inputs, outputs, _ = case.build()
        graph = FunctionGraph(inputs, outputs, clone=True)
        on_host: set = set()
        for node in graph.toposort():
            numbers = plan_node(node, on_host, HOST).numbers
            if numbers:
                on_host.update(node.outputs)
            nodes.append((node, numbers))
    return tuple(nodes)


def scalar_ops(op: Op) -> set[type[ScalarOp]]:
    """The classes of the scalar Ops in an elementwise Op."""
    if not isinstance(op, Elemwise):
        return set()
    if not isinstance(op.scalar_op, Composite):
        return {type(op.scalar_op)}
    return {Composite} | {type(node.op) for node in op.scalar_op.fgraph.apply_nodes}


def test_every_lowering_and_scalar_call_and_host_rule_has_a_case() -> None:
    nodes = [node for node, _ in planned_nodes()]
    nodes += [case.build()[1][0].owner for case in GPU_CASES]
    classes = {type(node.op) for node in nodes}
    classes |= {type(node.op.core_op) for node in nodes if isinstance(node.op, Blockwise)}
    scalars = set().union(
        *(scalar_ops(node.op) for node, on_host in planned_nodes() if not on_host)
    )
    rules = {host_rule.dispatch(type(node.op)) for node, on_host in planned_nodes() if on_host}
    # Those with graphs inside, with kernels in Triton's language, or with other ranks to meet have
    # tests of their own.
    apart = {m.__name__ for m in (collective, control_flow, pool_norm, recurrent, regions)}
    registered = [op for op, call in lower.registry.items() if call.__module__ not in apart]
    ours = [op for op in registered if not op.__module__.startswith("tests.")]
    missing = [op for op in ours if not any(issubclass(used, op) for used in classes)]
    missing += covered_scalar_ops() - scalars - {ScalarLoop}
    missing += [op for op, rule in host_rule.registry.items() if rule not in rules]
    assert {op.__name__ for op in missing} <= {"object"}


def test_shapes_stay_on_the_host() -> None:
    x = pt.matrix("x")
    function = pytensor.function(
        [x], x.reshape((x.shape[0] * x.shape[1],))[: x.shape[0] - 1], mode=DEVICE
    )
    program = function.vm.program
    assert not program.breaks
    assert "item" not in program.source


def test_a_missing_lowering_is_named_and_can_be_registered() -> None:
    class Doubled(Op):
        def make_node(self, x: pt.TensorVariable) -> Apply:
            return Apply(self, [x], [x.type()])

        def perform(self, node: Apply, inputs: list, outputs: list) -> None:
            outputs[0][0] = inputs[0] * 2

    x = pt.fvector("left")
    strict = device_mode(strict=True)
    with pytest.raises(NotImplementedError, match=r"Doubled.*left.*lower\.register"):
        pytensor.function([x], Doubled()(x), mode=strict)
    lower.register(Doubled, lambda op, node, device, compiled: Lowering(lambda x: x * 2))
    function = pytensor.function([x], Doubled()(x), mode=strict)
    np.testing.assert_array_equal(function(np.float32([1, 2])), [2, 4])


def test_a_missing_scalar_call_is_named() -> None:
    x = pt.dvector("x")
    with pytest.raises(NotImplementedError, match=r"scalar Op Jv.*float64"):
        pytensor.function([x], pt.jv(1.0, x), mode=device_mode(strict=True))


def test_runtime_broadcasting_is_refused() -> None:
    x, y = pt.dvector("x"), pt.dvector("y")
    function = pytensor.function([x, y], x + y, mode=DEVICE)
    with pytest.raises(ValueError, match="Runtime broadcasting not allowed") as error:
        function(np.ones(1), np.ones(3))
    assert any("Add" in note for note in error.value.__notes__)


def test_failing_node_is_named() -> None:
    x, i = pt.dvector("x"), pt.lscalar("i")
    function = pytensor.function([x, i], x[i] * 2, mode=DEVICE)
    with pytest.raises(IndexError) as error:
        function(np.ones(3), 7)
    assert any("Subtensor" in note for note in error.value.__notes__)


def test_split_sizes_are_checked() -> None:
    x, sizes = pt.dvector("x"), pt.lvector("sizes")
    function = pytensor.function([x, sizes], pt.split(x, sizes, n_splits=2), mode=DEVICE)
    with pytest.raises(ValueError, match="sum to 5; expected 3"):
        function(np.ones(3), np.array([2, 3]))


def test_graphs_hold_no_rewrites_for_other_backends() -> None:
    x, w = pt.fmatrix("x"), pt.fmatrix("w")
    y = pt.exp(x * 2 + 1) * 3 - x
    function = pytensor.function([x, w], [y.sum(), pt.dot(y, w)], mode=DEVICE)
    for node in function.maker.fgraph.apply_nodes:
        assert not node.op.destroy_map
        assert not (isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Composite))
        assert type(node.op).__name__ not in ("Gemm", "Dot22", "Gemv", "Dot22Scalar")
