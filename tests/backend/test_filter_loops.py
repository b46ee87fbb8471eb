"""Gradients of filters by the loop, against the Op's own in float64; and when it is taken."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import filter_loops
from tandem.backend.lowering import lower
from tandem.ops.conv import Conv2dWeightGrad, count_windows

Pair = tuple[int, int]


def operands(
    pictures: int,
    image: Pair,
    channels: int,
    filters: int,
    taps: Pair,
    stride: Pair = (1, 1),
    pad: Pair = (0, 0),
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Images, filters and the gradient of the result, channels-last; channels are all groups'."""
    rng = np.random.default_rng(filters)
    results = (count_windows(*each) for each in zip(image, taps, stride, pad, strict=True))
    shapes = (
        (pictures, channels, *image),
        (filters, channels // groups, *taps),
        (pictures, filters, *results),
    )
    return [
        torch.from_numpy(rng.normal(size=shape))
        .to(dtype)
        .contiguous(memory_format=torch.channels_last)
        for shape in shapes
    ]


CASES: dict[str, dict[str, Any]] = {
    "several pictures in a block": {
        "pictures": 9, "image": (8, 8), "channels": 64, "filters": 64, "taps": (3, 3), "pad": (1, 1)
    },
    "a large picture in strips": {
        "pictures": 2, "image": (71, 67), "channels": 16, "filters": 16, "taps": (3, 3),
        "pad": (1, 1),
    },
    "strips with a stride, and rows that no window reads": {
        "pictures": 1, "image": (140, 129), "channels": 3, "filters": 24, "taps": (11, 11),
        "stride": (3, 2), "pad": (2, 1),
    },
    "few channels, in groups": {
        "pictures": 5, "image": (9, 7), "channels": 9, "filters": 51, "taps": (3, 3), "groups": 3
    },
    "channels that fill no block, filters no panel": {
        "pictures": 3, "image": (6, 11), "channels": 2 * 21, "filters": 2 * 37, "taps": (5, 5),
        "pad": (2, 2), "groups": 2,
    },
    "a row of taps": {
        "pictures": 4, "image": (7, 12), "channels": 12, "filters": 32, "taps": (1, 7),
        "stride": (2, 1), "pad": (0, 3),
    },
    "a column of taps": {
        "pictures": 4, "image": (12, 7), "channels": 12, "filters": 130, "taps": (7, 1),
        "stride": (1, 3), "pad": (3, 0),
    },
    "padding wider than the picture": {
        "pictures": 2, "image": (2, 2), "channels": 8, "filters": 16, "taps": (3, 3), "pad": (4, 5)
    },
    "fewer pictures than parts": {
        "pictures": 1, "image": (5, 5), "channels": 1, "filters": 16, "taps": (5, 5)
    },
    "one channel": {
        "pictures": 5, "image": (7, 7), "channels": 1, "filters": 16, "taps": (3, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_it_is_the_gradient(name: str) -> None:
    options = CASES[name]
    x, w, g = operands(**options)
    stride, pad = options.get("stride", (1, 1)), options.get("pad", (0, 0))
    groups = options.get("groups", 1)
    found = filter_loops.filter_gradient(x, torch.full_like(w, torch.nan), g, stride, pad, groups)
    exact: list[list[Any]] = [[None]]
    values = [v.double().numpy() for v in (x, w, g)]
    Conv2dWeightGrad(stride, pad, groups).perform(None, values, exact)
    terms = len(g) * g.shape[2:].numel()
    error = np.sqrt(np.mean((found.numpy() - exact[0][0]) ** 2) / np.mean(exact[0][0] ** 2))
    assert 0 < error < np.sqrt(terms) * 2.0**-24  # sums of n terms are off by sqrt(n) roundings
    np.testing.assert_allclose(found, exact[0][0], 0, 1e-5 * np.abs(exact[0][0]).max())


def test_windows_that_reach_no_pixel() -> None:
    x, w, g = operands(2, (2, 2), 3, 16, (3, 3), stride=(20, 20), pad=(5, 5))
    assert not filter_loops.filter_gradient(x, w, g, (20, 20), (5, 5), 1).any()


@pytest.mark.parametrize(("channels", "filters"), [(3, 16), (16, 48), (24, 160)])
def test_the_number_of_threads_changes_no_bit(channels: int, filters: int) -> None:
    x, w, g = operands(11, (13, 13), channels, filters, (3, 3), pad=(1, 1))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(filter_loops.filter_gradient(x, w, g, (1, 1), (1, 1), 1))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("image", [(9, 7), (1, 1)])
def test_one_tap_is_a_product(image: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.backend.lowering.convolution._vectors_are_short", lambda: True)
    x, w, g = operands(3, image, 24, 40, (1, 1))
    found = lowered([x, w, g], pad=0).call(x, w, g)
    exact = np.einsum("nchw,nkhw->kc", x.double(), g.double())[:, :, np.newaxis, np.newaxis]
    np.testing.assert_allclose(found, exact, 0, 1e-6 * np.abs(exact).max())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The loop's calls, on a processor whose vectors are taken to have 256 bits."""
    found: list[Any] = []
    monkeypatch.setattr("tandem.backend.lowering.convolution._vectors_are_short", lambda: True)
    monkeypatch.setattr(
        filter_loops, "filter_gradient", lambda x, w, *rest: found.append(rest) or w
    )
    return found


def lowered(
    values: list[torch.Tensor], compiled: bool = False, dilation: int = 1, pad: int = 1
) -> Any:
    op = Conv2dWeightGrad(1, pad, 1, dilation)
    x, w, g = (pt.tensor4(dtype="float32") for _ in values)
    node = op.make_node(x, pt.specify_shape(w, values[1].shape), g)
    return lower(op, node, device=torch.device("cpu"), compiled=compiled)


def test_short_vectors_take_it(calls: list[Any]) -> None:
    values = operands(2, (6, 6), 4, 16, (3, 3), pad=(1, 1))
    lowering = lowered(values)
    lowering.call(*values)
    assert calls == [(values[2], (1, 1), (1, 1), 1)]
    assert lowering.fft is None


def test_what_it_cannot_do_or_does_slowly_is_left_to_onednn(calls: list[Any]) -> None:
    usual: dict[str, Any] = {
        "pictures": 2, "image": (6, 6), "channels": 4, "filters": 16, "taps": (3, 3), "pad": (1, 1)
    }  # fmt: skip
    others = {
        "few filters": {"filters": 15},
        "one tap, padded": {"taps": (1, 1), "channels": 16},
        "few products": {"taps": (1, 7), "filters": 18},
        "no picture": {"pictures": 0},
        "double precision": {"dtype": torch.float64},
    }
    for name, change in others.items():
        values = operands(**(usual | change))
        assert lowered(values).call(*values).shape == values[1].shape, name
    values = operands(**usual)
    lowered(values, compiled=True).call(*values)
    lowered(values).call(*(v.contiguous() for v in values))
    with pytest.raises(RuntimeError, match="descriptor"):
        lowered(values).call(*values[:2], values[2][:, :, 1:].contiguous())
    dilated = [*values[:2], values[2][:, :, 2:, 2:].contiguous(memory_format=torch.channels_last)]
    lowered(values, dilation=2).call(*dilated)
    assert calls == []
