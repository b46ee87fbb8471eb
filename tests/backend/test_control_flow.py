"""Loops, branches and Ops made from graphs give what PyTensor's own linkers give."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.ifelse import ifelse
from pytensor.raise_op import Assert
from pytensor.scan.utils import until
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.backend import device_mode
from tandem.backend.inner_graphs import Branches
from tests.support.check_function import DEVICE, PLAIN_DEVICE, PYTHON, assert_same, results

# An IfElse has no `perform`, which the Python linker needs.
LAZY_PYTHON = Mode(linker="vm", optimizer=None)

Program = Callable[[], tuple[list[Variable], list[Variable], list[Any]]]


def power() -> Any:
    x, n = pt.dvector("x"), pt.lscalar("n")
    trace = pytensor.scan(
        lambda p, x: p * x,
        outputs_info=[pt.ones_like(x)],
        non_sequences=[x],
        n_steps=n,
        return_updates=False,
    )
    outputs = [trace, trace[-1], trace[-2:], pytensor.grad(trace[-1].sum(), x)]
    return [x, n], outputs, [np.arange(1.0, 4), 5]


def two_taps() -> Any:
    x = pt.dvector("x")
    trace = pytensor.scan(
        lambda a, b, p1, p2: pt.tanh(a + b * p1 - p2),
        sequences=[x, x * 2],
        outputs_info=[{"initial": pt.as_tensor([1.0, 2.0]), "taps": [-1, -2]}],
        return_updates=False,
    )
    outputs = [trace, trace[-1], trace[-2:], trace.sum(), pytensor.grad(trace.sum(), x)]
    return [x], outputs, [np.linspace(-1, 1, 6)]


def sequence_taps() -> Any:
    x = pt.dmatrix("x")
    trace = pytensor.scan(
        lambda before, now, after, state: before - now * after + state[::-1],
        sequences=[{"input": x, "taps": [-1, 0, 1]}],
        outputs_info=[x[0]],
        return_updates=False,
    )
    return [x], [trace, pytensor.grad(trace.sum(), x)], [np.arange(12.0).reshape(4, 3)]


def stopped() -> Any:
    x = pt.dscalar("x")
    trace, counts = pytensor.scan(
        lambda p, n: ([p * 2, n + 1], until(p > 50)),
        outputs_info=[x, pt.constant(0, dtype="int64")],
        n_steps=100,
        return_updates=False,
    )
    return [x], [trace, trace[-1], counts[-1], pytensor.grad(trace[-1], x)], [1.0]


def no_state() -> Any:
    x = pt.dmatrix("x")
    sums, doubled = pytensor.scan(
        lambda row: (row.sum(), row * 2), sequences=[x], return_updates=False
    )
    return [x], [sums, doubled, sums[-1]], [np.arange(6.0).reshape(2, 3)]


def no_steps() -> Any:
    inputs, outputs, (values, _) = power()
    return inputs, outputs[:1], [values, 0]


def truncated_gradient() -> Any:
    x = pt.dvector("x")
    trace = pytensor.scan(
        lambda a, p: pt.sin(a * p) + p,
        sequences=[x],
        outputs_info=[pt.constant(0.5, dtype="float64")],
        truncate_gradient=2,
        return_updates=False,
    )
    return [x], [pytensor.grad(trace[-1], x)], [np.linspace(0, 1, 5)]


def nested() -> Any:
    x = pt.dmatrix("x")

    def row_product(row: Variable) -> Variable:
        return pytensor.scan(
            lambda a, p: a * p,
            sequences=[row],
            outputs_info=[pt.constant(1.0, dtype="float64")],
            return_updates=False,
        )[-1]

    products = pytensor.scan(row_product, sequences=[x], return_updates=False)
    return [x], [products, pytensor.grad(products.sum(), x)], [np.arange(1.0, 7).reshape(2, 3)]


def vector_of_one() -> Any:
    x = pt.tensor("x", dtype="float32", shape=(1,))
    trace = pytensor.scan(lambda p: p * 2, outputs_info=[x], n_steps=3, return_updates=False)
    return [x], [trace, trace[-1] + 1], [np.float32([3])]


def last_states() -> Any:
    """Of each trace only a few states are kept, in turn at every place of its memory."""
    x = pt.dvector("x")
    outputs = [
        pytensor.scan(lambda p: p * 2, outputs_info=[x], n_steps=steps, return_updates=False)[-2:]
        for steps in (4, 5, 6)
    ]
    return [x], outputs, [np.arange(1.0, 4)]


def truncated_gradient_after_a_stop() -> Any:
    x = pt.dvector("x")
    trace = pytensor.scan(
        lambda a, p: (a * p, until(p > 50)),
        sequences=[x],
        outputs_info=[pt.constant(1.0, dtype="float64")],
        truncate_gradient=2,
        return_updates=False,
    )
    return [x], [pytensor.grad(trace[-1], x)], [np.arange(2.0, 12)]


SCANS = (
    power, two_taps, sequence_taps, stopped, no_state, no_steps, truncated_gradient, nested,
    vector_of_one, last_states, truncated_gradient_after_a_stop,
)  # fmt: skip


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """Let PyTorch fill memory that is not initialised."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("program", SCANS, ids=lambda program: program.__name__)
def test_scan(program: Program) -> None:
    inputs, outputs, values = program()
    expected = results(inputs, outputs, values, PYTHON)
    for mode in (DEVICE, PLAIN_DEVICE):
        for got, value in zip(results(inputs, outputs, values, mode), expected, strict=True):
            assert_same(got, value)


