"""The manifest: the one source of picture names, labels and batch positions.

`manifest.json` lies beside the batch files. Picture names and labels stand in the order in which
the pictures lie in the batch files, so position i of a split is the dataset index i everywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tandem.data.safe_io import read_text
from tandem.errors import InputError
from tandem.files import write_text

MANIFEST_NAME = "manifest.json"
FORMAT = 1
LAYOUTS = ("b01c", "c01b")
SPLITS = ("train", "val")

# ImageNet's 1.3 million pictures take 60 MB.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Split:
    """One half of the data set, in dataset order.

    Attributes
    ----------
    files : tuple of str
        Batch files, relative to the folder of the manifest, as ``train_hkl/0000.hkl``.
    pictures : tuple of str
        Names of the pictures; ``class folder/name``, or ``name`` from a flat folder.
    labels : int64 (pictures,)
        The class of each picture.
    """

    files: tuple[str, ...]
    pictures: tuple[str, ...]
    labels: np.ndarray


@dataclass(frozen=True, eq=False)
class Manifest:
    """What the batch files hold and how they were made.

    Attributes
    ----------
    image_size : int
        S, the rows and the columns of every stored picture.
    layout : str
        ``b01c``: a file is (picture, row, column, RGB); ``c01b``: (RGB, row, column, picture).
    pictures_per_file : int
        Pictures in every file but the last of a split, which may be shorter.
    wnids : tuple of str
        The class folders in class order: sorted, so that class i is ``wnids[i]``.
    seed : int
        The seed with which the pictures were shuffled.
    versions : mapping of str to str
        Programs that made the files.
    splits : mapping of str to Split
        ``train`` and ``val``.
    """

    image_size: int
    layout: str
    pictures_per_file: int
    wnids: tuple[str, ...]
    seed: int
    versions: Mapping[str, str]
    splits: Mapping[str, Split]

    @property
    def classes(self) -> int:
        """Number of classes."""
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
    """Write `manifest` as JSON, whole or not at all.

    Names and labels stand in one line each, so that the file can be read by eye and stays small.
    """
    lines = [
        f' "format": {FORMAT}',
        f' "image_size": {manifest.image_size}',
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
    """Read a manifest and check it as data.

    Parameters
    ----------
    path : Path
        The file, or the folder that holds ``manifest.json``.

    Raises
    ------
    InputError
        The file is missing, is not JSON, or a value in it is of another type or does not agree
        with the others.
    """
    path = path / MANIFEST_NAME if path.is_dir() else path
    return _manifest_from_json(_Checked(path, "", _load_object(path)))


def _split_as_json(split: Split) -> str:
    return (
        f'{{\n   "files": {json.dumps(split.files)},'
        f'\n   "pictures": {json.dumps(split.pictures)},'
        f'\n   "labels": {json.dumps(split.labels.tolist())}\n  }}'
    )


def _load_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path, _MOST_BYTES))
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no manifest; expected the one that preprocessing/make_hkl.py"
            " writes beside the batch files"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: the manifest cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # Plain ValueError: an integer of more digits than Python converts.
        raise InputError(f"{path}: the manifest is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


@dataclass(frozen=True)
class _Checked:
    """An object of the manifest whose values are checked when they are taken."""

    path: Path
    where: str
    values: dict[str, Any]

    def fail(self, key: str, found: str, expected: str) -> InputError:
        return InputError(f"{self.path}: {self.where}{key}: found {found}, expected {expected}")

    def take(self, key: str, kind: type, expected: str) -> Any:
        if key not in self.values:
            raise self.fail(key, "nothing", expected)
        value = self.values[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fail(key, _shown(value), expected)
        return value

    def integer(self, key: str, low: int) -> int:
        value = self.take(key, int, "an integer")
        if value < low:
            raise self.fail(key, _shown(value), f"at least {low}")
        if value >= 1 << 63:
            raise self.fail(key, "an integer beyond 64 bits", f"at least {low}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.take(key, list, "a list of strings")
        for value in values:
            if not isinstance(value, str):
                raise self.fail(key, _shown(value), "strings")
            # Half a surrogate or a zero byte is in no path, and a line of train.txt is one name.
            if not value.isprintable():
                raise self.fail(key, _shown(value), "printable characters")
        return tuple(values)

    def integers(self, key: str) -> np.ndarray:
        values = self.take(key, list, "a list of integers")
        for value in values:
            if type(value) is not int:
                raise self.fail(key, _shown(value), "integers")
        try:
            return np.array(values, np.int64)
        except OverflowError:
            raise self.fail(key, "an integer beyond 64 bits", "integers") from None

    def object(self, key: str) -> "_Checked":
        values = self.take(key, dict, "an object")
        return _Checked(self.path, f"{self.where}{key}.", values)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        text = f"a {type(value).__name__} too deep to show"
    return text if len(text) <= 60 else text[:57] + "..."


def _manifest_from_json(checked: _Checked) -> Manifest:
    found = checked.integer("format", 0)
    if found != FORMAT:
        raise checked.fail("format", str(found), str(FORMAT))
    layout = checked.take("layout", str, "a string")
    if layout not in LAYOUTS:
        raise checked.fail("layout", _shown(layout), " or ".join(LAYOUTS))
    versions = checked.object("versions")
    per_file = checked.integer("pictures_per_file", 1)
    wnids = _wnids_from_json(checked)
    splits = checked.object("splits")
    return Manifest(
        image_size=checked.integer("image_size", 1),
        layout=layout,
        pictures_per_file=per_file,
        wnids=wnids,
        seed=checked.integer("seed", 0),
        versions={name: versions.take(name, str, "a string") for name in versions.values},
        splits={
            name: _split_from_json(splits.object(name), len(wnids), per_file) for name in SPLITS
        },
    )


def _wnids_from_json(checked: _Checked) -> tuple[str, ...]:
    wnids = checked.strings("wnids")
    if not wnids or list(wnids) != sorted(set(wnids)):
        raise checked.fail("wnids", _shown(list(wnids)), "class folders, sorted, each once")
    classes = checked.integer("classes", 1)
    if classes != len(wnids):
        raise checked.fail("classes", str(classes), f"{len(wnids)}, the number of wnids")
    return wnids


def _split_from_json(checked: _Checked, classes: int, per_file: int) -> Split:
    split = Split(checked.strings("files"), checked.strings("pictures"), checked.integers("labels"))
    total = len(split.pictures)
    if total == 0:
        raise checked.fail("pictures", "none", "at least one")
    if len(split.labels) != total:
        raise checked.fail("labels", str(len(split.labels)), f"{total}, one for each picture")
    if split.labels.min() < 0 or split.labels.max() >= classes:
        spread = f"labels from {split.labels.min()} to {split.labels.max()}"
        raise checked.fail("labels", spread, f"0 to {classes - 1}")
    files = -(-total // per_file)
    if len(split.files) != files:
        wanted = f"{files}, for {total} pictures of which {per_file} go into a file"
        raise checked.fail("files", str(len(split.files)), wanted)
    if len(set(split.files)) != files:
        raise checked.fail("files", "a file named twice", "each once")
    for file in split.files:
        name = PurePosixPath(file)
        if name.is_absolute() or ".." in name.parts or not name.name:
            raise checked.fail("files", _shown(file), "a path inside the manifest's folder")
    return split
