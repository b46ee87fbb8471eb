"""Data sets of arrays in memory, as batch files, labels and a manifest.

Pictures become those of preprocessing, manifest format 1; other arrays rows of float32, or uint8 as
they are, format 2. The manifest is written last, with the checksums of the arrays and of every
file: a folder without one holds nothing, and one with it everything that it names.
"""

import hashlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import floor, prod
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tandem import __version__
from tandem.data.batch_file import write_rows
from tandem.data.colour import COVARIANCE_NAME, colour_moments, covariance_of
from tandem.data.manifest import (
    MANIFEST_NAME,
    SPLITS,
    ArrayManifest,
    ArrayRows,
    ArraySplit,
    ArrayTargets,
    Manifest,
    Split,
    labels_name,
    read_any_manifest,
    write_manifest,
)
from tandem.data.safe_io import sha256_of
from tandem.errors import InputError, explained
from tandem.files import free_bytes, locked, make_folder, remove_partials, write_array
from tandem.memory import RowType
from tandem.preprocessing.batches import batch_name
from tandem.preprocessing.border import inside, mean_colour
from tandem.preprocessing.prepare import MEAN_NAME, mean_of
from tandem.preprocessing.progress import PROGRESS_NAME
from tandem.validation import is_printable, listed, shown, shown_size