def test_scan_leaves_its_operands() -> None:
    """The memory that a Scan is given for a trace may be an input's."""
    trace = pytensor.scan(
        lambda p: p * 2, outputs_info=[pt.ones(2)], n_steps=3, return_updates=False
    )
    node = trace.owner.inputs[0].owner
    memory = pt.dmatrix("memory")
    whole = node.op(node.inputs[0], memory, *node.inputs[2:])
    value = np.ones((4, 2))
    found = pytensor.function([memory], whole, mode=PLAIN_DEVICE)(value)
    np.testing.assert_array_equal(found[:, 0], [1, 2, 4, 8])
    np.testing.assert_array_equal(value, np.ones((4, 2)))


def test_scan_refuses_short_sequences_and_negative_counts() -> None:
    x, n = pt.dvector("x"), pt.lscalar("n")
    trace = pytensor.scan(lambda a: a * 2, sequences=[x], n_steps=n, return_updates=False)
    function = pytensor.function([x, n], trace, mode=PLAIN_DEVICE)
    with pytest.raises(ValueError, match="required number of steps is 4"):
        function(np.ones(3), 4)
    with pytest.raises(IndexError, match="negative number of step"):
        function(np.ones(3), -1)


def test_scan_keeps_what_is_read_of_a_trace() -> None:
    x = pt.dvector("x")
    trace = pytensor.scan(lambda p: p * 0.5, outputs_info=[x], n_steps=1000, return_updates=False)
    function = pytensor.function([x], trace[-1], mode=DEVICE)
    lengths = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, arguments=(), keywords=None):
            result = call(*arguments, **(keywords or {}))
            lengths.append(result.numel())
            return result

    with Recorder():
        function(np.ones(8))
    assert max(lengths) <= 2 * 8


def test_a_result_of_another_shape_is_refused() -> None:
    x = pt.dvector("x")
    trace = pytensor.scan(lambda p: p[1:], outputs_info=[x], n_steps=2, return_updates=False)
    with pytest.raises(ValueError, match=r"result of a Scan's step has shape \(2,\)"):
        pytensor.function([x], trace, mode=PLAIN_DEVICE)(np.ones(3))


