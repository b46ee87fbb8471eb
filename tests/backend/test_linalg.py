"""Errors, failed matrices and leading axes of linear algebra and selection on a device."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
import torch
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import Choose, PermuteRowElements
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.extra_ops import FillDiagonal, SearchsortedOp
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.decomposition.eigen import Eigh
from pytensor.tensor.linalg.decomposition.lu import LU, LUFactor
from pytensor.tensor.linalg.decomposition.qr import QR
from pytensor.tensor.linalg.inverse import MatrixInverse
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.linalg.summary import Det

from tandem.backend import device_mode, device_shared, product_loops
from tandem.backend.lowering import linalg, lower
from tandem.backend.lowering.blockwise import core_lowering
from tandem.backend.product_loops import multiply, multiply_panels, to_panels
from tandem.backend.vectors import COLUMNS
from tests.support.check_function import DEVICE, PLAIN_DEVICE, PYTHON
from tests.support.linalg_cases import LINALG_CASES
from tests.support.op_checks import symbols
from tests.support.selection_cases import GPU_CASES

STRICT = device_mode(strict=True)

NAN, ONES, WIDE = np.full((3, 3), np.nan), np.ones((3, 3)), np.ones((2, 3))
ERRORS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], type[Exception]]] = {
    "singular inverse": (pt.linalg.inv, (ONES,), np.linalg.LinAlgError),
    "one of many singular": (pt.linalg.inv, (np.stack([ONES, ONES]),), np.linalg.LinAlgError),
    "svd of nan": (pt.linalg.svd, (NAN,), np.linalg.LinAlgError),
    "pinv of nan": (pt.linalg.pinv, (NAN,), np.linalg.LinAlgError),
    "eig of nan": (pt.linalg.eig, (NAN,), np.linalg.LinAlgError),
    "eigh of nan": (pt.linalg.eigh, (NAN,), ValueError),
    "eigvalsh of infinity": (pt.linalg.eigvalsh, (ONES * np.inf,), ValueError),
    "lu of nan": (LU(), (NAN,), ValueError),
    "wide inverse": (pt.linalg.inv, (WIDE,), np.linalg.LinAlgError),
    "wide determinant": (Det(), (WIDE,), ValueError),
    "wide exponential": (pt.linalg.expm, (WIDE,), np.linalg.LinAlgError),
    "wide cholesky": (Cholesky(), (WIDE,), ValueError),
    "wide system": (Solve(b_ndim=2), (WIDE, WIDE), ValueError),
    "wide triangle": (SolveTriangular(b_ndim=1), (WIDE, WIDE[0]), ValueError),
    "system of two sizes": (Solve(b_ndim=2), (ONES, WIDE), ValueError),
    "factor of another size": (CholeskySolve(b_ndim=2), (ONES, WIDE), ValueError),
    "negative radius": (pt.complex_from_polar, (-ONES, ONES), ValueError),
    "choice": (Choose("raise"), (np.array([0, 2]), ONES[:2]), ValueError),
    "negative choice": (Choose("raise"), (np.array([0, -1]), ONES[:2]), ValueError),
    "position": (PermuteRowElements(False), (ONES, np.array([0, 1, 3])), IndexError),
    "sorter": (SearchsortedOp(), (ONES[0], ONES[0], np.array([0, 1])), ValueError),
    "diagonal of unequal axes": (FillDiagonal(), (np.ones((2, 3, 2)), np.array(1.0)), ValueError),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_perform(name: str) -> None:
    build, values, error = ERRORS[name]
    inputs = symbols(values, static=False)
    for mode in (PYTHON, STRICT):
        function = pytensor.function(inputs, build(*inputs), mode=mode)
        with pytest.raises(error) as caught:
            function(*values)
        assert isinstance(caught.value, error)


def test_matrices_that_fail_become_nan_alone() -> None:
    good, bad = 3 * np.eye(2), np.array([[1.0, 2], [2, 1]])
    x, b = pt.dtensor3("x"), pt.dmatrix("b")
    outputs = [
        pt.linalg.cholesky(x),
        pt.linalg.solve(x, b, assume_a="pos", b_ndim=2),
        pt.linalg.solve(x - 1, b, b_ndim=2),
        pt.linalg.solve_triangular(x - 1, b, b_ndim=2),
        Blockwise(LUFactor())(x - 1)[0],
    ]
    function = pytensor.function([x, b], outputs, mode=STRICT)
    factor, positive, general, triangular, lu = function(np.stack([good, bad]), np.ones((2, 3)))
    for result in (factor, positive):
        assert np.isfinite(result[0]).all()
        assert np.isnan(result[1]).all()
    # x - 1 is regular but for the second matrix, which is [[0, 1], [1, 0]], a triangle of zeros.
    assert np.isfinite(general).all()
    assert np.isfinite(lu).all()
    assert np.isnan(triangular[1]).all()
    singular = Solve(b_ndim=1)(x[0], b[0])
    value = pytensor.function([x, b], singular, mode=STRICT)(np.ones((1, 2, 2)), np.ones((1, 2)))
    np.testing.assert_array_equal(value, [np.nan, np.nan])


def test_only_lengths_that_are_1_by_type_are_repeated() -> None:
    a, b = pt.dtensor3("a"), pt.dtensor3("b")
    solve = Blockwise(Solve(b_ndim=2))
    function = pytensor.function([a, b], solve(a, b), mode=STRICT)
    with pytest.raises(ValueError, match="Runtime broadcasting not allowed"):
        function(np.eye(2)[None], np.ones((3, 2, 2)))
    with pytest.raises(ValueError, match="lengths"):
        function(np.stack([np.eye(2)] * 2), np.ones((3, 2, 2)))
    function = pytensor.function([a, b], solve(a[0], b), mode=STRICT)
    np.testing.assert_array_equal(function(np.eye(2)[None], np.ones((3, 2, 2))), np.ones((3, 2, 2)))


def test_ops_made_from_graphs_compute_many_at_once() -> None:
    x, y = pt.dtensor4("x"), pt.dmatrix("y")
    kron = pt.vectorize(pt.linalg.kron, "(a,b),(c,d)->(e,f)")(x, y)
    lyapunov = pt.linalg.solve_continuous_lyapunov(x, pt.eye(3))
    values = np.random.default_rng(0).normal(size=(2, 2, 3, 3)), np.arange(4.0).reshape(2, 2)
    function = pytensor.function([x, y], [kron, lyapunov], mode=DEVICE)
    products, solutions = function(*values)
    for place in np.ndindex(2, 2):
        a, q = values[0][place], solutions[place]
        np.testing.assert_array_equal(products[place], np.kron(a, values[1]))
        np.testing.assert_allclose(a @ q + q @ a.T, np.eye(3), atol=1e-10)
    pytensor.function([x, y], kron, mode=STRICT)


@pytest.mark.parametrize("core", [Cholesky(), LU(), QR(), MatrixInverse(), LUFactor()], ids=str)
def test_no_matrices_give_no_results(core: Any) -> None:
    x = pt.dtensor4("x")
    outputs = Blockwise(core)(x, return_list=True)
    results = pytensor.function([x], outputs, mode=STRICT)(np.ones((2, 0, 3, 3)))
    for output, result in zip(outputs, results, strict=True):
        assert result.shape[:2] == (2, 0)
        assert result.ndim == output.type.ndim
        assert result.dtype == output.type.dtype


def test_every_kernel_of_core_ops_has_a_batched_case() -> None:
    outputs = [case.build()[1] for case in (*LINALG_CASES, *GPU_CASES)]
    seen = [v.owner.op.core_op for vs in outputs for v in _ancestors(vs)]
    missing = [
        op.__name__
        for op in core_lowering.registry
        if op is not object and not any(isinstance(core, op) for core in seen)
    ]
    assert not missing
    assert set(core_lowering.registry) <= set(lower.registry)


def _ancestors(outputs: list[Any]) -> list[Any]:
    """The results of a Blockwise with leading axes, among those that the outputs need."""
    return [
        v
        for v in ancestors(outputs)
        if v.owner is not None
        and isinstance(v.owner.op, Blockwise)
        and v.owner.op.batch_ndim(v.owner) > 0
    ]


def test_the_conjugate_of_real_numbers_is_a_copy() -> None:
    x = pt.dvector("x")
    value = np.ones(3)
    result = pytensor.function([x], Elemwise(ps.conj)(x), mode=PLAIN_DEVICE)(value)
    assert not np.shares_memory(result, value)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Replaces PyTorch's operator for a product by oneDNN."""

    def replace(by: Callable[..., Any]) -> None:
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", by)
        linalg._onednn.cache_clear()

    yield replace
    monkeypatch.undo()
    linalg._onednn.cache_clear()