FILE_NBYTES = 64 << 20  # of a batch file, unless a single row is larger
_MOST_CLASSES = 1 << 20
_EXACT = 1 << 24  # the whole numbers up to it are exact in float32
_FOLDERS = (*(f"{split}_hkl" for split in SPLITS), "labels", "misc")
_MISC = (f"misc/{MEAN_NAME}", f"misc/{COVARIANCE_NAME}")

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Rows, (n, ...), and what belongs to each: (n,) or (n, ...)."""


def write_pictures(
    folder: Path,
    train: Arrays | None,
    validation: Arrays | None,
    class_names: Sequence[str] | None = None,
    pad: int = 0,
) -> Manifest:
    """Write pictures as preprocessing does, with their mean image and covariance of colours.

    Parameters
    ----------
    train, validation : pair of arrays, or None for no pictures
        Pictures, uint8 (n, S, S), (n, S, S, 1) or (n, S, S, RGB), and the number of each one's
        class, integers (n,). Grey is stored as RGB. Their order is kept. Without training pictures
        there is neither mean nor covariance.
    class_names : sequence of str, optional
        Of class 0, 1, ...; by default their numbers.
    pad : int
        Pixels of a border of the mean colour on each side, for random crops.

    Raises
    ------
    InputError
        The arrays cannot be used, or the folder cannot be written or holds a data set.
    """
    given = _given(train, validation)
    sides = {x.shape[1] for x, _ in given.values() if are_square(x)}
    if len(sides) != 1 or not all(are_square(x) for x, _ in given.values()):
        found = " and ".join(f"{x.dtype} {x.shape}" for x, _ in given.values())
        raise InputError(
            f"x: found {found}, expected uint8 pictures (n, S, S), (n, S, S, 1) or (n, S, S, 3) of"
            " one size S"
        )
    if pad < 0:
        raise InputError(f"pad: found {pad}, expected at least 0 pixels")
    side, labels = sides.pop() + 2 * pad, _class_labels(given)
    names = _class_names(labels, class_names)
    per_file = max(1, FILE_NBYTES // (side * side * 3))
    with _new(folder, sum(len(x) for x, _ in given.values()) * side * side * 3):
        colour = np.zeros(3, np.uint8)
        if "train" in given:
            colour = _write_mean(folder, given["train"][0], pad, per_file)
        splits = {}
        for split in SPLITS:
            x = given[split][0] if split in given else np.empty((0, 1, 1), np.uint8)
            chunks = (_padded(rgb, pad, colour) for rgb in _pictures(x, per_file))
            files = _write_split(folder, split, chunks, labels[split])
            numbers = tuple(f"{number:07d}" for number in range(len(x)))
            splits[split] = Split(files, numbers, labels[split])
        manifest = Manifest(
            image_size=side,
            layout="b01c",
            pictures_per_file=per_file,
            wnids=names,
            seed=0,
            versions=_versions(),
            splits=splits,
            pad=pad,
            source=_source(train, validation),
            sha256=_sums(folder, [*_files(splits), *(_MISC if "train" in given else ())]),
        )
        write_manifest(folder / MANIFEST_NAME, manifest)
    return manifest


def write_arrays(
    folder: Path,
    train: Arrays | None,
    validation: Arrays | None,
    class_names: Sequence[str] | None = None,
) -> ArrayManifest:
    """Write rows of any shape as float32, or uint8, with classes or with float32 targets.

    Parameters
    ----------
    train, validation : pair of arrays, or None for no rows
        Rows, numbers (n, ...) of 1 to 3 further axes, if 3 (n, row, column, channel), and a target
        for each: the number of its class, integers (n,); else numbers (n, ...) of up to 3 further
        axes, which become float32. Their order is kept. Rows
        that are all uint8 stay so.
    class_names : sequence of str, optional
        Of class 0, 1, ..., by default their numbers; of targets those of each value, or none.

    Raises
    ------
    InputError
        The arrays cannot be used, hold a number that is not finite in float32, or the folder
        cannot be written or holds a data set.
    """
    given = _given(train, validation)
    shapes = {x.shape[1:] for x, _ in given.values()}
    if len(shapes) != 1 or not 1 <= len(shape := shapes.pop()) <= 3 or 0 in shape:
        found = " and ".join(str(x.shape) for x, _ in given.values())
        raise InputError(f"x: found arrays {found}, expected (n, ...) with 1 to 3 axes of a row")
    targets, names, labels = _targets(given, class_names)
    are_bytes = all(x.dtype == np.uint8 for x, _ in given.values())
    dtype: Literal["uint8", "float32"] = "uint8" if are_bytes else "float32"
    row = RowType(dtype, shape)
    per_file = max(1, FILE_NBYTES // row.nbytes)
    with _new(folder, row.nbytes * sum(len(x) for x, _ in given.values())):
        splits = {}
        for split in SPLITS:
            x = given[split][0] if split in given else np.empty((0, *shape), dtype)
            parts = _parts(len(x), per_file)
            chunks = (x[part] if are_bytes else _finite("x", x, part) for part in parts)
            splits[split] = ArraySplit(len(x), _write_split(folder, split, chunks, labels[split]))
        manifest = ArrayManifest(
            pixels=ArrayRows(dtype, shape),
            targets=targets,
            rows_per_file=per_file,
            source=_source(train, validation),
            versions=_versions(),
            splits=splits,
            sha256=_sums(folder, _files(splits)),
            wnids=names,
        )
        write_manifest(folder / MANIFEST_NAME, manifest)
    return manifest


def checksum(*arrays: npt.NDArray[Any] | None) -> str:
    """SHA-256, in hexadecimal, of arrays as they are given: dtype, shape and elements in C order.

    None stands for no array. Data sets are known by that of their training rows and targets, then
    those of validation.
    """
    digest = hashlib.sha256()
    for array in arrays:
        about = "none" if array is None else f"{array.dtype.str} {array.shape}"
        digest.update(f"{about}\n".encode())
        if array is None or not array.size:
            continue
        row = array[:1].nbytes if array.ndim else array.nbytes
        for part in _parts(len(array), max(1, FILE_NBYTES // row)) if array.ndim else [...]:
            digest.update(np.ascontiguousarray(array[part]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def matches(folder: Path, source: str) -> bool:
    """Return whether a folder holds the data set of arrays of this `checksum`.

    False if it holds none. Every file is read. Raises InputError if the folder holds a data set of
    other arrays, or a file is missing or damaged.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return False
    manifest = read_any_manifest(path)
    if manifest.source != source:
        found = "none" if manifest.source is None else f"{manifest.source[:16]}..."
        raise InputError(
            f"{folder}: found a data set of other arrays (checksum {found}), expected the same as"
            f" before ({source[:16]}...): pass the same arrays, or choose another folder"
        )
    for file, expected in manifest.sha256.items():
        with explained(folder / file, "cannot be read", ValueError):
            found = sha256_of(folder / file)
        if found != expected:
            raise InputError(
                f"{folder / file}: found a damaged file of SHA-256 {found[:16]}..., expected"
                f" {expected[:16]}... as the manifest says: delete {folder} to have it written"
                " again"
            )
    return True


