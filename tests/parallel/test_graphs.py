"""Graphs without givens and with sliced variables compute what PyTensor computes."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.ifelse import ifelse

from tandem.backend import device_shared
from tandem.parallel.graphs import (
    check_no_generators,
    depends_on,
    replace_sliceables,
    resolve,
    shared_inputs,
)
from tests.support.check_function import PYTHON, compile_graph
from tests.support.random_graphs import compute
from tests.support.sent_graphs import chain

VALUE = np.array([0.5, -1.0])


def vector(name: str, default_update: Callable[[Any], Any] | None = None) -> SharedVariable:
    """A shared variable; each name has another value."""
    variable = pytensor.shared(np.array([1.5, 2.0]) + sum(map(ord, name)), name=name)
    if default_update is not None:
        with pytest.deprecated_call():
            variable.default_update = default_update(variable)
    return variable


def behaviour(function: Any, shared: Sequence[SharedVariable]) -> list[np.ndarray]:
    """Return results and shared values of two calls; the values are then what they were."""
    before = [v.get_value() for v in shared]
    seen: list[np.ndarray] = []
    for call in range(2):
        seen += [*function(VALUE + call, VALUE * 2), *(v.get_value() for v in shared)]
    for variable, value in zip(shared, before, strict=True):
        variable.set_value(value)
    return seen


def assert_as_pytensor(
    inputs: list[Variable], outputs: list[Variable], shared: list[SharedVariable], **keywords: Any
) -> None:
    """Compare a resolved function with PyTensor's of the same arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of no_default_updates
        expected = behaviour(compile_graph(inputs, outputs, PYTHON, **keywords), shared)
    resolved = resolve(inputs, outputs, **keywords)
    bare = {v: pytensor.shared(v.get_value(), name=v.name) for v in shared}
    # Of these variables none has a default update.
    results = replace_sliceables([*resolved.outputs, *resolved.updates.values()], bare)
    count = len(outputs)
    updates = dict(zip((bare[v] for v in resolved.updates), results[count:], strict=True))
    got = behaviour(
        compile_graph(inputs, results[:count], PYTHON, updates=updates), list(bare.values())
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("pairs", [list, dict])
def test_givens_are_applied(pairs: Callable[[Any], Any]) -> None:
    x, y, a, b = pt.dvectors("x", "y", "a", "b")
    s, t = vector("s"), vector("t")
    middle = pt.tanh(a) + s
    out = middle * b + a
    assert_as_pytensor(
        [x, y], [out, middle, s * 1], [s, t],
        givens=pairs([(a, x * 2), (middle, a + y), (b, t + a), (s, y - 1)]),
        updates=pairs([(t, out + t), (s, a)]),
    )  # fmt: skip


def test_a_given_may_be_a_plain_value() -> None:
    x, y, a = pt.dvectors("x", "y", "a")
    assert_as_pytensor([x, y], [a * x + y], [], givens={a: np.array([3.0, 4.0])})


def test_what_is_not_replaced_stays_the_same_variable() -> None:
    x, a = pt.dvectors("x", "a")
    kept, changed = pt.exp(x), a + 1
    changed.name = "changed"
    resolved = resolve([x], [kept, kept * changed, changed], givens={a: x})
    assert resolved.outputs[0] is kept
    assert resolved.outputs[1].owner.inputs == [kept, resolved.outputs[2]]
    assert resolved.outputs[2].name == "changed"


DEFAULTS: list[dict[str, Any]] = [
    {},
    {"no_default_updates": True},
    {"no_default_updates": ["count"]},
    {"updates": ["count"]},
    {"givens": True},
]


@pytest.mark.parametrize("keywords", DEFAULTS, ids=str)
def test_default_updates_are_added(keywords: dict[str, Any]) -> None:
    x, y, a = pt.dvectors("x", "y", "a")
    step = vector("step", lambda v: v * 2)  # found in the update of another
    count = vector("count", lambda v: v + step)
    unused = vector("unused", lambda v: v - 1)
    arguments = dict(keywords)
    if isinstance(keywords.get("no_default_updates"), list):
        arguments["no_default_updates"] = [count]
    if "updates" in keywords:
        arguments["updates"] = {count: count * x}
    if "givens" in keywords:
        arguments["givens"] = {a: unused + 1}  # used by no output
    assert_as_pytensor([x, y], [count + x], [step, count, unused], **arguments)


def test_a_default_update_is_of_replaced_variables_too() -> None:
    x, y, a = pt.dvectors("x", "y", "a")
    s = vector("s", lambda v: v + a)
    assert_as_pytensor([x, y], [s * 2], [s], givens={a: x + y})


def test_a_replaced_variable_has_no_default_update() -> None:
    x, y = pt.dvectors("x", "y")
    s = vector("s", lambda v: v + 1)
    assert_as_pytensor([x, y], [s * 2], [s], givens={s: x})
    assert resolve([x], [s * 2], givens={s: x}).updates == {}


def test_an_input_that_is_computed_from_others_stays_an_input() -> None:
    x, a = pt.dvectors("x", "a")
    y = a + 1
    assert_as_pytensor([x, y], [y * 2 + a], [], givens={a: x})


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Any, ...]:
    """Random outputs, updates and givens over a few vectors."""
    inputs = [pt.dvector("x"), pt.dvector("y")]
    shared = [vector(name) for name in "st"]
    free = [pt.dvector(name) for name in "ab"]
    terms: list[Any] = [*inputs, *shared, *free]
    pick = lambda: draw(st.sampled_from(terms))  # noqa: E731
    for _ in range(draw(st.integers(1, 6))):
        op = draw(st.sampled_from([pt.add, pt.mul, pt.maximum]))
        terms.append(op(pick(), pick()))
    outputs = [pick() for _ in range(draw(st.integers(1, 3)))]
    updates = [(v, pick()) for v in shared if draw(st.booleans())]
    targets = draw(st.lists(st.sampled_from(terms[2:]), max_size=3))
    # The free variables are computed from inputs, so that most functions can be compiled.
    givens = [(v, inputs[0] * (n + 2)) for n, v in enumerate(free)]
    return inputs, outputs, shared, updates, givens + [(v, pick()) for v in targets]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(arguments())
