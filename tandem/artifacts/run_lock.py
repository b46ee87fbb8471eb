"""Lock of a run folder: one run at a time uses it."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any

from tandem.errors import InputError, explained
from tandem.files import lock, unlock

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
_LOOK_SECONDS = 0.2


class FolderLock:
    """An exclusive lock on a folder, which the kernel releases when its last holder ends.

    A `multiprocessing` process of the "spawn" method that gets the lock as an argument holds it
    too. A folder therefore stays locked as long as a trainer whose launcher was killed still
    writes to it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[..., "FolderLock"], tuple[Any]]:
        if context.get_spawning_popen() is None:
            raise TypeError("a FolderLock can be pickled only for a process that is being started")
        return _received, (reduction.DupFd(self.descriptor),)


@contextlib.contextmanager
def locked(folder: Path, wait_seconds: float | None = None) -> Iterator[FolderLock]:
    """Lock a folder; create it if needed, and remove it again if it is left empty.

    Waits, by default `WAIT_SECONDS`, for a run that holds it: one whose launcher was killed ends
    soon. Raises InputError if the lock is not released, or the folder can't be written.
    """
    with explained(f"weights_dir {folder}", "cannot be read"):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        lock = _take(folder, WAIT_SECONDS if wait_seconds is None else wait_seconds)
        try:
            yield lock
        finally:
            unlock(folder, lock.descriptor)
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _take(folder: Path, wait_seconds: float) -> FolderLock:
    deadline, logged = time.monotonic() + wait_seconds, False
    while (lock := _try(folder)) is None:
        if time.monotonic() >= deadline:
            raise InputError(
                f"weights_dir {folder} is in use by another run: wait for its end, or choose "
                "another folder"
            )
        if not logged:
            log.info("%s is in use; waiting %g s for its run to end", folder, wait_seconds)
            logged = True
        time.sleep(_LOOK_SECONDS)
    return lock


def _try(folder: Path) -> FolderLock | None:
    """The lock, unless another process holds it."""
    _create(folder)
    with explained(f"weights_dir {folder}", "cannot be locked"):
        try:
            descriptor = lock(folder)
        except FileNotFoundError:
            return None  # its last user has just removed it
    return None if descriptor is None else FolderLock(descriptor)


def _create(folder: Path) -> None:
    with explained(f"weights_dir {folder}", "cannot be created"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(path for path in (folder, *folder.parents) if path.exists())
            raise InputError(f"weights_dir {folder}: {file} is a file, not a folder") from None


def _received(handle: Any) -> FolderLock:
    descriptor = handle.detach()
    # A program that this process starts must not keep the folder locked.
    os.set_inheritable(descriptor, False)
    return FolderLock(descriptor)
