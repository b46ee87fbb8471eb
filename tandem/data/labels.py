"""Checks of label files against what a manifest says of them."""

from pathlib import Path

import numpy as np

from tandem.data.safe_io import read_npy, sha256_of
from tandem.errors import InputError, explained
from tandem.memory import CLASS_LABEL, RowType

_REMEDY = "preprocessing/make_labels.py writes them from the manifest"


def check_class_labels(path: Path, expected: np.ndarray) -> None:
    """Refuse labels, by an InputError, that are not the expected ones: int64 (pictures,)."""

    def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
        if dtype != np.int64:
            raise InputError(f"{path}: found {dtype}, expected int64 labels; {_REMEDY}")
        if shape != expected.shape:
            raise InputError(
                f"{path}: found labels of shape {shape}, expected {expected.shape}, one for"
                f" each picture of the manifest; {_REMEDY}"
            )

    try:
        labels = read_npy(path, check)
    except FileNotFoundError:
        raise InputError(f"{path}: there are no labels; {_REMEDY}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: the labels cannot be read: {error}; {_REMEDY}") from None
    differing = np.flatnonzero(labels != expected)
    if len(differing):
        first = differing[0]
        raise InputError(
            f"{path}: found label {labels[first]} for picture {first}, expected {expected[first]}"
            f" as the manifest says ({len(differing)} labels differ); {_REMEDY}"
        )


def check_array_labels(path: Path, rows: int, target: RowType, classes: int, sha256: str) -> None:
    """Refuse labels of `rows` rows, by an InputError, that have another checksum or no class."""
    expected = (rows, *target.shape)

    def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
        if (dtype.name, shape) != (target.dtype, expected):
            raise InputError(
                f"{path}: found labels {dtype} {shape}, expected {target.dtype} {expected} as the"
                " manifest says"
            )

    with explained(path, "the labels cannot be read", ValueError):
        labels, found = read_npy(path, check), sha256_of(path)
    if found != sha256:
        raise InputError(
            f"{path}: found labels of SHA-256 {found[:16]}..., expected {sha256[:16]}... as the"
            " manifest says: the file is damaged, or of other arrays"
        )
    if target != CLASS_LABEL:
        return
    low, high = labels.min(initial=0), labels.max(initial=0)
    if low < 0 or high >= classes:
        raise InputError(f"{path}: found labels from {low} to {high}, expected 0 to {classes - 1}")