def random_walk(mode: Mode) -> list[np.ndarray]:
    """Two calls of a loop that draws from a generator, which it carries along."""
    rng = pytensor.shared(np.random.default_rng(3))

    def step(place: Variable, rng: Variable) -> Any:
        next_rng, change = pt.random.normal(rng=rng, return_next_rng=True)
        return place + change, {rng: next_rng}

    trace, updates = pytensor.scan(
        step,
        outputs_info=[pt.constant(0.0, dtype="float64")],
        non_sequences=[rng],
        n_steps=4,
        strict=True,
    )
    function = pytensor.function([], trace, updates=updates, mode=mode)
    return [function(), function()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scan_carries_a_generator() -> None:
    for got, expected in zip(random_walk(DEVICE), random_walk(PYTHON), strict=True):
        assert_same(got, expected)


@pytest.mark.slow
def test_the_step_of_a_compiled_scan_is_compiled() -> None:
    inputs, outputs, values = two_taps()
    expected = results(inputs, outputs[:1], values, PYTHON)
    assert_same(results(inputs, outputs[:1], values, device_mode(compile=True))[0], expected[0])


def branches(mode: Mode, choice: int) -> list[np.ndarray]:
    x, c = pt.dmatrix("x"), pt.lscalar("c")
    both = pt.exp(x)
    yes, no = (both * 2).sum(), (both @ x - x.shape[0]).sum()
    chosen = ifelse(c > 1, yes, no)
    inner = ifelse(c > 2, ifelse(c > 3, x, -x), x.T)
    outputs = [chosen, pytensor.grad(chosen, x), inner, both]
    return results([x, c], outputs, [np.arange(4.0).reshape(2, 2) / 4, choice], mode)


def test_lengths_of_branches_are_those_that_both_have() -> None:
    """So that a sum of the shorter one with others is refused, as PyTensor does."""
    condition = pt.lscalar("condition")
    one, three, z = (pt.tensor(dtype="float64", shape=(length,)) for length in (1, 3, 3))
    chosen = ifelse(condition, pt.exp(one), pt.exp(three))
    function = pytensor.function([condition, one, three, z], [chosen + z, chosen], mode=DEVICE)
    np.testing.assert_allclose(function(0, np.zeros(1), np.zeros(3), np.ones(3))[0], 2)
    with pytest.raises(ValueError, match="Runtime broadcasting not allowed"):
        function(1, np.zeros(1), np.zeros(3), np.ones(3))


@pytest.mark.parametrize("choice", range(5))
def test_ifelse(choice: int) -> None:
    expected = branches(LAZY_PYTHON, choice)
    for mode in (DEVICE, PLAIN_DEVICE):
        for got, value in zip(branches(mode, choice), expected, strict=True):
            assert_same(got, value)


@pytest.mark.parametrize("mode", [DEVICE, PLAIN_DEVICE], ids=["rewritten", "plain"])
def test_only_the_chosen_branch_is_computed(mode: Mode) -> None:
    x, c = pt.dvector("x"), pt.bscalar("c")
    refuse = Assert("was computed")
    inner = ifelse(pt.eq(c, 1), refuse(x, x.sum() > 10), x * 2)
    outer = ifelse(c > 0, inner, refuse(x, x.sum() > 20) + 1)
    function = pytensor.function([x, c], [outer, x + 1], mode=mode)
    assert any(isinstance(node.op, Branches) for node in function.maker.fgraph.apply_nodes)
    np.testing.assert_array_equal(function(np.ones(2), 2)[0], [2, 2])
    for choice in (0, 1):
        with pytest.raises(AssertionError, match="was computed"):
            function(np.ones(2), choice)


@pytest.mark.parametrize("user", ["another output", "the condition", "the other branch"])
def test_what_others_need_is_computed_once(user: str) -> None:
    calls = []

    @pytensor.wrap_py(itypes=[pt.dvector], otypes=[pt.dvector])
    def counted(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return x + 1

    x, c = pt.dvector("x"), pt.bscalar("c")
    shared = counted(x)
    condition = shared.sum() > 0 if user == "the condition" else c
    other = shared - 1 if user == "the other branch" else x
    outputs = [ifelse(condition, shared * 2, other)]
    if user == "another output":
        outputs.append(shared)
    function = pytensor.function([x, c], outputs, mode=DEVICE, on_unused_input="ignore")
    np.testing.assert_array_equal(function(np.zeros(2), 1)[0], [2, 2])
    assert len(calls) == 1
    inside = [
        inner.op
        for node in function.maker.fgraph.apply_nodes
        if isinstance(node.op, Branches)
        for graph in node.op.graphs
        for inner in graph.apply_nodes
    ]
    assert inside
    assert shared.owner.op not in inside


@pytest.mark.parametrize("choice", [0, 1])
def test_a_branch_that_others_need_is_not_written_over(choice: int) -> None:
    """Elementwise calls write over dead intermediates; here they would hit a live one."""
    x, c = pt.tensor("x", dtype="float64", shape=(2,)), pt.bscalar("c")
    y, z = x + 1, x + 2
    first = pt.exp(ifelse(c, y, z))
    function = pytensor.function([x, c], [first, y * first, z * first], mode=DEVICE)
    chosen = np.exp([2.0 - choice] * 2)
    found = function(np.zeros(2), choice)
    np.testing.assert_allclose(found, [chosen, chosen, 2 * chosen])


def test_a_branch_that_is_an_input_is_a_copy() -> None:
    x, c = pt.dvector("x"), pt.bscalar("c")
    value = np.zeros(2)
    result = pytensor.function([x, c], ifelse(c, x, x * 2), mode=DEVICE)(value, 1)
    result += 1
    np.testing.assert_array_equal(value, [0, 0])


def test_an_op_from_a_graph() -> None:
    x, y = pt.dvector("x"), pt.dscalar("y")
    weight = pytensor.shared(np.array(3.0))
    inner = OpFromGraph([x, y], [x * y + weight, x, x.shape[0] + 1])
    outer = OpFromGraph([x, y], list(inner(x * 2, y)))
    outputs = [*outer(x, y), pytensor.grad(outer(x, y)[0].sum(), x)]
    values = [np.arange(3.0), 2.0]
    expected = results([x, y], outputs, values, PYTHON)
    for mode in (DEVICE, PLAIN_DEVICE):
        for got, value in zip(results([x, y], outputs, values, mode), expected, strict=True):
            assert_same(got, value)
