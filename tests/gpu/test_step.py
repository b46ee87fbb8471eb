"""The training step on a GPU: each precision against float32 on the CPU, and captured."""

import numpy as np
import pytest
import torch

from examples.resident_step import ResidentStep
from tandem.backend import capture, deterministic, device_mode
from tandem.memory.cuda import CudaDriver
from tests.support.gpu_steps import SIZES, TOLERANCES, check_captured, losses, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_captured_step_is_the_plain_one(driver: CudaDriver, precision: str) -> None:
    deterministic(True)
    check_captured(*(on_gpu(driver, precision) for _ in range(2)))


def test_a_step_never_makes_the_host_wait(driver: CudaDriver) -> None:
    step = on_gpu(driver)
    step.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
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
