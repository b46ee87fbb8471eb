"""The manifest: the only source of picture names, labels and batch positions.

`manifest.json` is beside the batch files. Position i of a split is dataset index i everywhere: in
the batch files, in the labels and, in format 1, in the names of pictures. Format 1 is of pictures,
format 2 of rows of arrays, whose labels are in files alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, FailFast, Field, PlainValidator

from tandem.data.labels import check_array_labels, check_class_labels
from tandem.data.safe_io import read_bytes
from tandem.errors import InputError
from tandem.files import write_text
from tandem.memory import CLASS_LABEL, PICTURE_DTYPE, RowType
from tandem.validation import is_printable, read_json, shown, validated

if TYPE_CHECKING:
    from tandem.data.dataset import StoredPictures

MANIFEST_NAME = "manifest.json"
FORMAT = 1
ARRAY_FORMAT = 2
Layout = Literal["b01c", "c01b"]
Resize = Literal["squash", "shorter_side"]  # as `tandem.data.decode.decode_picture` defines them
SPLITS = ("train", "val")

# ImageNet's 1.3 million pictures take 60 MB.
_MOST_BYTES = 1 << 30
_MOST_ROW_BYTES = 1 << 32


def _printable(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        # Half a surrogate or a zero byte is in no path, and a line of train.txt is one name.
        if not is_printable(name):
            raise ValueError(f"found {name!a:.80}, expected printable characters")
    return names


def _labels(value: Any) -> np.ndarray:
    if not isinstance(value, list) or any(type(label) is not int for label in value):
        raise ValueError("expected a list of integers")
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise ValueError("found an integer beyond 64 bits") from None


def _inside(files: tuple[str, ...]) -> tuple[str, ...]:
    for file in files:
        name = PurePosixPath(file)
        if name.is_absolute() or ".." in name.parts or not name.name:
            raise ValueError(f"found {shown(file)}, expected a path inside the manifest's folder")
    if len(set(files)) != len(files):
        raise ValueError("found a file named twice, expected each once")
    return files


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or len(set(names)) != len(names):
        raise ValueError("expected the names of classes, each once")
    return names


def _expect(key: str, found: object, expected: object, why: str = "") -> None:
    if found != expected:
        raise ValueError(f"{key}: found {found}, expected {expected}{why}")


Names = Annotated[tuple[str, ...], FailFast(), AfterValidator(_printable)]
Files = Annotated[Names, AfterValidator(_inside)]
ClassNames = Annotated[Names, AfterValidator(_each_once)]
Sha256 = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(strict=True, ge=1, lt=1 << 63)]
Border = Annotated[int, Field(strict=True, ge=0, lt=1 << 16)]


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the validation half of a data set, in dataset order."""

    files: Files  # relative to the folder of the manifest, as train_hkl/0000.hkl
    pictures: Names  # class folder/name, or name from a flat folder
    labels: Annotated[np.ndarray, PlainValidator(_labels)]  # int64 (pictures,)

    def __post_init__(self) -> None:
        _expect("labels", len(self.labels), len(self.pictures), ", one for each picture")


@dataclass(frozen=True, eq=False)
class Manifest:
    """Content of the batch files and how they were made."""

    image_size: Count  # S, rows and columns of every stored picture, with its border
    layout: Layout  # b01c: (picture, row, column, RGB); c01b: (RGB, row, column, picture)
    pictures_per_file: Count  # the last file of a split may have fewer
    wnids: ClassNames  # of preprocessing the class folders, sorted; class i is wnids[i]
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
    versions: Mapping[str, str]  # of the programs that made the files
    splits: Mapping[str, Split]
    resize: Resize = "squash"  # left out of the file where it is that, as in older ones
    pad: Border = 0  # pixels of the border on each side; left out of the file where it is 0
    # Of arrays of which the files were made (see `tandem.preprocessing.arrays`): their checksum,
    # and that of each file. Left out of the file where there are none:
    source: Sha256 | None = None
    sha256: Mapping[str, Sha256] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if 2 * self.pad >= self.image_size:
            raise ValueError(
                f"pad: found {self.pad}, expected less than half of image_size, {self.image_size}"
            )
        _expect("splits", sorted(self.splits), sorted(SPLITS))
        if not any(split.pictures for split in self.splits.values()):
            raise ValueError("splits: found no pictures, expected at least one")
        for name, split in self.splits.items():
            low, high = (split.labels.min(), split.labels.max()) if len(split.labels) else (0, 0)
            if low < 0 or high >= self.classes:
                raise ValueError(
                    f"splits.{name}.labels: found labels from {low} to {high}, expected 0 to"
                    f" {self.classes - 1}"
                )
            why = f", for {len(split.pictures)} pictures of which {self.pictures_per_file} go into"
            files = len(self.counts(name))
            _expect(f"splits.{name}.files", len(split.files), files, f"{why} a file")

    @property
    def classes(self) -> int:
        return len(self.wnids)

    @property
    def row(self) -> RowType:
        """Dtype and shape of a picture."""
        return RowType(PICTURE_DTYPE, (self.image_size, self.image_size, 3))

    @property
    def target(self) -> RowType:
        """Dtype and shape of what belongs to a picture: the number of its class."""
        return CLASS_LABEL

    @property
    def stored(self) -> "StoredPictures":
        """Return how the pictures are stored."""
        from tandem.data.dataset import StoredPictures  # which imports h5py

        return StoredPictures(self.layout, self.resize, self.pad)

    def name(self, split: str, index: int) -> str:
        """The name of a picture."""
        return self.splits[split].pictures[index]

    def counts(self, split: str) -> tuple[int, ...]:
        """Number of pictures in each batch file of `split`."""
        return _counts(len(self.splits[split].pictures), self.pictures_per_file)

    def batch_shape(self, count: int) -> tuple[int, int, int, int]:
        """Shape of a batch file of `count` pictures in this layout."""
        side = self.image_size
        return (count, side, side, 3) if self.layout == "b01c" else (3, side, side, count)

    def describe_batch(self, count: int) -> str:
        """A batch file of `count` pictures in words."""
        side = self.image_size
        return f"{count} pictures of {side} x {side} in layout {self.layout}"

    def check_labels(self, split: str, path: Path) -> None:
        """Refuse a file of other labels by an InputError."""
        check_class_labels(path, self.splits[split].labels)


