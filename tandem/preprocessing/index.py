"""The index of pictures in archives, kept beside the batch files.

Listing archives takes minutes: every header in 155 GB is read. With the index, neither a stopped
run that continues nor the check of a finished one reads them again. It is valid for the same
archives only, by their paths, sizes and modification times.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.manifest import MANIFEST_NAME, SPLITS
from tandem.errors import explained
from tandem.preprocessing.listed import Listed, Places
from tandem.preprocessing.npz import read_npz, write_npz
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import Source
from tandem.validation import one_line

log = logging.getLogger(__name__)

INDEX_NAME = "index.npz"
_FORMAT = 1
_COLUMNS = {"labels": np.int64, "file": np.int32, "spans": np.int64}


def identity(source: Source, settings: Settings) -> str:
    """Return what the list depends on, as JSON; empty where no archive is read."""
    if not (archives := source.archives()):
        return ""
    files = []
    for path in archives:
        with explained(f"{path} (source)", "cannot be read"):
            status = path.stat()
        files.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
    return json.dumps([_FORMAT, source.name, settings.seed, settings.subset, files])


def save_index(root: Path, index: str, splits: Mapping[str, Listed]) -> None:
    """Write the lists of both splits into `root`, whole or not at all."""
    record: dict[str, Any] = {"index": index, "wnids": splits["train"].wnids}
    arrays: dict[str, np.ndarray] = {}
    for split, listed in splits.items():
        record[split] = {
            "pictures": listed.pictures,
            "files": listed.places.files,
            "ordered": listed.ordered,
        }
        places = listed.places
        columns = (listed.labels, places.file, places.spans)
        arrays |= {
            f"{split}_{name}": a for name, a in zip(_COLUMNS, columns, strict=True) if a is not None
        }
    write_npz(root / INDEX_NAME, record, arrays)


def load_index(root: Path, index: str, folder: Path) -> dict[str, Listed] | None:
    """Read the lists of both splits, whose files lie in `folder`, if they are those of `index`.

    None where there is no such index, and where a file in it is gone before everything is done.
    """
    path = root / INDEX_NAME
    if not path.exists():
        return None
    try:
        record, arrays = read_npz(path)
        if record["index"] != index:
            return None
        splits = {split: _split(split, record, arrays, folder) for split in SPLITS}
    except Exception as error:
        log.warning("%s: is damaged (%s), so the archives are read again", path, one_line(error))
        return None
    files = [folder / file for listed in splits.values() for file in listed.places.files]
    return splits if (root / MANIFEST_NAME).exists() or all(map(Path.is_file, files)) else None


def _split(split: str, record: Any, arrays: Mapping[str, np.ndarray], folder: Path) -> Listed:
    values, wnids = record[split], tuple(record["wnids"])
    labels, file, spans = (arrays[f"{split}_{column}"] for column in _COLUMNS)
    pictures, files = tuple(values["pictures"]), tuple(values["files"])
    if not all(type(text) is str for texts in (pictures, files, wnids) for text in texts):
        raise ValueError("names that are no text")
    if any(Path(name).name != name for name in files):
        raise ValueError("files of other folders")
    count = len(pictures)
    shapes = ((labels, (count,)), (file, (count,)), (spans, (count, 2)))
    for (array, shape), kind in zip(shapes, _COLUMNS.values(), strict=True):
        if not count or array.dtype != kind or array.shape != shape or array.min() < 0:
            raise ValueError("columns of another shape or type")
    if labels.max() >= len(wnids) or file.max() >= len(files):
        raise ValueError("numbers out of range")
    return Listed(folder, wnids, pictures, labels, Places(files, file, spans), values["ordered"])
