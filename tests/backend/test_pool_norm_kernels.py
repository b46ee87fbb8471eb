"""The kernels of pooling and normalisation for GPUs, run by Triton's interpreter on the host."""

import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.backend.lowering.pool_norm import fits
from tandem.ops import PoolNorm, PoolNormGrad
from tests.support.interpreted_kernels import images, interpreter, pool_norm
from tests.support.op_checks import evaluate

NORM = (5, 0.1, 0.75, 2.0)

# images, size, stride, norm
CASES = [
    pytest.param((2, 6, 11, 14), 3, 2, NORM, id="overlapping"),
    pytest.param((1, 5, 9, 8), 2, 2, (3, 0.2, 0.6, 1.0), id="side-by-side"),
    pytest.param((1, 9, 10, 13), 3, 2, (9, 0.1, 0.75, 2.0), id="pixels-left-over"),
    pytest.param((1, 20, 37, 7), 3, 2, NORM, id="several-strips"),
    pytest.param(
        *((1, 300, 5, 23), 4, 2, (1, 0.1, 0.75, 2.0)), id="several-tiles", marks=pytest.mark.slow
    ),
    pytest.param((2, 7, 13, 16), 3, 3, None, id="without-norm"),
]


Run = Callable[..., list[np.ndarray]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    pytest.importorskip("triton", reason="Triton is not installed: pip install .[gpu-compile]")
    with interpreter() as process:
        yield lambda *given: process.submit(pool_norm, *given).result()


def random_case(seed: int) -> Any:
    """Images of any size that the kernels take, with windows that overlap, meet, or are single."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    stride = int(rng.integers((size + 1) // 2, size + 1))
    shape = (*rng.integers(1, 4, 1), *rng.integers(1, 20, 1), *rng.integers(size, 16, 2))
    span = int(rng.choice([1, 3, 5, 7, 9]))
    norm = None if rng.random() < 0.25 else (span, *rng.uniform([0.01, 0.3, 0.5], [0.3, 1, 2]))
    return pytest.param(tuple(map(int, shape)), size, stride, norm, id=f"random-{seed}")


@pytest.mark.parametrize(("shape", "size", "stride", "norm"), [*CASES, *map(random_case, range(4))])
def test_they_compute_what_the_ops_do(
    run: Run, shape: tuple[int, ...], size: int, stride: int, norm: Any
) -> None:
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=shape), 1).astype("float32")  # with equal pixels
    b, op = rng.normal(size=shape[1]).astype("float32"), PoolNorm(size, stride, norm)
    assert fits(op, shape)
    expected = evaluate(op, x, b)
    g = rng.normal(size=expected[0].shape).astype("float32")
    *results, dx, sums = run(x, b, g, op)
    for found, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(found, value, 1e-5, 1e-6)
    after = evaluate(PoolNormGrad(size, stride, norm, shape[2:]), *expected[:2], g)
    for found, value in zip((dx, sums), after, strict=True):
        np.testing.assert_allclose(found, value, 1e-4, 1e-5)


def test_bfloat16_is_computed_in_float32(run: Run) -> None:
    def rounded(*shape: int) -> np.ndarray:
        return images(rng.normal(size=shape), "bfloat16").to(torch.float32).numpy()

    rng = np.random.default_rng(1)
    op = PoolNorm(3, 2, NORM)
    x, g = rounded(1, 12, 9, 9), rounded(1, 12, 4, 4)
    b = rng.normal(size=12).astype("float32")
    y, places, z, dx, sums = run(x, b, g, op, "bfloat16")
    exact, exact_places, _ = evaluate(op, x, b)
    # The interpreter cuts off bits where a GPU rounds: an error of up to a whole last bit.
    np.testing.assert_allclose(y, exact, 2**-7)
    np.testing.assert_array_equal(places, exact_places)
    # What follows is computed from the stored y.
    squares = np.pad(y**2, ((0, 0), (2, 2), (0, 0), (0, 0)))
    scale = 2 + 0.1 * sum(squares[:, i : i + 12] for i in range(5))
    np.testing.assert_allclose(z, y * scale**-0.75, 2**-7)
    expected = evaluate(PoolNormGrad(3, 2, NORM, (9, 9)), y, places, g)
    np.testing.assert_allclose(dx, expected[0], 2**-7, 1e-6)
    np.testing.assert_allclose(sums, expected[1], 1e-4, 1e-5)


def test_what_is_not_finite_stays_visible(run: Run) -> None:
    x = np.ones((1, 8, 7, 7), "float32")
    x[0, 2, 3, 3], x[0, 5, 0, 0], x[0, 6] = np.nan, np.inf, -np.inf
    g, b = np.ones((1, 8, 3, 3), "float32"), np.zeros(8, "float32")
    y, _, dx, _ = run(x, b, g, PoolNorm(3, 2))
    assert np.isnan(y[0, 2, 1, 1])
    assert np.isinf(y[0, 5, 0, 0])
    assert (y[0, 6] == 0).all()
    assert (dx[0, 6] == 0).all()
    assert np.isfinite(dx).all()
    g[0, 2, 1, 1] = np.nan
    *_, dx, sums = run(x, b, g, PoolNorm(3, 2))
    assert np.isnan(dx[0, 2, 3, 3])
    assert np.isnan(sums[2])


def test_they_take_the_layers_of_alexnet() -> None:
    for shape in ((256, 96, 55, 55), (256, 256, 27, 27), (256, 256, 13, 13), (1, 512, 32, 32)):
        assert fits(PoolNorm(3, 2, NORM), shape)


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (PoolNorm(3, 1), (1, 8, 9, 9)),  # windows that begin in three blocks
        (PoolNorm(2, 3), (1, 8, 9, 9)),  # pixels between windows
        (PoolNorm(3, 2, (11, 0.1, 0.75, 2.0)), (1, 8, 9, 9)),
        (PoolNorm(3, 2), (1, 512, 9, 33)),
        (PoolNorm(3, 2), (1, 1, 9, 2049)),
        (PoolNorm(3, 2), (1, None, 9, 9)),
        (PoolNorm(3, 2), (1, 8, None, 9)),
        (PoolNorm(3, 2), (1, 8, 9, None)),
        (PoolNorm(12, 8), (1, 8, 40, 40)),  # places that int8 can't hold
    ],
)
def test_they_are_not_asked_for_more_than_they_can(op: PoolNorm, shape: Any) -> None:
    assert not fits(op, shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*itertools.product(("_forward", "_backward"), ("bf16", "fp32"))]
)
def test_they_compile_for_a_gpu(name: str, dtype: str, tmp_path: Path) -> None:
    """At the sizes of the first layer, without registers in memory."""
    triton = pytest.importorskip("triton", reason="pip install .[gpu-compile]")
    from triton.backends.compiler import GPUTarget

    from tandem.backend import pool_norm_kernels as kernels

    kernel = getattr(kernels, name)
    constants = kernels._constants(3, 2, (5, 1e-4, 0.75, 2.0)) | {"CHANNELS": 96}
    constants |= {"TILE_CHANNELS": 128, "TILE_COLUMNS": 8 if name == "_forward" else 32}
    constants |= {} if name == "_forward" else {"STRIP": kernels._STRIP}
    of_float32 = dict.fromkeys(("bias", "bias_sums"), "*fp32") | {"places": "*i8"}
    arrays = ("x", "y", "z", "g", "dx", *of_float32)
    signature = {
        argument: "constexpr"
        if argument in constants
        else of_float32.get(argument, f"*{dtype}")
        if argument in arrays
        else "i32"
        for argument in kernel.arg_names
    }
    aligned = [(i,) for i, argument in enumerate(kernel.arg_names) if argument in arrays]
    source = triton.compiler.ASTSource(
        kernel, signature, constants, {key: [["tt.divisibility", 16]] for key in aligned}
    )
    options = {"num_warps": 4 if name == "_forward" else 16}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "ld.global.v4" in compiled.asm["ptx"]
    source_file = tmp_path / "kernel.ptx"
    source_file.write_text(compiled.asm["ptx"])
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [assembler, "-v", "-arch=sm_90a", source_file, "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report
