"""Files that are written whole or not at all, and folders."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import InputError, explained

LOCK_NAME = ".lock"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success flush it to disk and rename it to `path`.

    It has the suffix of `path`, whose folder must exist. When the block raises, or the process is
    killed, `path` is unchanged; after an exception the temporary file is removed. An `OSError`
    names `path`.
    """
    prefix = f".{path.stem}."
    partial = path.with_name(f"{prefix}{secrets.token_hex(4)}.partial{path.suffix}")
    try:
        partial.touch(exist_ok=False)
        mode = partial.stat().st_mode  # of any new file; a library may replace it by a private one
        try:
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.chmod(mode)
            partial.replace(path)
            _flush_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is None and "requested and" in str(error):  # NumPy's, of a short write
            text = f"{error} bytes: is the disk full?"
            raise OSError(errno.ENOSPC, text, str(path)) from error
        # An error of a full disk has no file name, and others that of the temporary file.
        named = "" if error.filename is None else Path(str(error.filename)).name
        if error.errno is not None and (not named or named.startswith(prefix)):
            error.filename = str(path)
        raise


def write_array(path: Path, array: np.ndarray) -> None:
    """Write `array` as an ``.npy`` file, whole or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, default=default) + "\n")


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; raises InputError unless it is then writable."""
    with explained(folder, "the folder cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: found a folder that is not writable, expected one that is")


def existing_folder(folder: Path) -> Path:
    """Return the folder, absolute, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(existing_folder(folder)).free


def remove_partials(folder: Path) -> None:
    """Remove the temporary files that killed processes have left in `folder`."""
    for partial in folder.glob(".*.partial*"):
        partial.unlink(missing_ok=True)


def lock(folder: Path) -> int | None:
    """Lock `folder`; return the descriptor that holds the lock, or None while another one does.

    The kernel releases it when its last holder ends. It is on a file in the folder, which `unlock`
    removes: network file systems support locks of files that are open for writing, but not of
    folders.
    """
    path, held = folder / LOCK_NAME, False
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder removed the file that it had locked: this may be another one.
        held = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not held:
            os.close(descriptor)
    return descriptor if held else None


def unlock(folder: Path, descriptor: int) -> None:
    """Release what `lock` gave."""
    with contextlib.suppress(OSError):
        (folder / LOCK_NAME).unlink()
    os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: hold the `lock` of a folder. Raises InputError if another process has it."""
    with explained(folder, "cannot be locked"):
        descriptor = lock(folder)
    if descriptor is None:
        raise InputError(f"{folder}: another run is using this folder")
    try:
        yield
    finally:
        unlock(folder, descriptor)


def _flush_folder(folder: Path) -> None:
    """Flush `folder`, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