def test_random_arguments_mean_the_same(drawn: tuple[Any, ...]) -> None:
    inputs, outputs, shared, updates, givens = drawn
    try:
        compile_graph(inputs, outputs, PYTHON, updates=updates, givens=givens)
    except AssertionError:  # PyTensor's, for givens that replace each other
        with pytest.raises(ValueError, match="earlier replacement uses it"):
            resolve(inputs, outputs, updates, givens)
    else:
        assert_as_pytensor(inputs, outputs, shared, updates=updates, givens=givens)


def test_arguments_that_cannot_be_resolved_are_refused() -> None:
    x, a, b = pt.dvectors("x", "a", "b")
    s = vector("s")
    with pytest.raises(ValueError, match="x is an input"):
        resolve([x], [a], givens={x: a})
    with pytest.raises(ValueError, match="b is replaced, and an earlier replacement uses it"):
        resolve([x], [a], givens=[(a, b + 1), (b, x)])
    with pytest.raises(TypeError, match="not a variable"):
        resolve([x], [x], givens=[("a", x)])
    with pytest.raises(TypeError, match="x is not a shared variable"):
        resolve([x], [x], updates=[(x, a)])
    with pytest.raises(ValueError, match="s is updated twice"):
        resolve([x], [x], updates=[(s, x), (s, s + 1)])
    with pytest.raises(TypeError, match=r"updates: s is .*, its update: Cannot convert"):
        resolve([x], [x], updates={s: pt.dmatrix()})
    with pytest.raises(TypeError):
        resolve([x], [a + 1], givens={a: pt.dmatrix("m")})


def test_nothing_recurses_with_the_length_of_a_graph() -> None:
    x, y = chain(1200)
    s, z = vector("s"), pt.dvector("z")
    resolved = resolve([z], [y], updates={s: y + s}, givens={x: s})
    assert depends_on([y], [x]) == {y}
    assert shared_inputs(resolved.outputs) == [s]
    (got,) = replace_sliceables(resolved.outputs, {s: s[:1]})
    (expected,) = compute([y], {x: s.get_value()[:1]})
    np.testing.assert_array_equal(compute([got], {s: s.get_value()}), [expected])


def test_what_depends_on_an_input_is_found() -> None:
    x, y = pt.dvectors("x", "y")
    s = vector("s")
    first, by_length, second, neither = x + s, pt.ones(x.shape[0]), y * 2, s * 2
    every = [first, by_length, second, neither, x]
    assert depends_on(every, [x]) == {first, by_length, x}
    assert depends_on(every, [x, y]) == {first, by_length, second, x}
    assert depends_on(every, []) == set()
    assert depends_on([pt.exp(neither)], [s])


def test_shared_inputs_are_listed_in_the_same_order_each_time() -> None:
    def build() -> list[str | None]:
        a, b, c, d = (vector(name) for name in "abcd")
        x = pt.dvector("x")
        op = OpFromGraph([x], [x * c])
        loop = pytensor.scan(lambda u: u + d, sequences=[a], return_updates=False)
        return [v.name for v in shared_inputs([op(b) + a, loop, b * a])]

    first = build()
    assert sorted(map(str, first)) == ["a", "b", "c", "d"]
    assert all(build() == first for _ in range(5))


def test_random_generators_are_refused() -> None:
    generator = pt.random.shared_rng(seed=1, name="noise")
    _, drawn = generator.normal(size=(3,))
    with pytest.raises(ValueError, match=r"noise is a random generator.*Training\(seed, epoch"):
        check_no_generators(shared_inputs([drawn + vector("s")]))
    rows = pt.dmatrix("rows")
    noise = pt.random.normal(size=(rows.shape[0],), rng=pt.random.default_rng(1))
    with pytest.raises(ValueError, match="a variable is a random generator"):
        check_no_generators([2 * noise], [rows])
    same_for_all = pt.random.normal(size=(3, 2), rng=pt.random.default_rng(1))
    check_no_generators([rows @ same_for_all], [rows])
    check_no_generators([vector("s"), device_shared(VALUE)])


