"""Which convolutions go by transforms, and that these round no more coarsely than sums do."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import device_mode
from tandem.backend.lowering import lower
from tandem.ops.conv import Conv2d, Conv2dInputGrad, conv2d
from tests.support.check_function import DEVICE

needs_nnpack = pytest.mark.skipif(
    not torch.backends.nnpack.is_available(), reason="this PyTorch has no NNPACK"
)


def transformed_layers(sizes: Sizes) -> list[str]:
    """The convolutions of a training step, forward and of the images, that go by transforms."""
    program: Any = ResidentStep(device_mode("cpu"), sizes).functions[0].vm
    found = []
    for node in program.program.nodes.values():
        if isinstance(node.op, Conv2d | Conv2dInputGrad):
            call = lower(node.op, node, device=torch.device("cpu"), compiled=False).call
            if "Transformed" in repr(call):
                found.append(f"{type(node.op).__name__} {node.inputs[1].type.shape}")
    return found


def computed(dtype: str, batch: int, channels: int, side: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(batch, channels, length, length), (channels, channels, side, side), (channels,)]
    values = [rng.normal(size=shape).astype("float32").astype(dtype) for shape in shapes]
    x, w, b = (pt.tensor(dtype=dtype, shape=shape) for shape in shapes)
    y = conv2d(x, w, b, pad=side // 2)
    g = rng.normal(size=y.type.shape).astype("float32").astype(dtype)
    outputs = [y, pytensor.grad((y * g).sum(), x)]
    return pytensor.function([x, w, b], outputs, mode=DEVICE)(*values)


@needs_nnpack
@pytest.mark.parametrize(("side", "length"), [(3, 13), (5, 27), (7, 9)])
def test_transforms_round_no_more_coarsely_than_sums(side: int, length: int) -> None:
    """Sums of n random terms are off by some sqrt(n) roundings, of 6e-8 each."""
    exact = computed("float64", 16, 32, side, length)
    rounded = computed("float32", 16, 32, side, length)
    terms = 32 * side**2
    for one, other in zip(exact, rounded, strict=True):
        error = np.sqrt(np.mean((one - other) ** 2) / np.mean(one**2))
        assert 0 < error < np.sqrt(terms) * 2.0**-24


@needs_nnpack
def test_the_papers_network_takes_transforms_for_all_but_the_first_layer() -> None:
    found = transformed_layers(Sizes(16, 227, 256, 10, 1.0))
    assert sorted(name.split()[0] for name in found) == ["Conv2d"] * 4 + ["Conv2dInputGrad"] * 4
    assert transformed_layers(Sizes(64, 67, 76, 10, 1.0)) == []


@needs_nnpack
@pytest.mark.parametrize(
    ("stride", "pad", "side", "length", "batch"),
    [(2, 1, 3, 13, 64), (1, 1, 3, 12, 64), (1, 1, 3, 13, 15), (1, 0, 1, 13, 64)],
    ids=["stride", "Winograd's tiles", "few pictures", "one tap"],
)
def test_where_transforms_do_not_pay_the_sum_is_computed(
    stride: int, pad: int, side: int, length: int, batch: int
) -> None:
    x = pt.tensor(dtype="float32", shape=(batch, 32, length, length))
    w = pt.tensor(dtype="float32", shape=(32, 32, side, side))
    b = pt.tensor(dtype="float32", shape=(32,))
    node = conv2d(x, w, b, stride=stride, pad=pad).owner
    call = lower(node.op, node, device=torch.device("cpu"), compiled=False).call
    assert "Transformed" not in repr(call)
