"""Checks of a model's arrays, and their form in the files of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.nn.losses import Loss
from tandem.preprocessing.arrays import training_rows
from tandem.validation import unmasked

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Inputs and targets of one split."""

    x: np.ndarray  # uint8 (n, S, S) or (n, S, S, RGB), or float32 (n, ...)
    y: np.ndarray  # int64 (n,), or float32 (n, ...)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def are_pictures(self) -> bool:
        """Return whether they are stored as pictures rather than as numbers."""
        return self.x.dtype == np.uint8


def checked_rows(
    x: Any,
    y: Any,
    shape: Shape,
    units: int,
    loss: Loss,
    *,
    name: str = "",
    may_crop: bool = False,
) -> Rows:
    """Check inputs and targets against a model's input shape, its outputs and its loss.

    Parameters
    ----------
    x : array-like (n, ...)
        Without its last axis where that has length 1.
    y : array-like
        What the loss takes: labels (n,), rows of a number for each class, or numbers.
    shape : tuple of int
        Of a row of the model's input.
    units : int
        Outputs of a row.
    name : str
        Begins the names of the arrays in messages, such as "validation_data: ".
    may_crop : bool
        Whether pictures may be larger than the model's input.

    Raises
    ------
    InputError
        A shape, a dtype or a value cannot be used.
    """
    inputs = checked_inputs(x, shape, f"{name}x", may_crop)
    targets = as_array(y, f"{name}y")
    if targets.ndim == 0 or len(targets) != len(inputs):
        raise InputError(
            f"{name}y: found shape {targets.shape}, expected {len(inputs)} rows, as x has"
        )
    targets = _checked_targets(targets, units, loss, f"{name}y")
    if targets.dtype != np.int64:
        inputs = _as_numbers(inputs, shape)
    return Rows(inputs, targets)


def as_array(values: Any, name: str) -> np.ndarray:
    """An array of numbers; raises InputError for what is none."""
    if values is None:
        raise InputError(f"{name}: found None, expected an array")
    try:
        found = unmasked(values, name)
    except ValueError as error:  # nested lists of different lengths
        raise InputError(f"{name}: found no array ({error}), expected rows of one shape") from error
    if found.dtype.kind not in "biuf":
        raise InputError(f"{name}: found {found.dtype}, expected numbers")
    return found


def checked_inputs(x: Any, shape: Shape, name: str = "x", may_crop: bool = False) -> np.ndarray:
    """Check a model's inputs: uint8 pictures as they are, anything else as float32 (n, ...).

    With `may_crop` pictures may be larger than the model's input.
    """
    if x is None:
        raise InputError(f"{name}: found None, expected an array of shape {_rows(shape)}")
    found = as_array(x, name)
    if found.dtype == np.uint8 and len(shape) == 3 and shape[0] == shape[1] and shape[2] in (1, 3):
        return _checked_pictures(found, shape, name, may_crop)
    if found.shape[1:] != shape:
        if found.ndim == len(shape) and shape[-1:] == (1,):
            found = found[..., np.newaxis]
        elif found.ndim == len(shape) + 2 and found.shape[-1] == 1:
            found = found[..., 0]
    if found.ndim == 0 or found.shape[1:] != shape or len(found) == 0:
        raise InputError(f"{name}: found shape {np.shape(x)}, expected {_rows(shape)}")
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(found, np.float32)
    bad = ~np.isfinite(numbers.reshape(len(numbers), -1)).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        value = found[row].reshape(-1)[~np.isfinite(numbers[row].reshape(-1))][0]
        raise InputError(
            f"{name}: found {value} in row {row}, expected finite numbers that float32 can hold"
        )
    return numbers


def _checked_pictures(found: np.ndarray, shape: Shape, name: str, may_crop: bool) -> np.ndarray:
    side, _, channels = shape
    if channels == 1 and found.ndim == 4 and found.shape[-1] == 1:
        found = found[..., 0]
    sizes = found.shape[1:3]
    fits = sizes == (side, side) or (may_crop and sizes[:1] == sizes[1:] and sizes[0] >= side)
    axes = 3 if channels == 1 else 4
    if len(found) == 0 or found.ndim != axes or not fits or found.shape[3:] not in ((), (3,)):
        raise InputError(f"{name}: found shape {found.shape}, expected {_rows(shape)}")
    return np.ascontiguousarray(found)


