"""A step in segments on a GPU, each captured as a graph of its own."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tandem.backend import capture, device_mode
from tandem.memory.cuda import CudaDriver
from tests.support.gpu_steps import losses, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

LAYERS = [["fc8", "fc7"], ["fc6"], ["conv5", "conv4", "conv3", "conv2", "conv1"]]


def in_buckets(layers: Sequence[str]) -> list[str]:
    return [f"gradient/{layer}.{part}" for layer in layers for part in ("weight", "bias")]


@pytest.mark.parametrize("compile", [False, True])
def test_segments_on_one_pool_are_the_whole_step(driver: CudaDriver, compile: bool) -> None:
    whole, cut = (on_gpu(driver, compile=compile) for _ in range(2))
    reported: list[str] = []
    seen: list[float] = []
    first = cut.gradients["fc8.bias"]

    def report(name: str) -> None:
        reported.append(name)
        if name == first.name:
            torch.cuda.synchronize()
            seen.append(float(np.abs(first.get_value()).sum()))

    mode = device_mode(
        "cuda:0",
        compile,
        on_gradient_ready=report,
        buckets=[in_buckets(layers) for layers in LAYERS],
    )
    replay = capture([cut.compile(mode)[0], cut.functions[1]], "cuda:0")
    assert not reported
    assert len(replay.graphs) == len(LAYERS) + 1
    found = losses(cut, replay)
    np.testing.assert_allclose(found, losses(whole, capture(whole.functions, "cuda:0")), rtol=1e-4)
    # When the first bucket is reported, it is what it is at the end of the step.
    assert seen[-1] == pytest.approx(float(np.abs(first.get_value()).sum()))
    size = len(reported) // len(seen)
    assert set(reported[:4]) == set(in_buckets(LAYERS[0]))
    assert reported[:size] * len(seen) == reported