def product(x: np.ndarray, y: np.ndarray, precision: Any = "float32") -> np.ndarray:
    a, b = (pt.tensor(dtype=v.dtype.name, shape=(None, None)) for v in (x, y))
    mode = device_mode(precision=precision)
    found: np.ndarray = pytensor.function([a, b], a @ b, mode=mode)(x, y)
    return found


def strided(rows: int, columns: int, layout: str) -> np.ndarray:
    rng = np.random.default_rng(rows)
    if layout == "transposed":
        return rng.normal(size=(columns, rows)).astype("float32").T
    if layout == "rows of a transposed matrix":
        return rng.normal(size=(columns, 2 * rows)).astype("float32").T[:rows]
    if layout == "every other column":
        return rng.normal(size=(rows, 2 * columns)).astype("float32")[:, ::2]
    return rng.normal(size=(rows, columns)).astype("float32")


STRIDES = ["whole", "transposed", "rows of a transposed matrix", "every other column"]


@pytest.mark.parametrize("of_x", STRIDES)
@pytest.mark.parametrize("of_y", STRIDES)
@pytest.mark.parametrize("sizes", [(64, 300, 260), (1, 2100, 2000), (3, 5, 2), (5, 1701, 530)])
def test_a_product_of_any_layouts(
    sizes: tuple[int, int, int], of_x: str, of_y: str, operator: Callable[[Any], None]
) -> None:
    """oneDNN gets those it is fast with: the whole first factor, the second or its transpose."""
    layouts = []
    linear = torch.ops.mkldnn._linear_pointwise

    def recorded(x: Any, y: Any, *rest: Any) -> Any:
        layouts.append((x.is_contiguous(), y.is_contiguous() or y.t().is_contiguous()))
        return linear(x, y, *rest)

    operator(recorded)
    m, k, n = sizes
    x, y = strided(m, k, of_x), strided(k, n, of_y)
    got = product(x, y)
    exact = x.astype("float64") @ y.astype("float64")
    np.testing.assert_allclose(got, exact, 1e-4, 1e-6 * k)
    calls = layouts[1:]  # the first is a trial
    by_onednn = m == 64 or (m == 5 and of_y != "whole")
    assert calls == ([(True, True)] if by_onednn else [])


