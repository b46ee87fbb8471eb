"""Reading of the mean image."""

from pathlib import Path

import numpy as np

from tandem.data.safe_io import read_npy
from tandem.errors import InputError


def read_mean(path: Path | None, image_size: int | None = None) -> np.ndarray:
    """Read the mean image, float32 (RGB, row, column) from 0 to 255.

    Without a `path` it is zero, of `image_size` rows and columns. Raises InputError if it is
    missing, not finite, or not of `image_size` rows and columns, where that is given.
    """

    if path is None:
        return np.zeros((3, image_size or 1, image_size or 1), np.float32)

    def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
        side = image_size or shape[-1] if shape else None
        if shape != (3, side, side) or dtype.kind != "f":
            expected = "(3, S, S)" if image_size is None else f"(3, {side}, {side})"
            raise InputError(
                f"{path}: the mean image is {dtype} {shape}, the pictures need float32 {expected}"
            )

    try:
        mean = read_npy(path, check)
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no mean image; preprocessing writes it, and mean_file names it"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: this is not a mean image in .npy format: {error}") from error
    if not np.isfinite(mean).all():
        raise InputError(f"{path}: the mean image holds values that are not finite")
    return mean.astype(np.float32)
