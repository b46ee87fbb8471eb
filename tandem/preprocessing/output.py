"""Checks of the output before the long work: that it can be written, and that there is room."""

import math
import os
from pathlib import Path

from tandem.errors import InputError
from tandem.files import existing_folder, free_bytes


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written; nothing is made. Raises InputError."""
    existing = existing_folder(folder)
    if not existing.is_dir():
        raise InputError(f"{folder}: the folder cannot be made: {existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"{existing}: found a folder that is not writable, expected one that is"
            + ("" if existing == folder.absolute() else f", for {folder}")
        )


def batch_bytes(pictures: int, image_size: int) -> int:
    """Bytes of the batch files of a number of pictures."""
    return pictures * image_size**2 * 3


def check_space(folder: Path, needed: int, purpose: str) -> None:
    """Refuse an output folder whose disk has less than `needed` bytes free; raises InputError."""
    free = free_bytes(folder)
    if needed > free:
        unit, name = (1e9, "GB") if needed >= 1e9 else (1e6, "MB")
        # Rounded apart, so that the two numbers always differ.
        found, expected = math.floor(free / unit * 10) / 10, math.ceil(needed / unit * 10) / 10
        raise InputError(
            f"{folder} (tar_root_dir): found {found:.1f} {name} free, expected {expected:.1f}"
            f" {name} for {purpose}"
        )