@pytest.mark.parametrize("of_y", STRIDES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_product_with_a_constant(
    precision: Any, of_y: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is brought into the order of the loop for few rows and of oneDNN for many, once each."""
    calls: list[str] = []

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a: calls.append(name) or original(*a))

    panels, reordered = "to_panels", "_reorder_linear_weight"
    count(product_loops, panels)
    count(torch.ops.mkldnn, reordered)
    y = strided(1701, 530, of_y)
    a = pt.fmatrix("a")
    function = pytensor.function([a], a @ pt.constant(y), mode=device_mode(precision=precision))
    rtol, atol = (1e-4, 1e-3) if precision == "float32" else (0.1, 2)
    single = precision == "float32"
    for rows, orders in ((3, []), (5, [panels]), (0, [panels]), (16, [panels]), (1, [panels]),
                         (80, [panels, reordered]), (17, [panels, reordered]),
                         (4, [panels, reordered])):  # fmt: skip
        x = strided(rows, 1701, "whole")
        np.testing.assert_allclose(function(x), x.astype("float64") @ y, rtol, atol)
        assert calls == (orders if single else []), rows


@pytest.mark.parametrize("of_y", STRIDES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("amd", [False, True])
def test_one_row_takes_several_threads(
    amd: bool, threads: int, of_y: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL's product of one row does so but on AMD's processors."""
    calls = []
    monkeypatch.setattr(linalg, "_is_slow_for_few_columns", lambda: amd)
    monkeypatch.setattr(product_loops, "multiply", lambda *a: calls.append(a) or multiply(*a))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, y = strided(1, 2100, "whole"), strided(2100, 2000, of_y)
    np.testing.assert_allclose(product(x, y), x.astype("float64") @ y, 1e-4, 2e-3)
    assert len(calls) == (amd and threads > 1 and of_y == "whole")


@pytest.mark.parametrize("inner", [0, 7, 8, 1701])
def test_a_product_of_few_rows_has_the_same_bits_with_any_number_of_threads(inner: int) -> None:
    x, y = (torch.from_numpy(strided(*shape, "whole")) for shape in ((3, inner), (inner, 531)))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(multiply(x, y))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found[0].double(), x.double() @ y.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(*found)
    with pytest.raises(ValueError, match=f"found {inner} columns and 1 rows"):
        multiply(x, y[:1] if inner else torch.zeros(1, 531))


@pytest.mark.parametrize(("rows", "inner", "columns"), [(0, 3, 5), (1, 0, 40), (7, 513, 70)])
def test_a_product_with_panels(rows: int, inner: int, columns: int) -> None:
    x, y = (strided(*shape, "whole") for shape in ((rows, inner), (inner, columns)))
    panels = to_panels(torch.from_numpy(y))
    assert panels.shape == (-(-columns // COLUMNS), inner, COLUMNS)
    found = multiply_panels(torch.from_numpy(x), panels, columns)
    np.testing.assert_allclose(found, x.astype("float64") @ y, 1e-5, 1e-4)
    with pytest.raises(ValueError, match=f"found 1 columns and {inner} rows"):
        multiply_panels(torch.zeros(2, 1), panels, columns)


def refuses(*arguments: Any) -> Any:
    raise RuntimeError("other arguments are expected")


@pytest.mark.parametrize("changed", [refuses, lambda x, y, *rest: x.new_zeros((2, 2))])
def test_without_the_operator_the_product_is_the_ordinary_one(
    changed: Any, operator: Callable[[Any], None]
) -> None:
    operator(changed)
    x, y = strided(64, 300, "whole"), strided(300, 260, "whole")
    got = product(x, y)
    assert linalg._onednn() is None
    np.testing.assert_array_equal(got, torch.mm(torch.from_numpy(x), torch.from_numpy(y)))


def test_bfloat16_is_left_to_pytorch(operator: Callable[[Any], None]) -> None:
    calls = []
    linear = torch.ops.mkldnn._linear_pointwise
    operator(lambda *arguments: calls.append(arguments) or linear(*arguments))
    x, y = strided(64, 300, "whole"), strided(300, 260, "whole")
    got = product(x, y, precision="bfloat16")
    np.testing.assert_allclose(got, x @ y, 0.1, 1)
    assert len(calls) == 1  # the trial


def test_a_product_that_is_stored_at_once_is_not_copied(operator: Callable[[Any], None]) -> None:
    calls = []
    linear = torch.ops.mkldnn._linear_pointwise
    operator(lambda *arguments: calls.append(arguments) or linear(*arguments))
    x, y = strided(64, 300, "whole"), strided(300, 260, "whole")
    stored = device_shared(np.zeros((64, 260), "float32"), "stored")
    a, b = (pt.tensor(dtype="float32", shape=v.shape) for v in (x, y))
    function = pytensor.function([a, b], [], updates=[(stored, a @ b)], mode=DEVICE)
    function(x, y)
    np.testing.assert_allclose(stored.get_value(), x @ y, 1e-4, 1e-3)
    assert len(calls) <= 1


@pytest.mark.parametrize("mode", [DEVICE, PLAIN_DEVICE], ids=["kernels", "perform"])
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_complex_eigenvectors_that_are_declared_as_real_stay_complex(mode: Any, pair: bool) -> None:
    """PyTensor's Eigh declares the dtype of the values for the vectors too."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 4)) + 1j * rng.normal(size=(4, 4))
    a, b = x + x.conj().T, x @ x.conj().T + 4 * np.eye(4)
    variables = [pt.zmatrix(), pt.zmatrix()][: 1 + pair]
    values, vectors = pytensor.function(variables, list(Eigh()(*variables)), mode=mode)(
        *(a, b)[: 1 + pair]
    )
    assert vectors.dtype == np.complex128
    right = b @ vectors if pair else vectors
    np.testing.assert_allclose(a @ vectors, right * values, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("of_x", ["whole", "transposed"])
@pytest.mark.parametrize("columns", [1, 2, 10, 12, 13])
def test_a_product_of_few_columns_is_that_of_the_transposes(
    columns: int, of_x: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linalg, "_is_slow_for_few_columns", lambda: True)
    a, b = strided(70, 300, of_x).astype(dtype), strided(300, columns, "whole").astype(dtype)
    x, y = (pt.tensor(dtype=dtype, shape=v.shape) for v in (a, b))
    got = pytensor.function([x, y], x @ y, mode=device_mode())(a, b)
    exact = a.astype("float64") @ b.astype("float64")
    np.testing.assert_allclose(got, exact, 1e-4, 1e-3)
    assert got.T.flags.c_contiguous == (columns != 13)
    resident = device_shared(np.zeros((70, columns), dtype), "resident")
    pytensor.function([x, y], updates=[(resident, x @ y)], mode=device_mode())(a, b)
    np.testing.assert_array_equal(resident.get_value(), got)
