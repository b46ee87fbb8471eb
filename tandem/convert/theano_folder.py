"""Conversion of the original program's weights, a folder of ``.npy`` files, bit for bit.

After epoch E, ``W_0_E.npy`` and ``b_0_E.npy`` hold layer 0; each group of a layer with two has its
own files, ``W0_1_E.npy`` and ``W1_1_E.npy``. Layers 0 to 4 are the convolutions, 5 to 7 the fully
connected ones. Filters are (channel, row, column, filter). Theano convolves and our network
correlates: a convolution is a correlation with filters flipped in both directions. Fully connected
weights are (in, out) in both, and conv5's output is flattened as (channel, row, column) in both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tandem.data.safe_io import read_npy
from tandem.errors import InputError, explained
from tandem.files import write_array

# Setting of the original: its cuDNN convolves, its cuda-convnet correlates.
LibConv = Literal["cudnn", "cudaconvnet"]

_FIRST = re.compile(r"W_0_(\d+)\.npy")


@dataclass(frozen=True)
class Part:
    """A file: the part of a parameter that belongs to one group."""

    name: str  # without the epoch, such as W0_1
    shape: tuple[int, ...]

    def path(self, folder: Path, epoch: int) -> Path:
        return folder / f"{self.name}_{epoch}.npy"


def parts(network: Any) -> dict[str, tuple[Part, ...]]:
    """List the files of each parameter of a network by the parameter's name."""
    found = {}
    for number, layer in enumerate((*network.convolutions, *network.fully_connected)):
        groups = getattr(layer, "groups", 1)
        marks = [""] if groups == 1 else [str(group) for group in range(groups)]
        for kind, letter in (("weight", "W"), ("bias", "b")):
            name = f"{layer.name}.{kind}"
            shape = list(network.parameters[name].type.shape)
            shape = shape if len(shape) < 4 else [*shape[1:], shape[0]]
            shape[-1] //= groups
            found[name] = tuple(Part(f"{letter}{mark}_{number}", tuple(shape)) for mark in marks)
    return found


def find_epoch(folder: Path) -> int:
    """Find the epoch of the weights in a folder; raises InputError unless there is one."""
    with explained(folder, "cannot be read"):
        names = [path.name for path in folder.iterdir()]
    epochs = sorted(int(match[1]) for name in names if (match := _FIRST.fullmatch(name)))
    if not epochs:
        raise InputError(f"{folder}: no weights of the original program: expected W_0_65.npy, ...")
    if len(epochs) > 1:
        listed = ", ".join(map(str, epochs))
        raise InputError(f"{folder}: found weights of the epochs {listed}: choose one by --epoch N")
    return epochs[0]


def find_classes(folder: Path, epoch: int) -> int:
    """Find the number of classes by the last bias; raises InputError without such a vector."""
    return len(_read(folder / f"b_7_{epoch}.npy", (None,)))


def read_folder(
    folder: Path, epoch: int, network: Any, lib_conv: LibConv = "cudnn"
) -> dict[str, np.ndarray]:
    """Read the original's weights: arrays by name, in logical layout and the files' dtype.

    Raises InputError if a file is missing, is damaged, or has another shape.
    """
    weights = {}
    for name, files in parts(network).items():
        arrays = [_read(part.path(folder, epoch), part.shape) for part in files]
        whole = np.concatenate(arrays, axis=-1)
        if whole.ndim == 4:
            whole = _flipped(whole.transpose(3, 0, 1, 2), lib_conv)
        weights[name] = np.ascontiguousarray(whole)
    return weights


def write_folder(
    folder: Path,
    epoch: int,
    weights: Mapping[str, np.ndarray],
    network: Any,
    lib_conv: LibConv = "cudnn",
) -> None:
    """Write weights as the original's files: the inverse of `read_folder`, bit for bit.

    Raises InputError if the folder is not empty, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder}: is not empty; expected a new folder to write to")
        for name, files in parts(network).items():
            whole = weights[name]
            if whole.ndim == 4:
                whole = _flipped(whole, lib_conv).transpose(1, 2, 3, 0)
            for part, array in zip(files, np.split(whole, len(files), axis=-1), strict=True):
                write_array(part.path(folder, epoch), np.ascontiguousarray(array))
    except OSError as error:
        path = error.filename or folder
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _flipped(filters: np.ndarray, lib_conv: LibConv) -> np.ndarray:
    """Flip filters (filter, channel, row, column) that were used to convolve, or back."""
    return filters[:, :, ::-1, ::-1] if lib_conv == "cudnn" else filters


def _read(path: Path, expected: tuple[int | None, ...]) -> np.ndarray:
    def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
        fits = len(shape) == len(expected) and all(
            wanted in (None, length) for length, wanted in zip(shape, expected, strict=True)
        )
        if not fits or dtype.kind != "f" or dtype.itemsize not in (4, 8):
            shown = ", ".join("any" if length is None else str(length) for length in expected)
            raise InputError(f"{path}: holds {dtype} {shape}, expected float32 ({shown})")

    try:
        array = read_npy(path, check)
    except FileNotFoundError:
        hint = (
            "; the original program does not save the biases of layers with two groups"
            if re.match(r"b[01]_", path.name)
            else ""
        )
        raise InputError(f"{path}: is missing{hint}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as weights: {error}") from None
    return array.astype(array.dtype.newbyteorder("="), copy=False)
