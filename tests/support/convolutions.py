"""Operands of convolutions and of their gradients."""

import numpy as np
import torch

from tandem.ops.base import count_windows

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