def _checked_targets(y: np.ndarray, units: int, loss: Loss, name: str) -> np.ndarray:
    """Targets as labels, int64 (n,), or as rows of numbers, float32 (n, units)."""
    if loss.targets == "labels" or (loss.targets == "either" and y.ndim == 1):
        return _checked_labels(y, units, loss, name)
    rows = y[:, np.newaxis] if y.ndim == 1 else y
    if loss.targets == "one-hot" and y.ndim == 1 and units > 1:
        raise InputError(
            f"{name}: found shape {y.shape}, expected {_rows((units,))} for {loss.name}: for "
            "labels take sparse_categorical_crossentropy, or make one-hot rows of them"
        )
    if rows.shape[1:] != (units,):
        raise InputError(
            f"{name}: found shape {y.shape}, expected {_rows((units,))}, as the model's output"
        )
    if not np.isfinite(rows).all():
        row = int((~np.isfinite(rows)).any(axis=1).argmax())
        raise InputError(f"{name}: found a number that is not finite in row {row}, expected finite")
    if loss.targets in ("one-hot", "either") and _is_one_hot(rows):
        return rows.argmax(axis=1).astype(np.int64)
    if loss.output == "sigmoid" and (rows.min() < 0 or rows.max() > 1):
        raise InputError(
            f"{name}: found numbers from {rows.min():g} to {rows.max():g}, expected 0 to 1 for "
            f"{loss.name}"
        )
    return np.ascontiguousarray(rows, np.float32)


def _checked_labels(y: np.ndarray, units: int, loss: Loss, name: str) -> np.ndarray:
    if y.ndim == 2 and y.shape[1] == units and units > 1:
        raise InputError(
            f"{name}: found shape {y.shape}, expected labels of shape (n,) for {loss.name}: for "
            "one-hot rows take categorical_crossentropy"
        )
    labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if labels.ndim != 1:
        raise InputError(f"{name}: found shape {y.shape}, expected labels of shape (n,)")
    if labels.dtype.kind == "f":
        raise InputError(
            f"{name}: found {labels.dtype}, expected whole numbers for {loss.name}: labels from 0 "
            f"to {units - 1}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= units:
        raise InputError(
            f"{name}: found labels from {low} to {high}, expected 0 to {units - 1}, as the model "
            f"has {units} outputs"
        )
    return labels.astype(np.int64)


def _is_one_hot(rows: np.ndarray) -> bool:
    return bool(((rows == 0) | (rows == 1)).all() and (rows.sum(axis=1) == 1).all())


def divided(rows: Rows, validation_split: float) -> tuple[Rows, Rows]:
    """Divide rows: the last ones, a fraction `validation_split`, are for validation."""
    begin = training_rows(len(rows), validation_split)
    return Rows(rows.x[:begin], rows.y[:begin]), Rows(rows.x[begin:], rows.y[begin:])


def as_rows(parts: Sequence[Rows], units: int, shape: Shape) -> list[Rows]:
    """Give all splits one form: labels or numbers, pictures or numbers."""
    have_labels = all(rows.y.dtype == np.int64 for rows in parts)
    are_pictures = have_labels and all(rows.are_pictures for rows in parts)
    return [_as(rows, units, shape, have_labels, are_pictures) for rows in parts]


def _as(rows: Rows, units: int, shape: Shape, have_labels: bool, are_pictures: bool) -> Rows:
    x, y = rows.x, rows.y
    if not are_pictures:
        x = _as_numbers(x, shape)
    if not have_labels and y.dtype == np.int64:
        y = np.eye(units, dtype=np.float32)[y]
    return Rows(x, y)


def _as_numbers(x: np.ndarray, shape: Shape) -> np.ndarray:
    """Rows as float32 (n, ...); pictures that would have to be cropped are refused."""
    if x.dtype != np.uint8:
        return x
    if x.shape[1:3] != shape[:2]:
        raise InputError(
            f"x: found shape {x.shape}, expected {_rows(shape)}: pictures are cropped where all "
            "are uint8 and have class labels"
        )
    return x.astype(np.float32).reshape(len(x), *shape)


def _rows(shape: Shape) -> str:
    return f"({', '.join(['n', *map(str, shape)])})"
