"""The training step on a GPU: each precision against float32 on the CPU, and captured."""

from typing import Any

import numpy as np
import pytest
import torch

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import capture, deterministic, device_mode
from tandem.memory.cuda import CudaBuffer, CudaDriver

pytestmark = pytest.mark.gpu

SIZES = Sizes(batch=16, width=0.5)
STEPS = 5


def on_gpu(driver: CudaDriver, precision: Any = "float32", compile: bool = False) -> ResidentStep:
    mode = device_mode("cuda:0", compile=compile, precision=precision)
    return ResidentStep(
        mode, SIZES, "cuda:0", lambda nbytes: CudaBuffer.create(driver, nbytes), channels_last=True
    )


def losses(step: ResidentStep, run: Any = None) -> np.ndarray:
    totals = [0.0]
    for _ in range(STEPS):
        (run or step.run)()
        totals.append(float(step.loss.get_value()))
    return np.diff(totals) / SIZES.batch


@pytest.fixture(scope="module")
def on_cpu() -> np.ndarray:
    return losses(ResidentStep(device_mode("cpu"), SIZES))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # Eight layers each round operands by at most half of a last place: 24, 11 and 8 bits.
    [("float32", 1e-3), ("tf32", 8 * 2.0**-11), ("bfloat16", 8 * 2.0**-8)],
)
def test_a_network_trains_as_on_a_cpu(
    driver: CudaDriver, on_cpu: np.ndarray, precision: str, tolerance: float, compile: bool
) -> None:
    np.testing.assert_allclose(
        losses(on_gpu(driver, precision, compile)), on_cpu, rtol=max(tolerance, 1e-3)
    )


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_captured_step_is_the_plain_one(
    driver: CudaDriver, precision: str, compile: bool
) -> None:
    deterministic(True)
    plain, captured = (on_gpu(driver, precision, compile) for _ in range(2))
    before = captured.state()
    replay = capture(captured.functions, "cuda:0")
    for name, value in captured.state().items():
        np.testing.assert_array_equal(value, before[name])
    for rate in (0.01, 0.02):
        for step, run in ((plain, plain.run), (captured, replay)):
            step.rate.set_value(np.float32(rate))
            losses(step, run)
    expected = plain.state()
    for name, value in captured.state().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


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
