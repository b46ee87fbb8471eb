"""Graphs that are flat data are the graphs that they were."""

import pickle
import sys
import threading
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import wrap_py
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import toposort
from pytensor.scan.op import Scan

from tandem.errors import InputError
from tandem.parallel.graph_transfer import FlatGraph, decode
from tandem.processes.spawn import SPAWN
from tests.support.check_function import PYTHON
from tests.support.graph_forms import FORMS
from tests.support.lowering_cases import LOWERING_CASES
from tests.support.op_checks import plain_python
from tests.support.random_graphs import compute, grow
from tests.support.sent_graphs import GRAPHS, Applies, answer, chain, cubed, results, sent

RANDOM_GRAPHS = 15


def transferred(
    inputs: list[Variable], outputs: list[Variable]
) -> tuple[list[Variable], list[Variable]]:
    """Return a copy of a graph as another process has it, over the same shared variables."""
    flat, numbers = sent(inputs, outputs)
    return decode(pickle.loads(pickle.dumps(flat)), numbers.variables)


def assert_same_graph(one: Sequence[Variable], other: Sequence[Variable]) -> None:
    """Compare two graphs: Ops, types, names, constants, and which variables are the same."""
    pairs: dict[Variable, Variable] = dict(zip(one, other, strict=True))
    assert all(pairs[v] is c for v, c in zip(one, other, strict=True))
    nodes = list(toposort(one))
    assert len(nodes) == len(list(toposort(other)))
    ops: dict[int, int] = {}
    for node in reversed(nodes):
        (copy,) = {pairs[v].owner for v in node.outputs if v in pairs}
        for mine, theirs in ((node.outputs, copy.outputs), (node.inputs, copy.inputs)):
            assert len(mine) == len(theirs)
            assert all(pairs.setdefault(v, c) is c for v, c in zip(mine, theirs, strict=True))
        assert type(node.op) is type(copy.op)
        assert ops.setdefault(id(node.op), id(copy.op)) == id(copy.op)
        if type(node.op).__eq__ is not object.__eq__:
            assert node.op == copy.op
            assert hash(node.op) == hash(copy.op)
        if isinstance(node.op, HasInnerGraph):
            inner, inner_copy = node.op.fgraph, copy.op.fgraph
            assert_same_graph(
                [*inner.outputs, *inner.inputs], [*inner_copy.outputs, *inner_copy.inputs]
            )
    assert len(set(pairs.values())) == len(pairs)
    for variable, copy in pairs.items():
        assert type(variable) is type(copy)
        assert variable.type == copy.type
        assert variable.name == copy.name
        if isinstance(variable, SharedVariable):
            assert variable is copy
        elif isinstance(variable, Constant) and isinstance(variable.data, np.ndarray):
            assert variable.data.tobytes() == copy.data.tobytes()


def bits(values: Sequence[Any]) -> list[tuple]:
    return [(v.dtype, v.shape, v.tobytes()) for v in map(np.asarray, values)]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_the_same_and_computes_the_same(name: str) -> None:
    inputs, outputs, values = GRAPHS[name]()
    expected = results(inputs, outputs, values)
    got_inputs, got_outputs = transferred(inputs, outputs)
    if name != "own Ops":
        assert_same_graph([*outputs, *inputs], [*got_outputs, *got_inputs])
    else:
        inputs, outputs, _ = GRAPHS[name]()  # one of the Ops counts its calls
        got_inputs, got_outputs = transferred(inputs, outputs)
        assert_same_graph([*outputs, *inputs], [*got_outputs, *got_inputs])
    assert bits(results(got_inputs, got_outputs, values)) == bits(expected)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_graphs_of_all_lowerings_are_the_same(stride: int) -> None:
    for case in LOWERING_CASES[::stride]:
        inputs, outputs, _ = case.build()
        got_inputs, got_outputs = transferred(inputs, outputs)
        try:
            assert_same_graph([*outputs, *inputs], [*got_outputs, *got_inputs])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@settings(max_examples=RANDOM_GRAPHS, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**31))
def test_random_graphs_compute_the_same(seed: int) -> None:
    graph = grow(seed, FORMS)
    outputs = [term.variable for term in graph.outputs]
    inputs, copies = transferred(graph.inputs, outputs)
    assert_same_graph([*outputs, *graph.inputs], [*copies, *inputs])
    with np.errstate(all="ignore"):
        try:
            expected = results(graph.inputs, outputs, graph.values)
        except Exception as error:  # some cannot be computed
            with pytest.raises(type(error)):
                results(inputs, copies, graph.values)
        else:
            assert bits(results(inputs, copies, graph.values)) == bits(expected)


def test_a_long_chain_needs_no_recursion() -> None:
    x, y = chain(500)
    with pytest.raises(RecursionError):
        pickle.dumps(y)
    x, y = chain(1200)
    (got_x,), (got_y,) = transferred([x], [y])
    assert_same_graph([y, x], [got_y, got_x])
    value = np.array([0.5, -1.0])
    assert bits(compute([got_y], {got_x: value})) == bits(compute([y], {x: value}))


def test_a_long_graph_inside_an_op_needs_no_recursion() -> None:
    x, y = chain(1200)
    z = pt.dvector("z")
    loop = pytensor.scan(_long, sequences=[pt.stack([z, z])], return_updates=False)
    inputs, outputs = [z], [loop, OpFromGraph([x], [y])(z)]
    got_inputs, got_outputs = transferred(inputs, outputs)
    assert_same_graph([*outputs, *inputs], [*got_outputs, *got_inputs])


def _long(y: Any) -> Any:
    for _ in range(1200):
        y = pt.sin(y)
    return y


