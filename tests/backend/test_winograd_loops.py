"""Winograd's convolutions and their gradients by the loops, against the Ops' own in float64."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.errors import TypingError

from tandem.backend import winograd_loops
from tandem.backend.vectors import VECTOR, _numbers_at_a_time
from tandem.backend.winograd_loops import convolve, filter_gradient, transform_filters
from tandem.ops.conv import Conv2d, Conv2dInputGrad, Conv2dWeightGrad
from tests.support.convolutions import operands

CASES: dict[str, dict[str, Any]] = {
    "whole tiles": {
        "pictures": 3, "image": (8, 12), "channels": 16, "filters": 32, "taps": (3, 3),
        "pad": (1, 1),
    },
    "channels that fill no vector, filters no panel": {
        "pictures": 2, "image": (9, 7), "channels": 20, "filters": 37, "taps": (3, 3), "pad": (1, 1)
    },
    "filters that end within a panel": {
        "pictures": 2, "image": (9, 7), "channels": 8, "filters": 24, "taps": (3, 3), "pad": (1, 0)
    },
    "groups of five taps": {
        "pictures": 3, "image": (11, 6), "channels": 2 * 9, "filters": 2 * 11, "taps": (5, 5),
        "pad": (2, 4), "groups": 2,
    },
    "groups of whole vectors": {
        "pictures": 2, "image": (6, 6), "channels": 3 * 16, "filters": 3 * 48, "taps": (3, 3),
        "pad": (2, 2), "groups": 3,
    },
    "several blocks": {
        "pictures": 5, "image": (29, 27), "channels": 16, "filters": 16, "taps": (3, 3),
    },
    "several blocks of five taps": {
        "pictures": 2, "image": (21, 23), "channels": 8, "filters": 16, "taps": (5, 5),
        "pad": (2, 2),
    },
    "padding wider than the filters": {
        "pictures": 2, "image": (5, 4), "channels": 8, "filters": 16, "taps": (3, 3), "pad": (7, 3)
    },
    "one window": {
        "pictures": 1, "image": (3, 3), "channels": 1, "filters": 1, "taps": (3, 3)
    },
    "a picture smaller than the filters": {
        "pictures": 4, "image": (2, 1), "channels": 5, "filters": 6, "taps": (5, 5), "pad": (3, 4)
    },
}  # fmt: skip


def computed(x: Any, w: Any, g: Any, b: Any, pad: Any, groups: int) -> list[torch.Tensor]:
    """The convolution, the gradient of the filters, and that of images with narrower padding."""
    (filters, channels, side, _), reversed_pad = w.shape, [w.shape[2] - 1 - p for p in pad]
    found = [
        convolve(x, transform_filters(w, groups), b, filters, side, pad),
        filter_gradient(x, w, g, pad, groups),
    ]
    if min(reversed_pad) >= 0:
        turned = transform_filters(w, groups, turned=True)
        found.append(convolve(g, turned, None, channels * groups, side, reversed_pad))
    return found


def operands_of(name: str) -> tuple[Any, ...]:
    """The operands of `computed` in a case."""
    options = CASES[name]
    x, w, g = operands(**options)
    b = torch.from_numpy(np.random.default_rng(1).normal(size=len(w))).float()
    return x, w, g, b, options.get("pad", (0, 0)), options.get("groups", 1)


@pytest.mark.parametrize("name", list(CASES))
def test_they_are_the_convolution_and_its_gradients(name: str) -> None:
    x, w, g, b, pad, groups = operands_of(name)
    found = computed(x, w, g, b, pad, groups)
    values = [v.double().numpy() for v in (x, w, g)]
    inputs = [[*values[:2], b.double().numpy()], values, values]
    window, area = w.shape[1:].numel(), g.shape[2:].numel()
    terms = window, len(g) * area, window * len(w) // groups // w.shape[1]
    kinds = Conv2d, Conv2dWeightGrad, Conv2dInputGrad
    assert len(found) == (2 if max(pad) >= w.shape[2] else 3)
    for kind, of, result, count in zip(kinds, inputs, found, terms, strict=False):
        exact: list[list[Any]] = [[None]]
        kind(1, pad, groups).perform(None, of, exact)
        error = np.sqrt(np.mean((result.numpy() - exact[0][0]) ** 2) / np.mean(exact[0][0] ** 2))
        # Sums of n terms are off by sqrt(n) roundings, and the transforms amplify them.
        assert 0 < error < 6 * np.sqrt(count) * 2.0**-24, kind
        np.testing.assert_allclose(result, exact[0][0], 0, 1e-5 * np.abs(exact[0][0]).max())
        assert result.is_contiguous() or result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("side", "groups"), [(3, 1), (5, 2)])
def test_the_number_of_threads_changes_no_bit(side: int, groups: int) -> None:
    taps, pad = (side, side), (side // 2, side // 2)
    x, w, g = operands(11, (13, 13), 24, 80, taps, pad=pad, groups=groups)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(computed(x, w, g, None, pad, groups))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("processor", "features", "numbers"),
    [
        ("haswell", "+avx2,+fma", 8),
        ("sapphirerapids", "+avx2,+avx512f,+fma", 16),
        ("cannonlake", "+avx2,-avx512f,+avx512ifma", 8),
        ("znver4", "+avx2,+avx512f", 8),
        ("znver5", "+avx2,+avx512f", 16),
    ],
)
def test_vectors_are_as_long_as_multipliers(processor: str, features: str, numbers: int) -> None:
    assert _numbers_at_a_time(processor, features) == numbers


@pytest.mark.slow
@pytest.mark.skipif(VECTOR == 8, reason="this processor has no longer vectors")
def test_shorter_vectors_give_the_same_bits(tmp_path: Path) -> None:
    names = "several blocks", "groups of five taps"
    program = f"""
