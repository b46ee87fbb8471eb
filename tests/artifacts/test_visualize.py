"""Pictures of filters and predictions, pixel by pixel."""

import numpy as np
import pytest
from PIL import Image

from tandem.artifacts.visualize import RIGHT, WRONG, colour_filters, filter_grid, prediction_sheet


def grid_by_loops(filters: np.ndarray, across: int, scale: int, gap: int) -> np.ndarray:
    n, colours, size, _ = filters.shape
    down, side = -(-n // across), size * scale
    grid = np.full((down * (side + gap) - gap, across * (side + gap) - gap, colours), 255)
    for number in range(n):
        y, x = number // across * (side + gap), number % across * (side + gap)
        largest = np.abs(filters[number]).max()
        for row in range(side):
            for column in range(side):
                for colour in range(colours):
                    value = filters[number, colour, row // scale, column // scale]
                    shade = 0.5 if largest == 0 else (value / largest + 1) / 2
                    grid[y + row, x + column, colour] = round(255 * shade)
    return grid


@pytest.mark.parametrize(
    ("number", "across", "scale", "gap"), [(96, 12, 1, 1), (6, 3, 2, 3), (7, 7, 1, 0), (1, 1, 3, 1)]
)
def test_filters_lie_beside_each_other(number: int, across: int, scale: int, gap: int) -> None:
    filters = np.random.default_rng(0).standard_normal((number, 3, 5, 5)).astype(np.float32)
    filters[0] = 0
    expected = grid_by_loops(filters.astype(float), across, scale, gap)
    found = filter_grid(filters, scale, gap)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1  # halves may be rounded otherwise


def test_filters_that_are_not_finite_are_drawn_all_the_same() -> None:
    filters = np.full((2, 3, 2, 2), np.nan, np.float32)
    assert filter_grid(filters).dtype == np.uint8


def test_the_filters_that_see_colours_are_found() -> None:
    first, second = np.zeros((4, 3, 5, 5)), np.zeros((4, 2, 3, 3))
    weights = {"bias": np.zeros(3), "conv2": second, "conv1": first, "fc": np.zeros((3, 3))}
    assert colour_filters(weights) is first
    assert colour_filters({"conv2": second}) is None


def has_colour(picture: Image.Image, colour: str, where: tuple[int, int]) -> bool:
    return picture.getpixel(where) == tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def test_a_sheet_shows_each_picture_framed_by_whether_it_is_recognised() -> None:
    crops = np.zeros((5, 20, 20, 3), np.uint8)
    crops[:, ..., 1] = np.arange(0, 250, 50)[:, None, None]
    probabilities = np.eye(5, 4)[[0, 1, 2, 3, 0]] * 0.6 + 0.1
    sheet = prediction_sheet(crops, [0, 0, 2, 0, 0], probabilities, list("abcd"), across=3)
    width, height = (sheet.width + 4) // 3, (sheet.height + 4) // 2
    for number, right in enumerate((True, False, True, False, True)):
        y, x = number // 3 * height, number % 3 * width
        assert has_colour(sheet, RIGHT if right else WRONG, (x + 1, y + 1))
        assert sheet.getpixel((x + 90, y + 90)) == (0, 50 * number, 0)
        text = np.asarray(sheet)[y + width : y + height - 4, x : x + width - 4]
        assert (text < 100).all(axis=-1).sum() > 50  # letters
    prediction_sheet(crops[:1], [1], np.array([[0.25, 0.75]]), ["a", "b"])  # few classes
