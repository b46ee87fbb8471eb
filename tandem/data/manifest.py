"""The manifest: the only source of picture names, labels and batch positions.

`manifest.json` is beside the batch files. Picture names and labels are in the order of the pictures
in the batch files, so position i of a split is dataset index i everywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, FailFast, Field, PlainValidator

from tandem.data.safe_io import read_bytes
from tandem.errors import InputError
from tandem.files import write_text
from tandem.validation import read_json, shown, validated

MANIFEST_NAME = "manifest.json"
FORMAT = 1
Layout = Literal["b01c", "c01b"]
Resize = Literal["squash", "shorter_side"]  # as `tandem.data.decode.decode_picture` defines them
SPLITS = ("train", "val")

# ImageNet's 1.3 million pictures take 60 MB.
_MOST_BYTES = 1 << 30


def _printable(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        # Half a surrogate or a zero byte is in no path, and a line of train.txt is one name.
        if not name.isprintable():
            raise ValueError(f"found {name!a:.80}, expected printable characters")
    return names


def _labels(value: Any) -> np.ndarray:
    if not isinstance(value, list) or any(type(label) is not int for label in value):
        raise ValueError("expected a list of integers")
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise ValueError("found an integer beyond 64 bits") from None


def _expect(key: str, found: object, expected: object, why: str = "") -> None:
    if found != expected:
        raise ValueError(f"{key}: found {found}, expected {expected}{why}")


Names = Annotated[tuple[str, ...], FailFast(), AfterValidator(_printable)]
Count = Annotated[int, Field(strict=True, ge=1, lt=1 << 63)]
Border = Annotated[int, Field(strict=True, ge=0, lt=1 << 16)]


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the validation half of a data set, in dataset order."""

    files: Names  # relative to the folder of the manifest, as train_hkl/0000.hkl
    pictures: Names  # class folder/name, or name from a flat folder
    labels: Annotated[np.ndarray, PlainValidator(_labels)]  # int64 (pictures,)

    def __post_init__(self) -> None:
        if not self.pictures:
            raise ValueError("pictures: found none, expected at least one")
        _expect("labels", len(self.labels), len(self.pictures), ", one for each picture")
        for file in self.files:
            name = PurePosixPath(file)
            if name.is_absolute() or ".." in name.parts or not name.name:
                raise ValueError(
                    f"files: found {shown(file)}, expected a path inside the manifest's folder"
                )
        if len(set(self.files)) != len(self.files):
            raise ValueError("files: found a file named twice, expected each once")


@dataclass(frozen=True, eq=False)
class Manifest:
    """Content of the batch files and how they were made."""

    image_size: Count  # S, rows and columns of every stored picture, with its border
    layout: Layout  # b01c: (picture, row, column, RGB); c01b: (RGB, row, column, picture)
    pictures_per_file: Count  # the last file of a split may have fewer
    wnids: Names  # the class folders, sorted; class i is wnids[i]
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
    versions: Mapping[str, str]  # of the programs that made the files
    splits: Mapping[str, Split]
    resize: Resize = "squash"  # left out of the file where it is that, as in older ones
    pad: Border = 0  # pixels of the border on each side; left out of the file where it is 0

    def __post_init__(self) -> None:
        if not self.wnids or list(self.wnids) != sorted(set(self.wnids)):
            raise ValueError(
                f"wnids: found {shown(self.wnids)}, expected class folders, sorted, each once"
            )
        if 2 * self.pad >= self.image_size:
            raise ValueError(
                f"pad: found {self.pad}, expected less than half of image_size, {self.image_size}"
            )
        _expect("splits", sorted(self.splits), sorted(SPLITS))
        for name, split in self.splits.items():
            low, high = split.labels.min(), split.labels.max()
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

    def counts(self, split: str) -> tuple[int, ...]:
        """Number of pictures in each batch file of `split`."""
        total = len(self.splits[split].pictures)
        per_file = self.pictures_per_file
        return tuple(min(per_file, total - start) for start in range(0, total, per_file))

    def batch_shape(self, count: int) -> tuple[int, int, int, int]:
        """Shape of a batch file of `count` pictures in this layout."""
        side = self.image_size
        return (count, side, side, 3) if self.layout == "b01c" else (3, side, side, count)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `manifest` as JSON, whole or not at all; a line for each list of names or labels."""
    lines = [
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
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_manifest(path: Path) -> Manifest:
    """Read a manifest, given the file or its folder, and check it as data.

    Raises InputError if the file is missing or not JSON, or if a value has a wrong type or
    contradicts others.
    """
    try:
        path = path / MANIFEST_NAME if path.is_dir() else path
        values = read_json(path, read_bytes(path, _MOST_BYTES))
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no manifest; expected the one that preprocessing/generate_data.sh"
            " (or `tandem preprocess`) writes beside the batch files; data_folder names their"
            " folder"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: the manifest cannot be read: {reason}") from None
    if isinstance(values, dict) and (found := values.get("format")) != FORMAT:
        foreign = "" if "format" in values else "; the file is no manifest of preprocessing"
        raise InputError(f"{path}: format is {shown(found)}, expected {FORMAT}{foreign}")
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