def training_rows(count: int, fraction: float, name: str = "validation_split") -> int:
    """Rows for training where the last ones, a fraction, are for validation, as in Keras.

    Raises InputError, of the argument `name`, if either has none.
    """
    if not isinstance(fraction, Real) or not 0 < fraction < 1:
        raise InputError(
            f"{name}: found {shown(fraction)}, expected a fraction above 0 and below 1"
        )
    rows = floor(count * (1 - fraction))
    if not 0 < rows < count:
        raise InputError(
            f"{name}: found {fraction:g} of {count} rows, expected at least one row for training "
            "and one for validation"
        )
    return rows


# Checks


def _given(train: Arrays | None, validation: Arrays | None) -> dict[str, Arrays]:
    """The splits that have rows."""
    found = {}
    for split, pair in zip(SPLITS, (train, validation), strict=True):
        if pair is None:
            continue
        x, y = pair
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise InputError(
                f"y: found the shape {y.shape}, expected a row for each of x {x.shape}"
            )
        for name, array in (("x", x), ("y", y)):
            if array.dtype.kind not in "biuf":
                raise InputError(f"{name}: found {array.dtype}, expected numbers")
        if len(x):
            found[split] = pair
    if not found:
        raise InputError("x: found no rows, expected at least one")
    return found


def are_square(x: npt.NDArray[Any]) -> bool:
    """Return whether an array is of pictures as `write_pictures` takes them."""
    return (
        x.dtype == np.uint8
        and x.ndim in (3, 4)
        and x.shape[1] == x.shape[2] > 0
        and (x.ndim == 3 or x.shape[3] in (1, 3))
    )


def _class_labels(given: dict[str, Arrays]) -> dict[str, npt.NDArray[np.int64]]:
    labels = dict.fromkeys(SPLITS, np.empty(0, np.int64))
    for split, (_, y) in given.items():
        if y.dtype.kind not in "iu" or y.ndim != 1:
            raise InputError(
                f"y: found {y.dtype} {y.shape}, expected integers (n,), classes from 0"
            )
        if y.min() < 0 or int(y.max()) >= _MOST_CLASSES:
            raise InputError(
                f"y: found labels from {y.min()} to {y.max()}, expected classes from 0 to at most "
                f"{_MOST_CLASSES - 1}; integers that are no classes have to be float32"
            )
        labels[split] = y.astype(np.int64)
    return labels


def _class_names(
    labels: dict[str, npt.NDArray[np.int64]], names: Sequence[str] | None
) -> tuple[str, ...]:
    most = max(int(y.max(initial=0)) for y in labels.values())
    if names is None:
        return tuple(map(str, range(most + 1)))
    fit = all(isinstance(name, str) and is_printable(name) for name in names)
    if len(set(names)) != len(names) or not fit:
        found = listed([ascii(name) for name in names])
        raise InputError(f"class_names: found {found}, expected printable names, each once")
    if most >= len(names):
        raise InputError(
            f"y: found the label {most}, expected 0 to {len(names) - 1}, as there are"
            f" {len(names)} class names"
        )
    return tuple(names)


def _targets(
    given: dict[str, Arrays], class_names: Sequence[str] | None
) -> tuple[ArrayTargets, tuple[str, ...], dict[str, npt.NDArray[Any]]]:
    """Return what the targets are, the names of classes if any, and the labels of every split."""
    if all(y.dtype.kind in "iu" and y.ndim == 1 for _, y in given.values()):
        classes = _class_labels(given)
        names = _class_names(classes, class_names)
        return ArrayTargets(classes=len(names)), names, dict(classes)
    shapes = {y.shape[1:] for _, y in given.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) > 3 or 0 in shape:
        found = " and ".join(f"{y.dtype} {y.shape}" for _, y in given.values())
        raise InputError(f"y: found {found}, expected (n, ...) with at most 3 axes of a target")
    if class_names is not None and len(class_names) != prod(shape):
        raise InputError(
            f"class_names: found {len(class_names)}, expected {prod(shape)}, one for each value of"
            f" a target of shape {shape}"
        )
    labels: dict[str, npt.NDArray[Any]] = dict.fromkeys(SPLITS, np.empty((0, *shape), np.float32))
    labels |= {split: _finite("y", y, slice(None)) for split, (_, y) in given.items()}
    return ArrayTargets(shape=shape), tuple(class_names or ()), labels