W = pt.dvector("w")


def _over_rows(rows: Any) -> Any:
    """A recurrent network over rows, which also reads all of them in each step."""
    return pytensor.scan(
        lambda row, before, every: pt.tanh(row * W + before) + every.sum(axis=0) / 9,
        sequences=[rows], outputs_info=[pt.zeros(2)], non_sequences=[rows], return_updates=False,
    )  # fmt: skip


def _nested(rows: Any) -> Any:
    return pytensor.scan(
        lambda row, every: _over_rows(every * row)[-1], sequences=[rows], non_sequences=[rows],
        return_updates=False,
    )  # fmt: skip


def _in_an_op(rows: Any) -> Any:
    matrix = rows.type()
    return OpFromGraph([matrix, W], [pt.tanh(matrix * W).sum(axis=0)])(rows, W)


OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda m: m,
    "mean": lambda m: m.mean(),
    "normalised": lambda m: (m - m.mean(axis=0)) / m.std(axis=0),
    "softmax": lambda m: pt.special.softmax(m, axis=0),
    "log-softmax of targets": lambda m: pt.special.log_softmax(m)[pt.arange(m.shape[0]), 0],
    "product": lambda m: m.T @ m + pt.dot(m, W).sum(),
    "gradient": lambda m: pytensor.grad((pt.tanh(m) ** 2).mean(), m),
    "reshaped": lambda m: m.reshape((-1,)) * pt.ones_like(m).reshape((m.shape[0] * 2,)),
    "joined": lambda m: pt.concatenate([m, m[::-1]]),
    "lengths": lambda m: pt.alloc(1.0, *m.shape) + pt.arange(m.shape[0])[:, None],
    "branches": lambda m: ifelse(W[0] > 0, m, m * 2),
    "sorted": lambda m: pt.sort(m, axis=0) + pt.cumsum(m, axis=0),
    "loop over rows": _over_rows,
    "loop from rows": lambda m: pytensor.scan(
        lambda state: state * 1.5, outputs_info=[m], n_steps=3, return_updates=False
    ),
    "loops in a loop": _nested,
    "gradient of a loop": lambda m: pytensor.grad((_over_rows(m) ** 2).mean(), W),
    "gradient of loops": lambda m: pytensor.grad((_nested(m) ** 2).mean(), W),
    "graph in an Op": _in_an_op,
    "gradient of it": lambda m: pytensor.grad(_in_an_op(m).sum(), W),
}


LONG = {"gradient of loops", "gradient of a loop", "loops in a loop", "gradient of it"}


@pytest.mark.parametrize(
    "make",
    [device_shared, pytest.param(pytensor.shared, marks=pytest.mark.slow)],
    ids=["resident", "plain"],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in OF_ROWS],
)
def test_a_sliced_variable_is_replaced_everywhere(name: str, make: Callable[..., Any]) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 2))
    m = make(rows, name="m")
    m = pytensor.shared(rows, name="m") if make is pytensor.shared else m
    start, stop = pt.lscalars("start", "stop")
    (got,) = replace_sliceables([OF_ROWS[name](m)], {m: m[start:stop]})
    function = compile_graph([start, stop, W], [got], PYTHON)
    for part in (slice(1, 4), slice(0, 6)):
        expected = compile_graph([W], [OF_ROWS[name](pytensor.shared(rows[part]))], PYTHON)
        values = np.array([0.1, -0.2])
        np.testing.assert_array_equal(function(part.start, part.stop, values), expected(values))


def test_only_values_of_a_sliced_variable_change() -> None:
    s, t = vector("s"), vector("t")
    apart = pt.exp(t)
    new, same, _ = replace_sliceables([s.sum() + t, apart, apart * s.sum()], {s: s[:1]})
    assert same is apart
    function = compile_graph([], [new], PYTHON, updates={s: new})
    first = s.get_value()[0] + t.get_value()
    np.testing.assert_array_equal(function()[0], first)
    np.testing.assert_array_equal(s.get_value(), first)
    np.testing.assert_array_equal(function()[0], first[0] + t.get_value())


def test_a_specified_length_that_slicing_changes_is_kept_if_the_user_specified_it() -> None:
    s = pytensor.shared(np.arange(6.0), name="s")
    n = pt.lscalar("n")
    (got,) = replace_sliceables([pt.specify_shape(s, (6,)) * 2], {s: s[:n]})
    function = compile_graph([n], [got], PYTHON)
    np.testing.assert_array_equal(function(6)[0], np.arange(6.0) * 2)
    with pytest.raises(AssertionError, match="SpecifyShape"):
        function(4)


def test_a_replacement_of_another_type_is_refused() -> None:
    s = vector("s")
    with pytest.raises(TypeError, match=r"s is .* its replacement is"):
        replace_sliceables([s * 2], {s: s[0]})
    with pytest.raises(TypeError, match=r"s is .* its replacement is"):
        replace_sliceables([s * 2], {s: pt.cast(s, "float32")})
