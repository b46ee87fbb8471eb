"""Regions of small arrays give what the kernels do, and equal calls give equal bits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from numba.core.errors import NumbaError
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.scan.utils import until

from tandem.backend import device_mode, device_shared, regions
from tandem.errors import InputError
from tandem.ops.region import Region

MODE = device_mode("cpu", regions=True)
x, y, n = pt.dvector("x"), pt.dvector("y"), pt.lscalar("n")
m = pt.dmatrix("m")
CHAIN = pt.exp(-(x**2)) * pt.sin(y) + pt.tanh(x * y)


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def regions_of(function: Any) -> list[Region]:
    nodes = function.maker.fgraph.toposort()
    return [node.op for node in nodes if isinstance(node.op, Region)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records what Numba's code is called for, which is replaced by the Ops' own `perform`."""
    calls: list[tuple[Any, ...]] = []

    class Compiled:
        def __init__(self, graph: Any) -> None:
            copy = graph.clone()
            self._call = pytensor.function(copy.inputs, copy.outputs, mode=Mode("py", None))
            self._dtypes = [variable.type.dtype for variable in copy.inputs]

        def __call__(self, *values: Any) -> Any:
            for value, dtype in zip(values, self._dtypes, strict=True):
                if value.dtype != dtype or not value.flags.carray:
                    raise TypeError("no matching definition")
            calls.append(values)
            return self._call(*values)

    monkeypatch.setattr("tandem.backend.regions._compile", Compiled)
    return calls


def check(inputs: list[Any], outputs: list[Any], *values: np.ndarray) -> Any:
    """Compare two calls with each other, bit by bit, and with the kernels; return the function."""
    function = pytensor.function(inputs, outputs, mode=MODE)
    assert regions_of(function)
    expected = pytensor.function(inputs, outputs, mode=device_mode("cpu"))(*values)
    for one, other, reference in zip(function(*values), function(*values), expected, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, reference, rtol=1e-13)
    return function


def test_numba_computes_what_the_kernels_do() -> None:
    check([x, y], [CHAIN], rows(7), rows(7))


@pytest.mark.slow
def test_numba_computes_loops_and_their_gradients() -> None:
    weights, steps = pt.dmatrix("weights"), pt.dmatrix("steps")
    states = pytensor.scan(
        lambda step, state, weights: pt.tanh(step + state @ weights),
        sequences=[steps],
        outputs_info=[pt.zeros(4)],
        non_sequences=[weights],
        return_updates=False,
    )
    last = states[-1]
    outputs = [last, *pytensor.grad((last * x).sum(), [steps, weights])]
    check([steps, weights, x], outputs, rows(5, 4), rows(4, 4), rows(4))


