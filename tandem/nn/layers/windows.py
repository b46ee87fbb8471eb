"""The windows in images: Keras's padding "valid" and "same"."""

from tandem.nn.arguments import Pair
from tandem.nn.layers.base import Layer, Shape

Side = tuple[int, int]
"""Pixels before and behind an axis."""


def same_padding(length: int, reach: int, stride: int) -> Side:
    """Zeros on both sides that leave ``ceil(length / stride)`` windows; more of them behind."""
    total = max(0, (-(-length // stride) - 1) * stride + reach - length)
    return total // 2, total - total // 2


def window_counts(
    layer: Layer, image: Shape, reach: tuple[int, int], strides: Pair, padding: str
) -> tuple[int, int]:
    """Rows and columns of windows; InputError if none fits into an image."""
    if padding == "valid" and any(n < r for n, r in zip(image[:2], reach, strict=True)):
        raise layer.fault(
            f"an input of shape {image}", f"at least {reach[0]} rows and {reach[1]} columns"
        )
    rows, columns = (
        -(-n // s) if padding == "same" else (n - r) // s + 1
        for n, r, s in zip(image[:2], reach, strides, strict=True)
    )
    return rows, columns