import torch
from tests.backend.test_winograd_loops import VECTOR, computed, operands_of
found = [computed(*operands_of(name)) for name in {names}]
torch.save([VECTOR, found], {str(tmp_path / "found.pt")!r})
"""
    other = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | other, check=True)
    length, found = torch.load(tmp_path / "found.pt")
    assert length == 8
    for name, results in zip(names, found, strict=True):
        own = computed(*operands_of(name))
        assert all(torch.equal(*both) for both in zip(own, results, strict=True))


def test_images_in_another_layout_give_the_same_bits() -> None:
    x, w, g = operands(2, (7, 7), 16, 16, (3, 3), pad=(1, 1))
    one = computed(x, w, g, None, (1, 1), 1)
    other = computed(x.contiguous(), w.contiguous(), g.contiguous(), None, (1, 1), 1)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_result_does_not_depend_on_the_other_pictures() -> None:
    x, w, _ = operands(9, (13, 13), 16, 16, (3, 3), pad=(1, 1))
    filters = transform_filters(w, 1)
    every = convolve(x, filters, None, 16, 3, (1, 1))
    alone = convolve(x[4:5], filters, None, 16, 3, (1, 1))
    assert torch.equal(every[4:5], alone)


def test_without_pictures_a_gradient_is_zero() -> None:
    x, w, g = operands(0, (6, 6), 8, 16, (3, 3))
    forward, of_filters, of_images = computed(x, w, g, None, (0, 0), 1)
    assert (forward.shape, of_images.shape) == (g.shape, x.shape)
    assert not of_filters.any()


def test_what_does_not_fit_is_refused() -> None:
    x, w, g = operands(2, (6, 6), 8, 16, (3, 3))
    with pytest.raises(TypingError):
        convolve(x.double(), transform_filters(w, 1), None, 16, 3, (0, 0))
    with pytest.raises(ValueError, match="x has channels 8, expected 16"):
        convolve(x, transform_filters(torch.cat([w, w], 1), 1), None, 16, 3, (0, 0))
    with pytest.raises(ValueError, match="x has channels 4, expected 8"):
        filter_gradient(x[:, :4], w, g, (0, 0), 1)
    with pytest.raises(ValueError, match=r"g has the shape \(2, 16, 4, 4\), expected .*6, 6"):
        filter_gradient(x, w, g, (1, 1), 1)


def test_filters_keep_their_dtype_whatever_pytorchs_default_is() -> None:
    x, w, _ = operands(2, (6, 6), 8, 16, (3, 3))
    expected = convolve(x, transform_filters(w, 1), None, 16, 3, (0, 0))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = convolve(x, transform_filters(w, 1), None, 16, 3, (0, 0))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("side", [3, 5])
def test_the_transforms_are_exact(side: int) -> None:
    """In one dimension, of polynomials: every coefficient of the product is found."""
    m = winograd_loops.TILE + 1 - side
    pixels, filters, results = winograd_loops._minimal_filtering(m, side)
    for place in range(winograd_loops.TILE):
        for tap in range(side):
            x, w = np.eye(winograd_loops.TILE)[place], np.eye(side)[tap]
            found = results @ ((pixels @ x) * (filters @ w))
            expected = [float(place == start + tap) for start in range(m)]
            np.testing.assert_allclose(found, expected, 0, 1e-14)
