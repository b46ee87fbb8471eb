"""What a run has done so far: written after every batch file, so that a stopped run can go on."""

import json
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.files import replacing

PROGRESS_NAME = "progress.npz"


@dataclass(frozen=True)
class Skipped:
    """A picture left out: its position in the list of its split, and why."""

    position: int
    reason: str


@dataclass(frozen=True)
class SplitProgress:
    """How far a split is.

    Attributes
    ----------
    cursor : int
        Pictures of the list that are dealt with: in a batch file, or skipped.
    files : int
        Batch files written.
    skipped : tuple of Skipped
        Those before `cursor`.
    """

    cursor: int = 0
    files: int = 0
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, eq=False)
class Progress:
    """How far a run is.

    Attributes
    ----------
    spec : dict
        Everything the outputs depend on, as JSON; a run may go on only with an equal spec.
    splits : dict
        `SplitProgress` of ``train`` and ``val``.
    sums : int64 (S, S, 3)
        Sum of all training pictures in batch files: (row, column, RGB).
    """

    spec: dict[str, Any]
    sums: np.ndarray
    splits: dict[str, SplitProgress] = field(
        default_factory=lambda: {"train": SplitProgress(), "val": SplitProgress()}
    )


def save_progress(folder: Path, progress: Progress) -> None:
    """Write a record of `progress` into `folder`, whole or not at all."""
    splits = {name: asdict(split) for name, split in progress.splits.items()}
    text = json.dumps({"spec": progress.spec, "splits": splits})
    with replacing(folder / PROGRESS_NAME) as partial, partial.open("wb") as file:
        np.savez(file, record=np.frombuffer(text.encode(), np.uint8), sums=progress.sums)


def load_progress(folder: Path) -> Progress | None:
    """Read the record of a stopped run, or None when there is none.

    Raises
    ------
    InputError
        The file is not such a record.
    """
    path = folder / PROGRESS_NAME
    if not path.exists():
        return None
    try:
        _check_stored(path)
        with np.load(path, allow_pickle=False) as arrays:
            record = json.loads(arrays["record"].tobytes())
            splits = {name: _split(record["splits"][name]) for name in ("train", "val")}
            return Progress(record["spec"], _checked_sums(record["spec"], arrays["sums"]), splits)
    except Exception as error:
        # A damaged archive fails in NumPy, zipfile, zlib or json, each in its own way.
        raise InputError(
            f"{path}: found something else ({error}), expected the record of a stopped run;"
            f" delete {folder} to begin afresh, or choose another tar_root_dir"
        ) from None


def _check_stored(path: Path) -> None:
    # A compressed member can unpack to a thousand times its size; save_progress compresses none.
    with zipfile.ZipFile(path) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("compressed arrays")


def _split(value: dict[str, Any]) -> SplitProgress:
    skipped = tuple(
        Skipped(_count(item["position"]), str(item["reason"])) for item in value["skipped"]
    )
    return SplitProgress(_count(value["cursor"]), _count(value["files"]), skipped)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} for a number of pictures or files")
    return value


def _checked_sums(spec: dict[str, Any], sums: np.ndarray) -> np.ndarray:
    side = spec["image_size"]
    if (sums.dtype, sums.shape) != (np.int64, (side, side, 3)):
        raise ValueError(f"{sums.dtype} {sums.shape} for sums of pictures of {side} pixels")
    return sums
