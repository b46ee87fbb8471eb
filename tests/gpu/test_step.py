"""The training step on a GPU: each precision against float32 on the CPU, and captured."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from examples.resident_step import ResidentStep
from tandem.backend import capture, deterministic, device_mode
from tandem.backend.gpu_rewrites import GPU, TRITON
from tandem.compilers import missing_for_triton
from tandem.memory.cuda import CudaDriver
from tandem.ops import Conv2dBiasGrad, PoolNorm, PoolNormGrad
from tandem.ops.pool_norm import Norm
from tests.support.gpu_steps import (
    SIZES,
    TOLERANCES,
    check_captured,
    check_segments,
    losses,
    on_gpu,
)
from tests.support.interpreted_kernels import images, pool_norm
from tests.support.op_checks import evaluate

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NORM = (5, 1e-4, 0.75, 2.0)


@pytest.fixture(scope="module")
def on_cpu() -> np.ndarray:
    return losses(ResidentStep(device_mode("cpu"), SIZES))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("precision", "tolerance"), TOLERANCES)
def test_a_network_trains_as_on_a_cpu(
    driver: CudaDriver, on_cpu: np.ndarray, precision: str, tolerance: float, channels_last: bool
) -> None:
    found = losses(on_gpu(driver, precision, channels_last))
    np.testing.assert_allclose(found, on_cpu, rtol=max(tolerance, 1e-3))


def ops(step: ResidentStep) -> set[type]:
    """Kinds of Ops in the function of the gradients."""
    graph: Any = step.functions[0].maker.fgraph
    return {type(node.op) for node in graph.apply_nodes}


@pytest.fixture(scope="module")
def in_float32(driver: CudaDriver) -> dict[str, np.ndarray]:
    """Gradients of the last step by PyTorch's kernels."""
    step = on_gpu(driver, without=[GPU, TRITON])
    losses(step)
    return gradients(step)


def gradients(step: ResidentStep) -> dict[str, np.ndarray]:
    return {name: variable.get_value() for name, variable in step.gradients.items()}


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("without", [[TRITON], [GPU], [GPU, TRITON]], ids="-".join)
@pytest.mark.parametrize(("precision", "tolerance"), TOLERANCES)
def test_kernels_for_gpus_err_as_little_as_pytorchs(
    driver: CudaDriver,
    in_float32: dict[str, np.ndarray],
    precision: str,
    tolerance: float,
    without: list[str],
) -> None:
    """Rounding moves maxima of pools, so elements of two gradients differ more than their norms."""
    with_all, plain = on_gpu(driver, precision), on_gpu(driver, precision, without=without)
    assert (PoolNormGrad in ops(with_all)) == (missing_for_triton() is None)
    assert ops(plain).isdisjoint([PoolNormGrad] if TRITON in without else [Conv2dBiasGrad])
    np.testing.assert_allclose(losses(with_all), losses(plain), rtol=max(tolerance, 1e-3))
    theirs = gradients(plain)
    for name, value in gradients(with_all).items():
        exact = in_float32[name]
        ours, expected = (relative_error(x, exact) for x in (value, theirs[name]))
        assert ours <= 1.5 * expected + tolerance, (name, ours, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "norm"),
    [((8, 96, 55, 55), NORM), ((8, 256, 27, 27), NORM), ((8, 256, 13, 13), None)],
    ids=["pool1", "pool2", "pool5"],
)
def test_pooling_and_normalisation_in_one_kernel(
    driver: CudaDriver, shape: tuple[int, ...], norm: Norm | None, dtype: str
) -> None:
    """Of AlexNet's three layers, against the Ops' own arithmetic."""
    rng, op, image = np.random.default_rng(0), PoolNorm(3, 2, norm), shape[2:]
    pooled = (*shape[:2], *((n - 3) // 2 + 1 for n in image))
    # Equal pixels, and none that the bias makes equal.
    values = np.round(rng.normal(size=shape), 1), rng.normal(size=pooled)
    x, g = (images(value, dtype).float().numpy() for value in values)
    b = rng.normal(size=shape[1]).astype("float32")
    y, places, *z, dx, sums = pool_norm(x, b, g, op, dtype, "cuda")
    exact = evaluate(op, x, b)
    last = 1e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(y, exact[0], last, 1e-6)
    np.testing.assert_array_equal(places, exact[1])
    # What follows is computed from the stored y.
    if norm is not None:
        np.testing.assert_allclose(z[0], normalised(y, norm), 2 * last, 1e-6)
    expected = evaluate(PoolNormGrad(3, 2, norm, image), y, places, g)
    np.testing.assert_allclose(dx, expected[0], 4 * last, 4 * last)
    np.testing.assert_allclose(sums, expected[1], 1e-3, 1e-2)


def normalised(y: np.ndarray, norm: Norm) -> np.ndarray:
    size, alpha, beta, k = norm
    pad, channels = size // 2, y.shape[1]
    squares = np.pad(y**2, ((0, 0), (pad, pad), (0, 0), (0, 0)))
    return y * (k + alpha * sum(squares[:, i : i + channels] for i in range(size))) ** -beta


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_captured_step_is_the_plain_one(driver: CudaDriver, precision: str) -> None:
    deterministic(True)
    check_captured(*(on_gpu(driver, precision) for _ in range(2)))


def test_a_step_never_makes_the_host_wait(driver: CudaDriver) -> None:
    step = on_gpu(driver)
    step.run()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # of a prototype
            torch.cuda.set_sync_debug_mode("error")
        step.rate.set_value(np.float32(0.005))
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_recordings_share_their_memory(driver: CudaDriver) -> None:
    """As the steps on two slots: they take turns, and each leaves what the plain step leaves."""
    deterministic(True)
    steps = [on_gpu(driver) for _ in range(3)]
    first = capture(steps[0].functions, "cuda:0")
    second = capture(steps[1].functions, "cuda:0", beside=first)
    for _ in range(3):
        for run in (first, second, steps[2].run):
            run()
    expected = steps[2].state()
    for step in steps[:2]:
        for name, value in step.state().items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_segments_on_one_pool_are_the_whole_step(driver: CudaDriver) -> None:
    check_segments(driver)