def test_an_input_may_be_computed_from_others() -> None:
    x = pt.dvector("x")
    first, second = pt.split(x, [1, 2], n_splits=2)
    inputs, (got,) = transferred([x, first], [first.sum() + second.sum()])
    assert [v.owner for v in inputs] == [None, None]
    values = np.array([1.0, 2.0, 3.0]), np.array([40.0])
    assert compute([got], dict(zip(inputs, values, strict=True))) == [45]


def test_shared_variables_are_those_of_the_reader() -> None:
    w, b = pytensor.shared(1.0, name="w"), pytensor.shared(2.0, name="b")
    flat, numbers = sent([], [w * b, b])
    assert set(numbers.variables) == {w, b}
    here = {numbers(w): pytensor.shared(5.0), numbers(b): pytensor.shared(7.0)}
    _, (product, second) = decode(flat, here.__getitem__)
    assert second is here[numbers(b)]
    assert product.eval(mode=PYTHON) == 35


def test_large_constants_travel_apart_from_the_description() -> None:
    large = np.asfortranarray(np.random.default_rng(0).normal(size=(1000, 100)))
    constant = pt.constant(large)
    flat, _ = sent([], [constant * 2, constant + 1, pt.constant(np.float64(3))])
    assert [array.nbytes for array in flat.arrays] == [large.nbytes]
    assert flat.arrays[0].flags.c_contiguous
    assert len(flat.description) < 20_000
    mapped = flat.arrays[0].copy()
    mapped.flags.writeable = False
    _, (double, _, _) = decode(FlatGraph(flat.description, (mapped,)), [])
    assert any(np.shares_memory(v.data, mapped) for v in double.owner.inputs if v.type.ndim == 2)


def test_a_compiled_function_of_an_op_is_left_behind() -> None:
    inputs, outputs, _ = GRAPHS["loop"]()
    scan = next(node.op for node in toposort(outputs) if isinstance(node.op, Scan))
    with plain_python():
        assert scan.fn is not None
    assert b"executor" not in sent(inputs, outputs)[0].description
    _, copies = transferred(inputs, outputs)
    assert not any(hasattr(n.op, "_fn") for n in toposort(copies) if isinstance(n.op, Scan))
    assert scan._fn is not None


def test_another_process_computes_the_same() -> None:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=answer, args=(there,))
    process.start()
    there.close()
    try:
        for name, build in GRAPHS.items():
            inputs, outputs, values = build()
            flat, numbers = sent(inputs, outputs)
            here.send((flat, [v.get_value() for v in numbers.variables], values))
            expected = results(inputs, outputs, values)
            got = here.recv()
            assert not isinstance(got, Exception), (name, got)
            assert bits(got) == bits(expected), name
    finally:
        here.send(None)
        process.join()


def local_function(x: np.ndarray) -> np.ndarray:
    return x


def in_main(function: FunctionType, name: str, monkeypatch: pytest.MonkeyPatch) -> FunctionType:
    """Return a copy of a function as if the user's program had defined it."""
    copy = FunctionType(function.__code__, function.__globals__, name)
    copy.__module__, copy.__qualname__ = "__main__", name
    monkeypatch.setattr(sys.modules["__main__"], name, copy, raising=False)
    return copy


def refusal(op: Any) -> str:
    x = pt.dvector("x")
    with pytest.raises(InputError) as caught:
        sent([x], [op(x)])
    return str(caught.value)


def test_an_op_of_the_main_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Mine", (Applies,), {"__module__": "__main__", "__qualname__": "Mine"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", kind, raising=False)
    assert pickle.loads(pickle.dumps(kind(cubed))) == kind(cubed)  # here, not in a worker
    assert refusal(kind(cubed)) == (
        f"the Op {kind(cubed)} cannot be sent to worker processes: Mine is defined in "
        "__main__ (or locally), which they do not run: put it in a module, and import it"
    )


def test_what_an_op_holds_must_be_in_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(x: np.ndarray) -> np.ndarray:
        return x

    of_main = in_main(local_function, "of_main", monkeypatch)
    assert "of_main is defined in __main__" in refusal(Applies(of_main))
    assert "local is defined in __main__ (or locally)" in refusal(Applies(local))
    assert "<lambda> is defined in" in refusal(Applies(lambda x: x))
    message = refusal(wrap_py([pt.dvector], [pt.dvector])(of_main))
    assert message.startswith("the Op FromFunctionOp{of_main} cannot be sent")
    assert "put it in a module" in message


def test_a_local_op_inside_a_loop_is_named() -> None:
    def local(x: np.ndarray) -> np.ndarray:
        return x

    x = pt.dmatrix("x")
    y = pytensor.scan(Applies(local), sequences=[x], return_updates=False)
    with pytest.raises(InputError, match=r"the Op Applies.*local is defined in __main__"):
        sent([x], [y])


def test_an_op_that_cannot_be_pickled_is_named() -> None:
    op = Applies(cubed)
    op.lock = threading.Lock()  # type: ignore[attr-defined]
    assert refusal(op).startswith(f"the Op {op} cannot be sent to worker processes: ")
    assert "lock" in refusal(op)


def test_an_op_that_holds_its_own_result_is_refused() -> None:
    op = Applies(cubed)
    op.result = op(pt.dvector())  # type: ignore[attr-defined]
    assert "holds a variable that it computes itself" in refusal(op)


def test_a_module_that_is_absent_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = pt.dvector("x")
    flat, _ = sent([x], [Applies(cubed)(x)])
    monkeypatch.setitem(sys.modules, "tests.support.sent_graphs", None)
    with pytest.raises(InputError, match=r"Op Applies.* cannot be loaded .*sent_graphs"):
        decode(flat, [])
