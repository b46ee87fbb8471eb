"""Pictures of a network's first filters and of a few of its predictions."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

RIGHT, WRONG = "#0072B2", "#D55E00"  # distinct also for the colour-blind

_COLOURS = 3
_TILE = 176  # pixels on each side of a picture on a sheet
_FRAME = 4
_LINE = 15  # pixels between lines of text
_SHOWN = 3  # classes with their probabilities


def colour_filters(weights: Mapping[str, npt.NDArray]) -> npt.NDArray | None:
    """The first filters with three input channels: (filter, RGB, row, column), or None."""
    for array in weights.values():
        if array.ndim == 4 and array.shape[1] == _COLOURS:
            return array
    return None


def filter_grid(filters: npt.NDArray, scale: int = 1, gap: int = 1) -> npt.NDArray[np.uint8]:
    """Arrange filters in a grid on white, wider than high.

    Each filter is scaled by its own largest weight; grey is zero.

    Parameters
    ----------
    filters : float (filter, RGB, row, column)
    scale : int
        Pixels of the grid for one of a filter, in each direction.
    gap : int
        White pixels between two filters.
    """
    n, _, rows, columns = filters.shape
    largest = np.abs(filters).max(axis=(1, 2, 3), keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        shades = np.nan_to_num(0.5 + 0.5 * filters / largest, nan=0.5)
    tiles = np.rint(255 * shades).astype(np.uint8).transpose(0, 2, 3, 1)
    tiles = tiles.repeat(scale, axis=1).repeat(scale, axis=2)
    rows, columns = rows * scale, columns * scale
    down = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0 or d * d <= n // 2)
    across = -(-n // down)
    grid = np.full((down * (rows + gap) - gap, across * (columns + gap) - gap, 3), 255, np.uint8)
    for number, tile in enumerate(tiles):
        y, x = divmod(number, across)
        y, x = y * (rows + gap), x * (columns + gap)
        grid[y : y + rows, x : x + columns] = tile
    return grid


def prediction_sheet(
    crops: npt.NDArray[np.uint8],
    labels: Sequence[int],
    probabilities: npt.NDArray,
    names: Sequence[str],
    across: int = 4,
) -> Image.Image:
    """Draw pictures with their true classes and the network's predictions, `across` in a row.

    A frame is blue if the first prediction is right, otherwise orange.

    Parameters
    ----------
    crops : uint8 (n, S, S, RGB)
    labels : sequence of int
        True classes.
    probabilities : float (n, classes)
    names : sequence of str
        Of the classes.
    """
    lines, frames = [], []
    for label, row in zip(labels, probabilities, strict=True):
        best = np.argsort(-row, kind="stable")[:_SHOWN].tolist()
        shown = [f"{100 * row[k]:.0f} %  {names[k]}" for k in best]
        lines.append([f"is {names[label]}", *shown])
        frames.append(RIGHT if best[0] == label else WRONG)
    return contact_sheet(crops, lines, 1 + _SHOWN, frames, across)


def contact_sheet(
    crops: npt.NDArray[np.uint8],
    captions: Sequence[Sequence[str]],
    lines: int,
    frames: Sequence[str],
    across: int,
) -> Image.Image:
    """Draw pictures with captions under them, `across` in a row, on white.

    Parameters
    ----------
    crops : uint8 (n, S, S, RGB)
    captions : sequence of sequences of str
        At most `lines` of each picture; what is too long for its width is cut off.
    frames : sequence of str
        Colours.
    """
    width, height = _TILE + 2 * _FRAME, _TILE + 2 * _FRAME + lines * _LINE + _FRAME
    down = -(-len(crops) // across)
    size = (across * (width + _FRAME) - _FRAME, down * (height + _FRAME) - _FRAME)
    sheet = Image.new("RGB", size, "white")
    for number, (crop, caption, frame) in enumerate(zip(crops, captions, frames, strict=True)):
        y, x = divmod(number, across)
        corner = x * (width + _FRAME), y * (height + _FRAME)
        sheet.paste(_captioned(crop, caption, frame, (width, height)), corner)
    return sheet


def _captioned(
    crop: npt.NDArray[np.uint8], caption: Sequence[str], frame: str, size: tuple[int, int]
) -> Image.Image:
    tile = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(tile), ImageFont.load_default(size=12)
    tile.paste(frame, (0, 0, size[0], size[0]))
    picture = Image.fromarray(crop).resize((_TILE, _TILE), Image.Resampling.BICUBIC)
    tile.paste(picture, (_FRAME, _FRAME))
    for number, line in enumerate(caption):
        draw.text((_FRAME, size[0] + _FRAME + number * _LINE), line, "black", font)
    return tile