def refuse_rounded(name: str, values: npt.NDArray[Any]) -> None:
    """Refuse whole numbers that float32, in which rows are stored, does not hold."""
    if values.dtype.kind in "iu" and values.size:
        found = max((int(values.min()), int(values.max())), key=abs)
        if abs(found) > _EXACT:
            raise InputError(
                f"{name}: found {found}, expected whole numbers up to {_EXACT}: rows are float32"
            )


def _finite(name: str, values: npt.NDArray[Any], part: slice) -> npt.NDArray[np.float32]:
    """Some rows in float32."""
    refuse_rounded(name, values[part])
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(values[part], np.float32)
    bad = np.flatnonzero(~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1))
    if len(bad):
        raise InputError(
            f"{name}: found a number that is not finite in row {(part.start or 0) + bad[0]},"
            " expected finite numbers of float32"
        )
    return rows


# Files


@contextmanager
def _new(folder: Path, nbytes: int) -> Iterator[None]:
    """Make a folder for a data set of `nbytes`, and hold its lock.

    Raises InputError where it cannot be written.
    """
    make_folder(folder)
    try:
        with locked(folder):
            for name in (MANIFEST_NAME, PROGRESS_NAME):
                if (folder / name).exists():
                    raise InputError(
                        f"{folder}: found {name} of a data set already, expected a folder without"
                        " one"
                    )
            for name in _FOLDERS:
                make_folder(folder / name)
                remove_partials(folder / name)
            if nbytes > (free := free_bytes(folder)):
                raise InputError(
                    f"{folder}: found {shown_size(free)} free, expected {shown_size(nbytes)} for"
                    " the arrays"
                )
            yield
    except OSError as error:
        raise InputError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}"
        ) from error


def _write_split(
    folder: Path, split: str, chunks: Iterator[npt.NDArray[Any]], labels: npt.NDArray[Any]
) -> tuple[str, ...]:
    """Write a batch file of each chunk, and the labels; return the files' names."""
    files = []
    for number, chunk in enumerate(chunks):
        files.append(batch_name(split, number))
        write_rows(folder / files[-1], chunk)
    write_array(folder / labels_name(split), labels)
    return tuple(files)


def _write_mean(folder: Path, x: npt.NDArray[np.uint8], pad: int, per_file: int) -> np.ndarray:
    """Write the mean image and the covariance; return the mean colour, uint8 (RGB,)."""
    side = x.shape[1]
    sums, moments = np.zeros((side, side, 3), np.int64), np.zeros((4, 4), np.int64)
    for rgb in _pictures(x, per_file):
        sums += rgb.sum(0, dtype=np.int64)
        moments += colour_moments(rgb)
    colour = mean_colour(sums, len(x))
    mean = np.empty((side + 2 * pad, side + 2 * pad, 3), np.float32)
    mean[...] = colour
    inside(mean, pad)[...] = mean_of(sums, len(x)).transpose(1, 2, 0)
    write_array(folder / "misc" / MEAN_NAME, np.ascontiguousarray(mean.transpose(2, 0, 1)))
    write_array(folder / "misc" / COVARIANCE_NAME, covariance_of(moments))
    return colour


def _pictures(x: npt.NDArray[np.uint8], per_file: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Pictures in RGB, (n, row, column, RGB), those of a file at a time."""
    for part in _parts(len(x), per_file):
        some = x[part] if x.ndim == 4 else x[part][..., np.newaxis]
        yield np.broadcast_to(some, (*some.shape[:3], 3))


def _padded(pictures: np.ndarray, pad: int, colour: np.ndarray) -> np.ndarray:
    if not pad:
        return pictures
    count, side = pictures.shape[:2]
    bordered = np.empty((count, side + 2 * pad, side + 2 * pad, 3), np.uint8)
    bordered[...] = colour
    inside(bordered, pad)[...] = pictures
    return bordered


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _source(*pairs: Arrays | None) -> str:
    return checksum(*(array for pair in pairs for array in pair or (None, None)))


def _sums(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """The checksum of each file, by its name, those of labels last."""
    names = [*files, *map(labels_name, SPLITS)]
    return {name: sha256_of(folder / name) for name in names}


def _files(splits: Mapping[str, Split] | Mapping[str, ArraySplit]) -> list[str]:
    return [file for name in SPLITS for file in splits[name].files]


def _versions() -> dict[str, str]:
    packages = ("numpy", "hickle", "h5py")
    return {"tandem": __version__, **{name: importlib.metadata.version(name) for name in packages}}
