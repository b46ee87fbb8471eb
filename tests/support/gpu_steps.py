"""Small training steps on a GPU, for the tests that need one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import capture, device_mode
from tandem.memory.cuda import CudaBuffer, CudaDriver

SIZES = Sizes(batch=16, width=0.5)
STEPS = 5

# Eight layers each round operands by at most half of a last place: 24, 11 and 8 bits.
TOLERANCES = [("float32", 1e-3), ("tf32", 8 * 2.0**-11), ("bfloat16", 8 * 2.0**-8)]


def on_gpu(
    driver: CudaDriver,
    precision: Any = "float32",
    channels_last: bool = True,
    compile: bool = False,
    without: Sequence[str] = (),
) -> ResidentStep:
    """Make a step; `without` are rewrites that are left out."""
    mode = device_mode("cuda:0", compile, precision, channels_last=channels_last)
    return ResidentStep(
        mode.excluding(*without),
        SIZES,
        "cuda:0",
        lambda nbytes: CudaBuffer.create(driver, nbytes),
        channels_last=channels_last,
    )


def losses(step: ResidentStep, run: Any = None) -> np.ndarray:
    """Make steps; return the mean loss of each, in nats."""
    totals = [0.0]
    for _ in range(STEPS):
        (run or step.run)()
        totals.append(float(step.loss.get_value()))
    return np.diff(totals) / SIZES.batch


def check_captured(plain: ResidentStep, captured: ResidentStep) -> None:
    """Compare two equal steps bit for bit, one of them replayed; PyTorch is deterministic."""
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
