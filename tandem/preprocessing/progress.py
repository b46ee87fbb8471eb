"""Progress of a run, saved after every batch file, so that a stopped run can continue."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, InstanceOf

from tandem.errors import InputError
from tandem.preprocessing.npz import read_npz, write_npz
from tandem.validation import validated

PROGRESS_NAME = "progress.npz"

Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class Skipped:
    """A picture left out: its position in the list of its split, and why."""

    position: Count
    reason: str


@dataclass(frozen=True)
class SplitProgress:
    """Progress of one split."""

    cursor: Count = 0  # pictures of the list that are in a batch file or skipped
    files: Count = 0  # that are written
    skipped: tuple[Skipped, ...] = ()  # before the cursor


@dataclass(frozen=True, eq=False)
class Progress:
    """Progress of a run.

    `spec` is everything that the output depends on, as JSON: only a run with an equal one
    continues, but for the folder of the mean image. `sums` is the sum of all training pictures in
    batch files without their border, int64 (row, column, RGB), `moments` that of their
    `tandem.data.colour.colour_moments`.
    """

    spec: dict[str, Any]
    sums: InstanceOf[np.ndarray]
    moments: InstanceOf[np.ndarray] = field(default_factory=lambda: np.zeros((4, 4), np.int64))
    splits: dict[str, SplitProgress] = field(
        default_factory=lambda: {"train": SplitProgress(), "val": SplitProgress()}
    )

    def __post_init__(self) -> None:
        side = self.spec["image_size"]
        if (self.sums.dtype, self.sums.shape) != (np.int64, (side, side, 3)):
            raise ValueError(f"found sums {self.sums.dtype} {self.sums.shape} for {side} pixels")
        if (self.moments.dtype, self.moments.shape) != (np.int64, (4, 4)):
            raise ValueError(f"found moments {self.moments.dtype} {self.moments.shape}")
        if self.splits.keys() != {"train", "val"}:
            raise ValueError(f"found the splits {[*self.splits]}")


def save_progress(folder: Path, progress: Progress) -> None:
    """Write `progress` into `folder`, whole or not at all."""
    splits = {name: asdict(split) for name, split in progress.splits.items()}
    record = {"spec": progress.spec, "splits": splits}
    arrays = {"sums": progress.sums, "moments": progress.moments}
    write_npz(folder / PROGRESS_NAME, record, arrays)


def load_progress(folder: Path) -> Progress | None:
    """Read the progress of a stopped run, or None; raises InputError for any other file."""
    path = folder / PROGRESS_NAME
    if not path.exists():
        return None
    try:
        record, arrays = read_npz(path)
        if "moments" not in arrays:
            raise ValueError("a run that an older version began, which cannot be continued")
        return validated(Progress, {**record, **arrays})
    except Exception as error:
        raise InputError(
            f"{path}: found something else ({error}), expected the progress of a stopped run;"
            f" delete {folder} to start over, or choose another tar_root_dir"
        ) from None
