"""Functions through ``torch.compile`` compute what they compute without it."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.mode import Mode

from tandem.backend import as_device, device_mode, device_shared
from tandem.backend.runtime import require_compiler
from tandem.compilers import cpp_compiler
from tandem.errors import InputError
from tandem.ops import conv2d, crop_mirror, dropout_mask, lrn, max_pool2d, relu
from tests.support.check_function import DEVICE, assert_same
from tests.support.random_updates import RandomUpdates

needs_compiler = pytest.mark.skipif(
    cpp_compiler() is None, reason="torch.compile needs a C++ compiler ($CXX, g++ or clang++)"
)


@pytest.fixture(scope="module")
def compiled() -> Mode:
    return device_mode("cpu", compile=True)


@needs_compiler
def test_updates_in_one_block(compiled: Mode) -> None:
    """Swapped, chained and self-viewing updates of variables side by side in one block."""
    block = np.arange(64, dtype="float32")
    start = block.copy()
    a, b, c = (
        device_shared(None, name, memory=block[16 * place : 16 * place + 9].reshape(3, 3))
        for place, name in enumerate("abc")
    )
    x = pt.fmatrix("x")
    step = pytensor.function(
        [x], [a, (a * x).sum()], updates=[(a, b), (b, a), (c, c.T - a)], mode=compiled
    )
    parts = [start[16 * place : 16 * place + 9].reshape(3, 3) for place in range(3)]
    value = np.eye(3, dtype="float32")
    for _ in range(3):
        old, total = step(value)
        np.testing.assert_array_equal(old, parts[0])
        assert total == np.trace(parts[0])
        parts = [parts[1], parts[0], parts[2].T - parts[0]]
        for variable, part in zip((a, b, c), parts, strict=True):
            np.testing.assert_array_equal(variable.get_value(), part)
    between = np.r_[9:16, 25:32, 41:64]
    np.testing.assert_array_equal(block[between], start[between])


@needs_compiler
@pytest.mark.parametrize(
    "dtype", ["float64", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float32", "int64"))]
)
def test_numbers_are_updated_in_place(compiled: Mode, dtype: str) -> None:
    """Sums that grow from call to call; torch.compile by itself loses those in float64."""
    total = device_shared(np.zeros((), dtype), "total")
    x = pt.vector("x", dtype=dtype, shape=(4,))
    # No output: one that could show the old value would be computed another way.
    add = pytensor.function([x], [], updates=[(total, total + x.sum())], mode=compiled)
    for call in range(3):
        add(np.arange(4, dtype=dtype))
        assert total.get_value() == 6 * (call + 1)


def small_network(mode: Mode) -> tuple[Any, list[Any]]:
    """A training step with every kind of layer; the function and its parameters."""
    rng = np.random.default_rng(0)
    pictures = pt.tensor("pictures", shape=(4, 18, 18, 3), dtype="uint8")
    origins = pt.tensor("origins", shape=(4, 2), dtype="int64")
    mirrored = pt.tensor("mirrored", shape=(4,), dtype="uint8")
    labels = pt.tensor("labels", shape=(4,), dtype="int64")
    mean = device_shared(rng.uniform(0, 255, (3, 18, 18)).astype("float32"))
    w = device_shared(rng.normal(0, 0.1, (6, 3, 3, 3)).astype("float32"))
    b = device_shared(np.zeros(6, "float32"))
    v = device_shared(rng.normal(0, 0.1, (6 * 7 * 7, 5)).astype("float32"))
    x = crop_mirror(pictures, mean, origins, mirrored, crop_size=16) / np.float32(100)
    h = lrn(max_pool2d(relu(conv2d(x, w, b, stride=1, pad=1, groups=1)), 3, 2), alpha=0.1)
    h = h.reshape((4, -1))
    h = h * dropout_mask(7, 3, labels + 11, rate=0.5, layer=0, units=6 * 7 * 7)
    logits = pt.special.log_softmax(pt.dot(h, v), axis=1)
    cost = -logits[pt.arange(4), labels].mean()
    parameters = [w, b, v]
    gradients = pytensor.grad(cost, parameters)
    updates = [(p, p - np.float32(0.1) * g) for p, g in zip(parameters, gradients, strict=True)]
    step = pytensor.function(
        [pictures, origins, mirrored, labels], [cost, x], updates=updates, mode=mode
    )
    return step, parameters


@needs_compiler
@pytest.mark.slow
def test_training_step(compiled: Mode) -> None:
    rng = np.random.default_rng(1)
    (plain, expected), (fused, found) = small_network(DEVICE), small_network(compiled)
    for _ in range(3):
        values = (
            rng.integers(0, 256, (4, 18, 18, 3), dtype=np.uint8),
            rng.integers(0, 3, (4, 2)),
            rng.integers(0, 2, 4).astype(np.uint8),
            rng.integers(0, 5, 4),
        )
        (cost, images), (fused_cost, fused_images) = plain(*values), fused(*values)
        np.testing.assert_allclose(fused_cost, cost, rtol=1e-5)
        assert_same(fused_images, images)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other.get_value(), one.get_value(), rtol=1e-4, atol=1e-5)
    # The updates were written in the compiled part.
    assert fused.vm.program.store_results is None
    assert fused.vm.program.source.count(".copy_(") == 3


@needs_compiler
def test_a_number_on_the_host_is_not_copied(compiled: Mode) -> None:
    x = pt.dmatrix("x")
    assert pytensor.function([x], x.shape[1], mode=compiled)(np.ones((2, 3))) == 3


@needs_compiler
@pytest.mark.slow
def test_dropout_masks_have_the_same_bits(compiled: Mode) -> None:
    indices = pt.tensor("indices", shape=(5,), dtype="int64")
    masks = [
        dropout_mask(2**62 + 5, 9, indices, rate=r, layer=k, units=30)
        for k, r in ((0, 0.5), (1, 0.2))
    ]
    value = np.array([0, 1, 2**31, 2**32 - 1, 77])
    results = [pytensor.function([indices], masks, mode=mode)(value) for mode in (DEVICE, compiled)]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(other, one)


@needs_compiler
@pytest.mark.slow
def test_graph_that_reads_values_on_the_host(compiled: Mode) -> None:
    x, i = pt.dvector("x"), pt.lscalar("i")
    outputs = [x[i:].sum() + x.shape[0], x[i], x[x > i].sum()]
    function = pytensor.function([x, i], outputs, mode=compiled)
    assert function.vm.program.breaks
    for place in (1, 2):
        total, one, above = function(np.arange(5.0), place)
        assert total == sum(range(place, 5)) + 5
        assert one == place
        assert above == sum(range(place + 1, 5))


@needs_compiler
@pytest.mark.slow
def test_other_shapes_are_compiled_anew(compiled: Mode) -> None:
    x = pt.fmatrix("x")
    function = pytensor.function([x], (x / x.shape[0]).sum(axis=0), mode=compiled)
    for rows in (2, 3, 5):
        np.testing.assert_allclose(function(np.ones((rows, 4), "float32")), np.ones(4), rtol=1e-6)


def test_missing_compiler_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler"):
        require_compiler(as_device("cpu"))
    with pytest.raises(InputError, match=r"compile: false"):
        device_mode("cpu", compile=True)


def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for missing in (None, "Python's header and more"):
        monkeypatch.setattr(
            "tandem.backend.runtime.missing_for_triton", lambda found=missing: found
        )
        if missing is None:
            require_compiler(gpu)
        else:
            with pytest.raises(InputError, match=f"a GPU needs what is missing here: {missing}; "):
                require_compiler(gpu)


@needs_compiler
@pytest.mark.slow
def test_linear_algebra_and_complex_numbers(compiled: Mode) -> None:
    x, z = pt.dtensor3("x"), pt.zmatrix("z")
    outputs = [
        pt.linalg.cholesky(x), pt.linalg.inv(x), pt.linalg.svd(x, compute_uv=False),
        pt.linalg.eigh(x)[0], pt.exp(x) * 2, pt.linalg.solve(x, x[:, 0], b_ndim=1),
        z * 2 + 1, pt.abs(z), pt.real(z) + 1, pt.fill_diagonal(z, 1j), pt.erfcx(pt.imag(z)),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4, 4)), rng.normal(size=(2, 3, 3))
    values = a @ a.swapaxes(1, 2) + np.eye(4), b[0] + 1j * b[1]
    function = pytensor.function([x, z], outputs, mode=compiled)
    expected = pytensor.function([x, z], outputs, mode=DEVICE)(*values)
    for got, value in zip(function(*values), expected, strict=True):
        assert_same(got, value)
    with pytest.raises(np.linalg.LinAlgError):
        function(values[0] * 0, values[1])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_updates(compiled: Mode, first: int) -> None:
    """In one piece, or in segments behind each of which updates are reported."""
    for cut in (False, True):
        seeds = range(first + cut, first + 10, 2)
        counts = [RandomUpdates(seed, cut).check(compiled) for seed in seeds]
    assert max(counts) > 1
