"""A run folder belongs to one run at a time."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any

from tandem.errors import InputError

log = logging.getLogger(__name__)

NAME = ".lock"
WAIT_SECONDS = 10.0
_LOOK_SECONDS = 0.2


class FolderLock:
    """An exclusive lock on a folder, which the kernel gives up when the last holder ends.

    It is a lock on a file in the folder, which is removed when the launcher lets go: file systems
    of a network pass on locks of files that are open for writing, and not of folders.

    It may be given to a `multiprocessing` process of the "spawn" method as an argument, which then
    holds it as well. So a folder stays locked while a trainer still writes to it whose launcher was
    killed, and never longer.

    Use `locked` to take one.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Hold it no longer in this process."""
        os.close(self._descriptor)

    def __reduce__(self) -> tuple[Callable[..., "FolderLock"], tuple[Any]]:
        if context.get_spawning_popen() is None:
            raise TypeError("a FolderLock can be pickled only for a process that is being started")
        return _received, (reduction.DupFd(self._descriptor),)


@contextlib.contextmanager
def locked(folder: Path, wait_seconds: float | None = None) -> Iterator[FolderLock]:
    """Hold a folder, creating it if need be; removed again if it is left empty.

    Parameters
    ----------
    folder : Path
        The run folder.
    wait_seconds : float, optional
        How long to wait for a run that holds it, by default `WAIT_SECONDS`: one whose launcher was
        killed is about to end.

    Raises
    ------
    InputError
        Another run holds it, or it can't be created or written.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        lock = _take(folder, WAIT_SECONDS if wait_seconds is None else wait_seconds)
        try:
            yield lock
        finally:
            with contextlib.suppress(OSError):
                (folder / NAME).unlink()
            lock.close()
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _take(folder: Path, wait_seconds: float) -> FolderLock:
    deadline, told = time.monotonic() + wait_seconds, False
    while (lock := _try(folder)) is None:
        if time.monotonic() >= deadline:
            raise InputError(
                f"weights_dir {folder} is in use by another run: wait for its end, or choose "
                "another folder"
            )
        if not told:
            log.info("%s is in use; waiting %g s for its run to end", folder, wait_seconds)
            told = True
        time.sleep(_LOOK_SECONDS)
    return lock


def _try(folder: Path) -> FolderLock | None:
    """The lock, if nobody else holds it."""
    _create(folder)
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        return None  # its last user has just removed it
    except OSError as error:
        raise InputError(f"weights_dir {folder}: cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who let go has removed the file that it had locked: another one may stand there now.
        if os.path.samestat(os.fstat(descriptor), (folder / NAME).stat()):
            return FolderLock(descriptor)
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        raise InputError(f"weights_dir {folder}: cannot be locked ({error.strerror})") from error
    os.close(descriptor)
    return None


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise InputError(f"weights_dir {folder}: {file} is a file, not a folder") from None
    except OSError as error:
        raise InputError(f"weights_dir {folder}: cannot be created ({error.strerror})") from error


def _received(handle: Any) -> FolderLock:
    descriptor = handle.detach()
    # A program that this process may start must not keep the folder locked.
    os.set_inheritable(descriptor, False)
    return FolderLock(descriptor)