@dataclass(frozen=True)
class ArrayRows:
    """Dtype and shape of the rows of an array data set."""

    dtype: Literal["float32", "uint8"]
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=3)]

    def __post_init__(self) -> None:
        _check_row("shape", self.shape)


@dataclass(frozen=True)
class ArrayTargets:
    """The kind of labels of an array data set: classes, or rows of float32."""

    classes: Count | None = None
    shape: Annotated[tuple[Count, ...], Field(max_length=3)] | None = None

    def __post_init__(self) -> None:
        if (self.classes is None) == (self.shape is None):
            raise ValueError("expected one of classes and shape")
        if self.shape is not None:
            _check_row("shape", self.shape)


@dataclass(frozen=True)
class ArraySplit:
    """The training or the validation half of an array data set, in dataset order."""

    rows: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
    files: Files  # relative to the folder of the manifest


@dataclass(frozen=True, eq=False)
class ArrayManifest:
    """Content of the batch and label files of arrays, see `tandem.preprocessing.arrays`."""

    pixels: ArrayRows
    targets: ArrayTargets
    rows_per_file: Count  # the last file of a split may have fewer
    source: Sha256  # of the arrays as they were given
    versions: Mapping[str, str]  # of the programs that made the files
    splits: Mapping[str, ArraySplit]
    sha256: Mapping[str, Sha256]  # of each file, the labels' too, by its name
    wnids: Names = ()  # of the classes, or of a target's values if they have names

    def __post_init__(self) -> None:
        _expect("splits", sorted(self.splits), sorted(SPLITS))
        if self.wnids or self.targets.classes is not None:
            _expect("wnids", len(_each_once(self.wnids)), self.classes, ", as targets says")
        if not any(split.rows for split in self.splits.values()):
            raise ValueError("splits: found no rows, expected at least one")
        for name, split in self.splits.items():
            files = -(-split.rows // self.rows_per_file)
            why = f", for {split.rows} rows of which {self.rows_per_file} go into a file"
            _expect(f"splits.{name}.files", len(split.files), files, why)
            for file in (*split.files, labels_name(name)):
                if file not in self.sha256:
                    raise ValueError(f"sha256: found none of {shown(file)}, expected one")

    @property
    def classes(self) -> int:
        """Number of classes, or of values of a target: what a network has as outputs."""
        if self.targets.classes is not None:
            return self.targets.classes
        return prod(self.targets.shape or ())

    @property
    def row(self) -> RowType:
        """Dtype and shape of a row."""
        return RowType(self.pixels.dtype, self.pixels.shape)

    @property
    def target(self) -> RowType:
        """Dtype and shape of a row's target."""
        shape = self.targets.shape
        return CLASS_LABEL if shape is None else RowType("float32", shape)

    def name(self, split: str, index: int) -> str:
        """The name of a row: its number, from 0."""
        return str(index)

    def counts(self, split: str) -> tuple[int, ...]:
        """Number of rows in each batch file of `split`."""
        return _counts(self.splits[split].rows, self.rows_per_file)

    def batch_shape(self, count: int) -> tuple[int, ...]:
        """Shape of a batch file of `count` rows."""
        return (count, *self.pixels.shape)

    def describe_batch(self, count: int) -> str:
        """A batch file of `count` rows in words."""
        return f"{count} rows of {self.row}"

    def check_labels(self, split: str, path: Path) -> None:
        """Refuse a file of other labels by an InputError."""
        rows, sha256 = self.splits[split].rows, self.sha256[labels_name(split)]
        check_array_labels(path, rows, self.target, self.classes, sha256)

    @property
    def stored(self) -> None:
        """Nothing: the rows are no pictures."""
        return None


def labels_name(split: str) -> str:
    """Path of the labels of an array data set, relative to the folder of the manifest."""
    return f"labels/{split}_labels.npy"


def _check_row(key: str, shape: tuple[int, ...]) -> None:
    if prod(shape) * 4 > _MOST_ROW_BYTES:
        raise ValueError(f"{key}: found {shape}, expected at most {_MOST_ROW_BYTES} bytes a row")


def _counts(total: int, per_file: int) -> tuple[int, ...]:
    return tuple(min(per_file, total - start) for start in range(0, total, per_file))


def write_manifest(path: Path, manifest: Manifest | ArrayManifest) -> None:
    """Write `manifest` as JSON, whole or not at all; a line for each list of names or labels."""
    if isinstance(manifest, ArrayManifest):
        lines = _array_lines(manifest)
    else:
        lines = _picture_lines(manifest)
    if manifest.sha256:
        sums = (f"  {json.dumps(f)}: {json.dumps(s)}" for f, s in manifest.sha256.items())
        lines += [f' "source": {json.dumps(manifest.source)}']
        lines += [' "sha256": {\n' + ",\n".join(sums) + "\n }"]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _picture_lines(manifest: Manifest) -> list[str]:
    return [
        f' "format": {FORMAT}',
        f' "image_size": {manifest.image_size}',
        *([f' "resize": {json.dumps(manifest.resize)}'] if manifest.resize != "squash" else []),
        *([f' "pad": {manifest.pad}'] if manifest.pad else []),
        f' "layout": {json.dumps(manifest.layout)}',
        f' "pictures_per_file": {manifest.pictures_per_file}',
        f' "classes": {manifest.classes}',
        f' "wnids": {json.dumps(manifest.wnids)}',
        f' "seed": {manifest.seed}',
        f' "versions": {json.dumps(dict(manifest.versions))}',
        ' "splits": {\n'
        + ",\n".join(f'  "{name}": {_split_as_json(manifest.splits[name])}' for name in SPLITS)
        + "\n }",
    ]


def _array_lines(manifest: ArrayManifest) -> list[str]:
    classes, shape = manifest.targets.classes, manifest.targets.shape
    targets = {"classes": classes} if shape is None else {"shape": shape}
    splits = {
        name: {"rows": manifest.splits[name].rows, "files": manifest.splits[name].files}
        for name in SPLITS
    }
    values = {
        "format": ARRAY_FORMAT,
        "pixels": {"dtype": manifest.pixels.dtype, "shape": manifest.pixels.shape},
        "targets": targets,
        **({"wnids": manifest.wnids} if manifest.wnids else {}),
        "rows_per_file": manifest.rows_per_file,
        "versions": dict(manifest.versions),
        "splits": splits,
    }
    return [f' "{key}": {json.dumps(value)}' for key, value in values.items()]


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of pictures, given the file or its folder, and check it as data.

    Raises InputError if the file is missing or not JSON, if a value has a wrong type or contradicts
    others, or if it is a manifest of arrays.
    """
    path, values = _read(path)
    _check_format(path, values, FORMAT)
    return _pictures(path, values)


def read_any_manifest(path: Path) -> Manifest | ArrayManifest:
    """Read a manifest of pictures or of arrays, as `read_manifest` does."""
    path, values = _read(path)
    if isinstance(values, dict) and values.get("format") == ARRAY_FORMAT:
        return validated(ArrayManifest, values, source=path)
    _check_format(path, values, FORMAT, ARRAY_FORMAT)
    return _pictures(path, values)


def _read(path: Path) -> tuple[Path, Any]:
    try:
        path = path / MANIFEST_NAME if path.is_dir() else path
        return path, read_json(path, read_bytes(path, _MOST_BYTES))
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no manifest; expected the one that preprocessing/generate_data.sh"
            " (or `tandem preprocess`) writes beside the batch files; data_folder names their"
            " folder"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: the manifest cannot be read: {reason}") from None


def _check_format(path: Path, values: Any, *known: int) -> None:
    if not isinstance(values, dict) or (found := values.get("format")) in known:
        return
    foreign = "" if "format" in values else "; the file is no manifest of preprocessing"
    if found == ARRAY_FORMAT:
        foreign = ": the data set has rows of arrays, not pictures"
    expected = " or ".join(map(str, known))
    raise InputError(f"{path}: format is {shown(found)}, expected {expected}{foreign}")


def _pictures(path: Path, values: Any) -> Manifest:
    manifest = validated(Manifest, values, source=path)
    if (classes := values.get("classes")) != manifest.classes:
        raise InputError(
            f"{path}: classes is {shown(classes)}, expected {manifest.classes}, the number of wnids"
        )
    return manifest


def _split_as_json(split: Split) -> str:
    return (
        f'{{\n   "files": {json.dumps(split.files)},'
        f'\n   "pictures": {json.dumps(split.pictures)},'
        f'\n   "labels": {json.dumps(split.labels.tolist())}\n  }}'
    )
