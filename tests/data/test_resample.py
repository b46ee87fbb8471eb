"""Resizing by loops has Pillow's bits."""

from typing import Any

import numpy as np
import pytest

from tandem.data import resample
from tandem.data.decode import _box, resize_by_pillow
from tandem.data.resample import Resampler


@pytest.fixture(scope="module")
def resampler() -> Resampler:
    return Resampler()


def twice(resampler: Resampler, *arguments: Any) -> np.ndarray:
    """The result of the second time, for which the loops have been tried."""
    resampler(*arguments)
    return resampler(*arguments)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("size", [32, 57, 256])
@pytest.mark.parametrize(
    "shape",
    [(375, 500), (500, 375), (333, 500), (60, 50), (300, 3), (1, 9), (1, 1), (256, 341), (57, 57)],
)
@pytest.mark.parametrize("resize", ["squash", "shorter_side"])
def test_the_bits_are_pillows(
    resampler: Resampler, shape: tuple[int, int], size: int, resize: str
) -> None:
    box = _box(shape[::-1], size, resize)
    assert resampler._first(*shape, size, box) != "neither"  # so the loops are used
    for picture in (noise(*shape, 3), np.where(noise(*shape, 3) > 127, 255, 0).astype(np.uint8)):
        found = twice(resampler, picture, size, box)
        np.testing.assert_array_equal(found, resize_by_pillow(picture, size, box))


def test_what_comes_once_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resample, "_MOST_SHAPES", 2)
    resampler, tried = Resampler(), []
    monkeypatch.setattr(resampler, "_first", lambda *shape: (tried.append(shape), "neither")[1])
    for rows in (40, 41, 40, 42, 41, 41):  # with the third shape the first two are forgotten
        resampler(noise(rows, 50, 3), 32, None)
    assert tried == [(40, 50, 32, None), (41, 50, 32, None)]


def test_white_of_many_pixels_stays_white(resampler: Resampler) -> None:
    """Their weights, rounded, add up to more than one."""
    for shape in ((1, 65_500), (65_500, 1)):
        white = np.full((*shape, 3), 255, np.uint8)
        assert (twice(resampler, white, 32, None) == 255).all()
        assert resampler._first(*shape, 32, None) != "neither"


@pytest.mark.parametrize("size", [5, 40])
def test_where_pillow_rounds_otherwise_it_resizes(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(resample, "resize_by_pillow", lambda *some: 255 - resize_by_pillow(*some))
    picture = noise(30, 20, 3)
    np.testing.assert_array_equal(
        twice(Resampler(), picture, size, None), 255 - resize_by_pillow(picture, size, None)
    )
