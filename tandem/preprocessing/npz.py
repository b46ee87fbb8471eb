"""A record and arrays in one ``.npz`` file, in which nothing is pickled."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tandem.files import replacing
from tandem.validation import parse_json

_RECORD = "record"


def write_npz(path: Path, record: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a record, as JSON, and arrays, whole or not at all."""
    text = np.frombuffer(json.dumps(record).encode(), np.uint8)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, **{_RECORD: text}, **arrays)  # type: ignore[arg-type]


def read_npz(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Read a record and arrays.

    A damaged file makes NumPy, zipfile or zlib raise many types of exceptions.
    """
    # A compressed member can unpack to a thousand times its size; none is compressed here.
    with zipfile.ZipFile(path) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("compressed arrays")
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    return parse_json(arrays.pop(_RECORD).tobytes()), arrays
