"""What a run has done so far: written after every batch file, so that a stopped run can go on."""

import json
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
    plan : dict
        Everything the outputs depend on, as JSON; a run may go on only with an equal plan.
    splits : dict
        `SplitProgress` of ``train`` and ``val``.
    sums : int64 (S, S, 3)
        Sum of all training pictures in batch files: (row, column, RGB).
    """

    plan: dict[str, Any]
    sums: np.ndarray
    splits: dict[str, SplitProgress] = field(
        default_factory=lambda: {"train": SplitProgress(), "val": SplitProgress()}
    )


def save_progress(folder: Path, progress: Progress) -> None:
    """Write a record of `progress` into `folder`, whole or not at all."""
    splits = {name: asdict(split) for name, split in progress.splits.items()}
    text = json.dumps({"plan": progress.plan, "splits": splits})
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
        with np.load(path, allow_pickle=False) as arrays:
            record = json.loads(arrays["record"].tobytes())
            return Progress(
                plan=record["plan"],
                sums=arrays["sums"],
                splits={name: _split(value) for name, value in record["splits"].items()},
            )
    except Exception as error:
        # A damaged archive fails in NumPy, zipfile, zlib or json, each in its own way.
        raise InputError(
            f"{path}: found something else ({error}), expected the record of a stopped run;"
            f" delete {folder} to begin afresh, or choose another tar_root_dir"
        ) from None


def _split(value: dict[str, Any]) -> SplitProgress:
    skipped = tuple(Skipped(**item) for item in value["skipped"])
    return SplitProgress(value["cursor"], value["files"], skipped)
