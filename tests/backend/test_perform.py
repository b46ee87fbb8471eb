"""Ops without a kernel are computed by their own `perform`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op, _NoPythonOp

from tandem.backend import device_mode, device_shared
from tandem.backend.perform import by_perform
from tests.support.check_function import DEVICE, PYTHON, assert_same


class Host(Op):
    """An Op of a Python function, with results of the types of its operands."""

    def __init__(self, function: Callable[..., Any], **maps: Any) -> None:
        self.function = function
        self.destroy_map = maps.get("destroy_map", {})
        self.view_map = maps.get("view_map", {})

    def make_node(self, *inputs: Variable) -> Apply:
        return Apply(self, list(inputs), [x.type() for x in inputs])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: list) -> None:
        results = self.function(*inputs)
        for cell, result in zip(outputs, results, strict=True):
            cell[0] = result


def on_device(op: Op, *values: Any) -> list[np.ndarray]:
    """Apply an Op to vectors, and overwrite what it returns and takes where that is possible."""
    inputs = [pt.tensor(dtype=v.dtype, shape=v.shape) for v in values]
    results = op(*[x + 0 for x in inputs], return_list=True)
    return pytensor.function(inputs, [pt.exp(y) for y in results], mode=DEVICE)(*values)


def test_operands_are_not_copied() -> None:
    seen = []
    op = Host(lambda x: [seen.append(x.ctypes.data) or x * 2])
    x = pt.dvector("x")
    value = np.ones(3)
    np.testing.assert_array_equal(pytensor.function([x], op(x), mode=DEVICE)(value), [2, 2, 2])
    assert seen == [value.ctypes.data]


def test_results_have_the_declared_dtype() -> None:
    x = pt.fvector("x")
    result = pytensor.function([x], Host(lambda x: [[1, 2]])(x), mode=DEVICE)(np.float32([0]))
    assert_same(result, np.float32([1, 2]))


def test_a_result_that_is_an_operand_is_not_written_over() -> None:
    """Elementwise calls write over dead intermediates; here they would hit a live one."""
    x = pt.tensor("x", dtype="float64", shape=(2,))
    y = x + 1
    for maps in ({}, {"view_map": {0: [0]}}):
        z = Host(lambda y: [y], **maps)(y)
        function = pytensor.function([x], [pt.exp(z * 2), y * 3], mode=DEVICE)
        first, second = function(np.zeros(2))
        np.testing.assert_allclose(first, np.exp([2, 2]))
        np.testing.assert_array_equal(second, [3, 3])


def test_two_results_that_are_one_array_are_two() -> None:
    op = Host(lambda x, y: [x * 2] * 2)
    for result in on_device(op, np.zeros(2), np.zeros(2)):
        np.testing.assert_array_equal(result, [1, 1])


def test_a_read_only_result_is_copied() -> None:
    kept = np.broadcast_to(np.float64(1), 3)
    np.testing.assert_array_equal(on_device(Host(lambda x: [kept]), np.zeros(3))[0], np.exp(kept))
    np.testing.assert_array_equal(kept, [1, 1, 1])


def test_an_op_that_destroys_an_operand_gets_a_copy() -> None:
    def double(x: np.ndarray) -> list[np.ndarray]:
        x *= 2
        return [x]

    x = pt.dvector("x")
    y = x + 1
    z = Host(double, destroy_map={0: [0]})(y)
    first, second = pytensor.function([x], [z, y], mode=DEVICE, accept_inplace=True)(np.zeros(2))
    np.testing.assert_array_equal(first, [2, 2])
    np.testing.assert_array_equal(second, [1, 1])


def test_strict_mode_and_ops_without_perform_refuse() -> None:
    class Nothing(_NoPythonOp):
        def make_node(self, x: Variable) -> Apply:
            return Apply(self, [x], [x.type()])

    x = pt.dvector("x")
    with pytest.raises(NotImplementedError, match=r"Host.*no PyTorch lowering"):
        pytensor.function([x], Host(lambda x: [x])(x), mode=device_mode(strict=True))
    with pytest.raises(NotImplementedError, match=r"Nothing.*no PyTorch lowering"):
        pytensor.function([x], Nothing()(x), mode=DEVICE)


def test_a_copy_from_a_gpu_is_warned_of() -> None:
    node = Host(lambda x: [x])(pt.dvector("x")).owner
    with pytest.warns(UserWarning, match=r"Host.*has no kernel.*cuda:0.*the reason"):
        by_perform(node, torch.device("cuda", 0), NotImplementedError("the reason"))


def test_an_error_names_the_node() -> None:
    x = pt.dmatrix("x")
    function = pytensor.function([x], pt.linalg.expm(x), mode=DEVICE)
    with pytest.raises(ValueError, match="square") as error:
        function(np.ones((2, 3)))
    assert any("Expm" in note for note in error.value.__notes__)


def test_a_runtime_error_of_an_op_stays_one() -> None:
    """One of PyTorch's is a ValueError of NumPy's."""

    def fail(x: np.ndarray) -> list[np.ndarray]:
        raise RuntimeError("no value")

    x = pt.dvector("x")
    with pytest.raises(RuntimeError, match="no value"):
        pytensor.function([x], Host(fail)(x), mode=DEVICE)(np.ones(2))


@pytest.mark.slow
def test_the_compiler_breaks_the_function_there() -> None:
    """It would compute an Op by PyTorch's rules, which refuse to divide integers by 0."""
    x = pt.tensor("x", dtype="float64", shape=(3,))
    n = pt.tensor("n", dtype="int64", shape=(3,))
    y = Host(lambda x: [np.sort(x)])(x * 2) + 1
    quotient = Host(lambda n: [n // 0])(n)
    function = pytensor.function([x, n], [y, n**n, quotient], mode=device_mode(compile=True))
    assert function.vm.program.breaks
    with np.errstate(divide="ignore"):
        ordered, powers, zeros = function(np.array([3.0, 1, 2]), np.array([0, 1, 2]))
    np.testing.assert_array_equal(ordered, [3, 5, 7])
    np.testing.assert_array_equal(powers, [1, 1, 4])
    np.testing.assert_array_equal(zeros, [0, 0, 0])
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match="negative integer powers"):
        function(np.zeros(3), np.array([1, 2, -1]))


@pytest.mark.slow
def test_numbers_behind_such_breaks_are_updated_in_place() -> None:
    """Sums that grow from call to call, and a number that is read where it is written."""
    totals = [device_shared(np.zeros((), dtype)) for dtype in ("float64", "float32", "int64")]
    x = pt.tensor("x", dtype="float64", shape=(3,))
    y = x
    for _ in range(3):
        y = Host(lambda x: [np.sort(x)])(y * 2) + totals[0]
    updates = [(total, total + y.sum().astype(total.dtype)) for total in totals]
    step = pytensor.function([x], [], updates=updates, mode=device_mode(compile=True))
    assert step.vm.program.breaks
    expected = 0.0
    for _ in range(3):
        value = np.array([3.0, 1, 2])
        for _ in range(3):
            value = 2 * value + expected
        expected += float(value.sum())
        step(np.array([3.0, 1, 2]))
        assert [float(total.get_value()) for total in totals] == [expected] * 3


def draws(mode: Mode) -> list[np.ndarray]:
    """The numbers of two calls of a function with two random variables and an update."""
    rng = pytensor.shared(np.random.default_rng(3))
    next_rng, normal = pt.random.normal(0, 1, size=(2,), rng=rng, return_next_rng=True)
    last_rng, integer = pt.random.integers(0, 100, size=(3,), rng=next_rng, return_next_rng=True)
    function = pytensor.function([], [normal, integer], updates={rng: last_rng}, mode=mode)
    return [*function(), *function()]


def test_random_variables_give_pytensors_numbers() -> None:
    for got, expected in zip(draws(DEVICE), draws(PYTHON), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_generator_as_a_result_is_a_copy() -> None:
    rng = pytensor.shared(np.random.default_rng(3))
    function = pytensor.function([], rng, mode=DEVICE)
    first = function().random()
    assert function().random() == first == np.random.default_rng(3).random()


def test_sparse_values_pass_as_they_are() -> None:
    import pytensor.sparse as ps
    import scipy.sparse

    x, y = ps.csr_matrix("x", dtype="float64"), pt.dmatrix("y")
    matrix = scipy.sparse.csr_matrix(np.diag([1.0, 2, 0]))
    function = pytensor.function([x, y], [ps.structured_dot(x, y * 2), x, x.T], mode=DEVICE)
    product, same, transposed = function(matrix, np.ones((3, 2)))
    np.testing.assert_array_equal(product, [[2, 2], [4, 4], [0, 0]])
    for one in (same, transposed):
        np.testing.assert_array_equal(one.toarray(), matrix.toarray())