def of(dtype: str, *values: float) -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.filterwarnings("ignore:Numba function argsort")
@pytest.mark.parametrize(
    ("build", "values"),
    [
        (lambda x: [pt.max(x), pt.min(x)], [of("bool", 0, 0)]),
        (lambda x, y: [pt.dot(x, y)], [of("int32", 4097), of("int32", 4097)]),
        (lambda x, y: [pt.gt(x + y, 0)], [of("int8", 100), of("int8", 100)]),
        (lambda x, y: [(x + y) // 2, pt.cumsum(x * y)], [of("uint8", 200), of("uint8", 100)]),
        (lambda x: [pt.argsort(x, kind="stable")], [np.zeros(20)]),
        (lambda x, y: [x // y], [of("float64", 1, -1, np.inf), of("float64", 0.1, np.inf, 1)]),
    ],
)
def test_what_numba_computes_otherwise_is_left_to_the_kernels(
    build: Callable[..., list[Any]], values: list[np.ndarray]
) -> None:
    inputs = [pt.vector(dtype=value.dtype.name) for value in values]
    outputs = build(*inputs)
    found = pytensor.function(inputs, outputs, mode=MODE)(*values)
    expected = pytensor.function(inputs, outputs, mode=device_mode("cpu"))(*values)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def check_extremes(output: Any, expected: Callable[[np.ndarray], Any]) -> None:
    """Compare what Numba computes of a matrix with NaN with what NumPy does."""
    compiled = regions._compile(FunctionGraph([m], [output], clone=True))
    values = rows(3, 4)
    for at in (0, slice(None), -1):
        values[at, 2] = np.nan
        np.testing.assert_array_equal(compiled(values)[0], expected(values))


def test_an_extreme_is_nan_where_an_element_is() -> None:
    check_extremes(OpFromGraph([m], [m.min(0)])(m).max(), lambda values: values.min(0).max())


@pytest.mark.slow
def test_an_extreme_in_a_loop_is_nan_where_an_element_is() -> None:
    ranges = pytensor.map(lambda row: row.max() - row.min(), m, return_updates=False)
    check_extremes(ranges, lambda values: np.ptp(values, axis=1))


def test_arrays_of_another_byte_order_are_converted(computed: list[Any]) -> None:
    function = pytensor.function([x, y], CHAIN, mode=MODE, trust_input=True)
    expected = function(rows(4), rows(4))
    np.testing.assert_array_equal(function(rows(4).astype(">f8"), rows(4)), expected)
    assert all(value.dtype.isnative for values in computed for value in values)


@pytest.mark.parametrize("trusted", [False, True])
def test_the_shapes_of_a_call_decide_and_not_what_was_before(
    computed: list[Any], trusted: bool
) -> None:
    function = pytensor.function([x, y], CHAIN, mode=MODE, trust_input=trusted)
    small, large = (rows(10), rows(10)), (rows(10**5), rows(10**5))
    used = []
    for values in (small, large, small, small, large, small):
        before = len(computed)
        function(*values)
        used.append(len(computed) > before)
    assert used == [True, False, True, True, False, True]


@pytest.mark.parametrize("trusted", [False, True])
def test_each_call_gives_what_the_mode_asks_for(computed: list[Any], trusted: bool) -> None:
    mode = device_mode("cpu", regions=True, results="device")
    function = pytensor.function([x, y], CHAIN, mode=mode, trust_input=trusted)
    assert all(isinstance(function(rows(4), rows(4)), torch.Tensor) for _ in range(3))
    assert len(computed) == 3


def test_a_graph_of_one_region_needs_no_tensors(
    computed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = pytensor.function([y, x], [x - y, CHAIN], mode=MODE, trust_input=True)
    expected = function(rows(4), rows(4) * 2)
    monkeypatch.delattr("tandem.backend.linker.tensor_over")
    monkeypatch.delattr("tandem.backend.regions.tensor_over")
    for found, value in zip(function(rows(4), rows(4) * 2), expected, strict=True):
        np.testing.assert_array_equal(found, value)
    assert len(computed) == 2


def test_each_call_is_observed(computed: list[Any]) -> None:
    seen: list[Op] = []

    def observe(node: Apply, call: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*arguments: Any) -> Any:
            seen.append(node.op)
            return call(*arguments)

        return observed

    mode = device_mode("cpu", regions=True, observe=observe)
    function = pytensor.function([x, y], CHAIN, mode=mode)
    for _ in range(3):
        function(rows(4), rows(4))
    assert seen == regions_of(function) * 3


def test_lengths_that_are_inputs_are_shapes(computed: list[Any]) -> None:
    function = pytensor.function([x, n], pt.exp(-pt.arange(n)).sum() + x.sum(), mode=MODE)
    for length, wanted in ((3, 1), (10**6, 0), (3, 1)):
        computed.clear()
        expected = np.exp(-np.arange(length)).sum() + rows(5).sum()
        assert function(rows(5), length) == pytest.approx(expected)
        assert len(computed) == wanted


def counting(limit: Any, matrix: Any) -> Any:
    """A loop whose values decide when it ends."""
    last = pytensor.scan(
        lambda total, limit: (total + 1, until(total > limit)),
        outputs_info=[pt.zeros(())],
        non_sequences=[limit],
        n_steps=500,
        return_updates=False,
    )[-1]
    return last + pt.exp(matrix).sum()


lengths, limit = pt.lvector("lengths"), pt.dscalar("limit")
UNSEEN = {
    "loop": ([limit, m], counting(limit, m), (0.0, rows(150, 150)), (400.0, rows(150, 150))),
    "vector": ([lengths], pt.exp(-pt.arange(lengths[0])).sum(), ([3],), ([10**5],)),
    "float": ([limit], pt.exp(-pt.arange(limit)).sum(), (3.0,), (1e5,)),
}  # graph, and values that mean little and much work


@pytest.mark.parametrize("kind", UNSEEN)
def test_no_call_decides_for_others_of_its_shapes(computed: list[Any], kind: str) -> None:
    inputs, output, *values = UNSEEN[kind]
    used = []
    for order in (values, values[::-1]):
        function = pytensor.function(inputs, output, mode=MODE)
        found: dict[str, list[bool]] = {}
        for given in (*order, *order):
            before = len(computed)
            function(*given)
            found.setdefault(str(given), []).append(len(computed) > before)
        used.append(found)
    assert used[0] == used[1]
    assert all(first == second for first, second in used[0].values())


def test_arrays_of_another_dtype_change_no_other_call(computed: list[Any]) -> None:
    function = pytensor.function([x, y], CHAIN, mode=MODE, trust_input=True)
    narrow = rows(5).astype("float32")
    for calls in (1, 2, 3):
        function(narrow, narrow)
        function(rows(5), rows(5))
        assert len(computed) == calls
    assert all(value.dtype == "float64" for values in computed for value in values)


def test_only_numbers_that_are_lengths_are_part_of_the_shapes(
    computed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[Any] = []

    class Counted(regions.Work):
        def __init__(self) -> None:
            super().__init__()
            counts.append(self)

    monkeypatch.setattr(regions, "Work", Counted)
    k = pt.lscalar("k")
    function = pytensor.function([x, k, n], pt.exp(pt.arange(n) * k).sum() + x[k], mode=MODE)
    function(rows(5), 0, 3)
    before = len(counts)
    for number in range(5):
        function(rows(5), number, 3)
    assert len(counts) == before
    function(rows(5), 0, 4)
    assert len(counts) > before


def test_arrays_of_any_strides_are_taken_and_none_is_written(computed: list[Any]) -> None:
    function = pytensor.function([x, y], CHAIN, mode=MODE)
    straight = rows(20)
    expected = function(straight[::-1].copy(), straight[::2].repeat(2))
    fixed = straight[::2].repeat(2)
    fixed.setflags(write=False)
    before = straight.copy()
    np.testing.assert_array_equal(function(straight[::-1], fixed), expected)
    np.testing.assert_array_equal(straight, before)
    result = function(straight, straight)
    result[...] = 0
    assert function(straight, straight).any()


def test_updates_and_shared_values_are_seen_by_the_next_call(computed: list[Any]) -> None:
    resident, plain = device_shared(rows(6), "resident"), pytensor.shared(rows(6), "plain")
    total = pt.exp(resident) * plain + x
    updates = [(resident, total * 2), (plain, total - resident)]
    function = pytensor.function([x], total.sum(), updates=updates, mode=MODE)
    values, a, b = rows(6), rows(6), rows(6)
    for _ in range(3):
        expected = np.exp(a) * b + values
        np.testing.assert_allclose(function(values), expected.sum())
        a, b = expected * 2, expected - a
        np.testing.assert_allclose(resident.get_value(), a)
        np.testing.assert_allclose(plain.get_value(), b)


def test_errors_name_the_node_of_the_user(computed: list[Any]) -> None:
    places = pt.lvector("places")
    function = pytensor.function([x, places], pt.exp(x[places]) * 2, mode=MODE)
    given = np.array([0, 1])
    function(rows(4), given)
    with pytest.raises(IndexError, match=r"computed AdvancedSubtensor1\("):
        function(rows(4), given + 9)
    function = pytensor.function([x, y], pt.exp(x) * pt.sin(y), mode=MODE)
    with pytest.raises(ValueError, match=r"computed Mul\("):
        function(rows(4), rows(5))


@pytest.mark.slow
def test_numbas_code_takes_no_other_arrays_and_ends_when_the_loop_does() -> None:
    function = pytensor.function([x], pt.exp(x) * 2 + x, mode=MODE, trust_input=True)
    expected = function(rows(4))
    for other in (rows(4).astype(">f8"), rows(8).reshape(4, 2)[:, 0], rows(4).astype("float32")):
        np.testing.assert_allclose(function(other), np.exp(other) * 2 + other, rtol=1e-6)
    np.testing.assert_array_equal(function(rows(4)), expected)

    def collatz(value: Any) -> Any:
        following = pt.switch(pt.eq(value % 2, 0), value // 2, 3 * value + 1)
        return following, until(pt.eq(following, 1))

    k = pt.lscalar("k")
    last = pytensor.scan(collatz, outputs_info=[k], n_steps=n, return_updates=False)[-1]
    assert pytensor.function([k, n], last, mode=MODE)(27, 10**11) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [
        lambda m, places: m[0][places],
        lambda m, places: m[places, places],
        lambda m, places: m[:, places],
        lambda m, places: pt.take_along_axis(m, places[:, None], 1),
        lambda m, places: pt.inc_subtensor(m[0][places], m[0, :2]),
        lambda m, places: pt.set_subtensor(m[:, places], 1.0),
        lambda m, places: pytensor.grad(pt.sum(m[places] ** 2), m),
    ],
)
def test_numba_does_not_reach_behind_an_array(of: Any) -> None:
    places, m = pt.lvector("places"), pt.dmatrix("m")
    output = pt.exp(of(m, places)) * 2
    function = pytensor.function([m, places], output, mode=MODE)
    plain = pytensor.function([m, places], output, mode="FAST_COMPILE")
    given = np.random.default_rng(3).normal(size=(2, 2))
    for inside in ([0, 1], [-1, -2]):
        found = function(given, np.array(inside))
        np.testing.assert_allclose(found, plain(given, np.array(inside)))
    assert regions_of(function)
    for wrong in (2, -3, 10**6):
        with pytest.raises(IndexError):
            function(given, np.array([0, wrong]))


@pytest.mark.slow
def test_a_mask_of_two_axes_counts_as_two() -> None:
    x, i = pt.dtensor3("x"), pt.lscalar("i")
    mask = pt.tensor("mask", dtype="bool", shape=(None, None))
    output = pt.exp(pt.set_subtensor(x[mask, i], 1.0)) * 2
    function = pytensor.function([x, mask, i], output, mode=MODE)
    plain = pytensor.function([x, mask, i], output, mode="FAST_COMPILE")
    for shape, within in (((3, 3, 2), 1), ((2, 2, 5), 4)):
        given = rows(*shape), np.eye(shape[0]) > 0
        np.testing.assert_allclose(function(*given, within), plain(*given, within))
        with pytest.raises(IndexError):
            function(*given, within + 1)


def test_convolutions_are_left_to_kernels() -> None:
    x = pt.lmatrix("x")
    output = pt.signal.convolve1d(x, np.array([[1, 1]]), mode="valid") + 1
    assert not regions_of(pytensor.function([x], output, mode=MODE))


@pytest.mark.slow
def test_integers_have_no_negative_powers() -> None:
    k, m = pt.lvector("k"), pt.lvector("m")
    function = pytensor.function([k, m], k**m + 1, mode=MODE)
    assert function(np.array([2, 3]), np.array([3, 0])).tolist() == [9, 2]
    with pytest.raises(ValueError, match="negative integer powers"):
        function(np.array([2, 3]), np.array([3, -1]))


def test_a_graph_that_numba_cannot_compile_is_computed_by_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(graph: Any) -> Any:
        raise NotImplementedError("no code for this Op")

    monkeypatch.setattr("tandem.backend.regions._compile", fail)
    function = pytensor.function([x, y], CHAIN, mode=MODE)
    plain = pytensor.function([x, y], CHAIN, mode=device_mode("cpu"))
    for _ in range(2):
        np.testing.assert_array_equal(function(rows(5), rows(5)), plain(rows(5), rows(5)))


def test_a_loop_that_indexes_is_a_region(computed: list[Any]) -> None:
    states = pytensor.scan(
        lambda i, state, x: pt.tanh(state + x[i] * x[: i + 1].sum()),
        sequences=[pt.arange(x.shape[0])],
        outputs_info=[pt.zeros(())],
        non_sequences=[x],
        return_updates=False,
    )
    function = check([x], [states[-1]], rows(6))
    assert any("Scan" in str(region) for region in regions_of(function))


def test_a_loop_and_its_gradient_are_one_region(computed: list[Any]) -> None:
    states = pytensor.scan(
        lambda row, state, m: pt.tanh(row + state @ m),
        sequences=[m],
        outputs_info=[pt.zeros(5)],
        non_sequences=[m],
        return_updates=False,
    )
    function = check([m], [pytensor.grad(states[-1].sum(), m)], rows(5, 5))
    assert len(function.maker.fgraph.apply_nodes) == 1


def test_a_loop_has_no_regions_of_its_own_where_the_mode_is_the_configuration_s() -> None:
    """Numba would compute these in object mode, which takes 40 times as long, and warn of it."""
    with pytensor.config.change_flags(mode=MODE):
        states = pytensor.scan(
            lambda b, a: pt.tanh(a * 0.5 + b), [m], [pt.zeros(5)], return_updates=False
        )
        found = pytensor.function([m], [states[-1], pytensor.grad(states[-1].sum(), m)])(rows(5, 5))
    expected = pytensor.function([m], [states[-1], pytensor.grad(states[-1].sum(), m)], mode=MODE)(
        rows(5, 5)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_numbers_of_a_region_reach_other_kernels(computed: list[Any]) -> None:
    halves = pt.vector("halves", dtype="float16")  # which no region takes
    start = pt.argmax(pt.exp(x) * pt.tanh(x))
    outputs = [halves[start:], pt.exp(x)[start:]]
    function = check([halves, x], outputs, rows(6).astype("float16"), rows(6))
    kinds = [type(node.op).__name__ for node in function.maker.fgraph.toposort()]
    assert kinds == ["Region", "ScalarFromTensor", "Subtensor", "DeepCopyOp"]  # nothing twice


def test_what_numba_refuses_when_called_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*values: Any) -> Any:
        calls.append(values)
        raise NumbaError("no such type")

    monkeypatch.setattr("tandem.backend.regions._compile", lambda graph: refuse)
    function = pytensor.function([x, y], CHAIN, mode=MODE)
    for _ in range(3):
        function(rows(5), rows(5))
    assert len(calls) == 1


def test_kernels_compute_what_has_lengths_in_a_vector(computed: list[Any]) -> None:
    inputs, output, *values = UNSEEN["vector"]
    function = pytensor.function(inputs, output, mode=MODE)
    for given in values:
        function(*given)
    assert regions_of(function)
    assert not computed


def test_convolutions_draws_and_known_large_arrays_stay_with_pytorch() -> None:
    large = pt.tensor("large", shape=(1000, 1000), dtype="float64")
    draws = pt.random.normal(size=(3,), rng=pytensor.shared(np.random.default_rng(1)))
    halves = pt.tensor("halves", shape=(None,), dtype="float16")
    inputs = [large, halves, x]
    outputs = [pt.exp(large) * 2, draws + x, halves * 2 + 1]
    outputs.append(OpFromGraph([x], [x.astype("float16").astype("float64")])(pt.exp(x)))
    kept = pytensor.function(inputs, outputs, mode=MODE, on_unused_input="ignore")
    assert not regions_of(kept)


@pytest.mark.parametrize("options", [{"compile": True}, {"precision": "bfloat16"}])
def test_it_is_refused_where_it_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="regions: found it with"):
        device_mode("cpu", regions=True, **options)
