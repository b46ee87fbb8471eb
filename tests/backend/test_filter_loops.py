"""Gradients of filters by the loop, against the Op's own in float64; and when it is taken."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import filter_loops
from tandem.backend.lowering import lower
from tandem.ops.conv import Conv2dWeightGrad
from tests.support.convolutions import Pair, operands

CASES: dict[str, dict[str, Any]] = {
    "several pictures in a block": {
        "pictures": 9, "image": (8, 8), "channels": 64, "filters": 64, "taps": (3, 3), "pad": (1, 1)
    },
    "a large picture in strips": {
        "pictures": 2, "image": (71, 67), "channels": 16, "filters": 16, "taps": (3, 3),
        "pad": (1, 1),
    },
    "strips with a stride": {
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
    "columns that no window reads": {
        "pictures": 2, "image": (70, 30), "channels": 16, "filters": 16, "taps": (3, 3),
        "stride": (1, 14),
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


@pytest.fixture
def short_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is taken to have vectors of 256 bits."""
    monkeypatch.setattr("tandem.backend.lowering.convolution._vectors_are_short", lambda: True)


@pytest.fixture
def calls(short_vectors: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The loop's calls."""
    found: list[Any] = []
    monkeypatch.setattr(
        filter_loops, "filter_gradient", lambda x, w, *rest: found.append(rest) or w
    )
    return found


def lowered(values: list[torch.Tensor], *props: Any, compiled: bool = False) -> Any:
    """The gradient's lowering, for the operands' shapes but that of g."""
    x, w = (pt.tensor(dtype="float32", shape=tuple(v.shape)) for v in values[:2])
    node = Conv2dWeightGrad(*props).make_node(x, w, pt.tensor4(dtype="float32"))
    return lower(node.op, node, device=torch.device("cpu"), compiled=compiled)


def test_short_vectors_take_the_loop(calls: list[Any]) -> None:
    values = operands(2, (6, 6), 4, 16, (3, 3), pad=(1, 1))
    lowered(values, 1, 1).call(*values)
    assert calls == [(values[2], (1, 1), (1, 1), 1)]


@pytest.mark.usefixtures("short_vectors")
@pytest.mark.parametrize("image", [(9, 7), (1, 1)])
def test_one_tap_is_a_product(image: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, g = operands(3, image, 24, 40, (1, 1))
    multiply, shapes = torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.append(a.shape) or multiply(a, b))
    found = lowered([x, w, g]).call(x, w, g)
    exact = np.einsum("nchw,nkhw->kc", x.double(), g.double())[:, :, np.newaxis, np.newaxis]
    np.testing.assert_allclose(found, exact, 0, 1e-6 * np.abs(exact).max())
    assert shapes == [(40, 3 * image[0] * image[1])]


@pytest.mark.parametrize(
    ("change", "stride", "dilation"),
    [
        ({"filters": 15}, 1, 1),
        ({"taps": (1, 1), "channels": 16}, 1, 1),
        ({"taps": (1, 7), "filters": 18}, 1, 1),
        ({"pictures": 0}, 1, 1),
        ({"dtype": torch.float64}, 1, 1),
        ({"image": (7, 7), "stride": (4, 4)}, 4, 2),
    ],
    ids=["few filters", "a padded tap", "few products", "no picture", "float64", "dilation"],
)
def test_what_it_cannot_do_or_does_slowly_is_left_to_onednn(
    change: dict[str, Any], stride: int, dilation: int, calls: list[Any]
) -> None:
    usual: dict[str, Any] = {
        "pictures": 2, "image": (6, 6), "channels": 4, "filters": 16, "taps": (3, 3), "pad": (1, 1)
    }  # fmt: skip
    values = operands(**(usual | change))
    assert lowered(values, stride, 1, 1, dilation).call(*values).shape == values[1].shape
    assert calls == []


def test_compiled_code_other_layouts_and_shapes_that_do_not_fit_are_left_to_pytorch(
    calls: list[Any],
) -> None:
    x, w, g = operands(2, (6, 6), 8, 32, (3, 3), pad=(1, 1))
    lowered([x, w, g], 1, 1, compiled=True).call(x, w, g)
    lowered([x, w, g], 1, 1).call(x.contiguous(), w, g)
    last = {"memory_format": torch.channels_last}
    half = torch.cat([w, w[:1]])[:, :4]
    rows_missing = x, w, g[:, :, 1:].contiguous(**last)
    filters_in_no_groups = x, half, torch.cat([g, g[:, :1]], 1).contiguous(**last)
    for groups, values in ((1, rows_missing), (2, filters_in_no_groups)):
        with pytest.raises(RuntimeError):
            lowered([x, w if groups == 1 else w[:, :4], g], 1, 1, groups).call(*values)
    assert calls == []
