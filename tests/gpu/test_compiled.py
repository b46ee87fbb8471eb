"""The compiled training step on a GPU; most of the time goes into compiling."""

import numpy as np
import pytest
import torch

from examples.resident_step import ResidentStep
from tandem.backend import capture, deterministic, device_mode
from tandem.memory.cuda import CudaDriver
from tests.support.gpu_steps import SIZES, TOLERANCES, check_captured, losses, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def on_cpu() -> np.ndarray:
    return losses(ResidentStep(device_mode("cpu"), SIZES))


@pytest.mark.parametrize(("precision", "tolerance"), TOLERANCES)
def test_a_network_trains_as_on_a_cpu(
    driver: CudaDriver, on_cpu: np.ndarray, precision: str, tolerance: float
) -> None:
    found = losses(on_gpu(driver, precision, compile=True))
    np.testing.assert_allclose(found, on_cpu, rtol=max(tolerance, 1e-3))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_captured_step_is_the_plain_one(driver: CudaDriver, precision: str) -> None:
    deterministic(True)
    check_captured(*(on_gpu(driver, precision, compile=True) for _ in range(2)))


def test_gradient_and_update_as_one_function_leave_the_same_weights(driver: CudaDriver) -> None:
    """As a single trainer has them; compiled together, they may round differently."""
    apart, as_one = (on_gpu(driver, compile=True) for _ in range(2))
    mode = device_mode("cuda:0", compile=True)
    replay = capture(as_one.compile(mode, fused=True), "cuda:0")
    np.testing.assert_allclose(losses(as_one, replay), losses(apart), rtol=1e-4)
    for name, variable in apart.weights.items():
        value = variable.get_value()
        scale = 1e-3 * np.abs(value).max()
        found = as_one.weights[name].get_value()
        np.testing.assert_allclose(found, value, rtol=0, atol=scale, err_msg=name)


def test_memory_in_use_stays_flat(driver: CudaDriver) -> None:
    step = on_gpu(driver, "bfloat16", compile=True)
    replay = capture(step.functions, "cuda:0")
    used = []
    for _ in range(3):
        for _ in range(50):
            replay()
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    assert used[1] == used[2]
