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


LAYERS = (("fc8", "fc7"), ("fc6",), ("conv5", "conv4", "conv3", "conv2", "conv1"))


def check_segments(driver: CudaDriver, compile: bool = False) -> None:
    """Compare a step whose gradients are captured in segments with the whole one."""
    whole, cut = (on_gpu(driver, compile=compile) for _ in range(2))
    buckets = [
        {f"gradient/{layer}.{part}" for layer in layers for part in ("weight", "bias")}
        for layers in LAYERS
    ]
    reported: list[str] = []
    sums: list[float] = []  # of a gradient of the first bucket, when it is reported
    early = cut.gradients["fc8.bias"]

    def report(name: str) -> None:
        reported.append(name)
        if name == early.name:
            sums.append(float(np.abs(early.get_value()).sum()))

    mode = device_mode("cuda:0", compile, on_gradient_ready=report, buckets=buckets)
    replay = capture([cut.compile(mode)[0], cut.functions[1]], "cuda:0")
    assert len(replay.graphs) == len(buckets) + 1
    assert not reported
    found = losses(cut, replay)
    np.testing.assert_allclose(found, losses(whole, capture(whole.functions, "cuda:0")), rtol=1e-4)
    assert len(sums) == STEPS
    np.testing.assert_allclose(sums[-1], np.abs(early.get_value()).sum())
    assert set(reported[: len(buckets[0])]) == buckets[0]
