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

WAIT_SECONDS = 10.0
_LOOK_SECONDS = 0.2


class FolderLock:
    """An exclusive lock on a folder, which the kernel gives up when the last holder ends.

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
def locked(folder: Path, wait_seconds: float = WAIT_SECONDS) -> Iterator[FolderLock]:
    """Hold a folder, creating it if need be; removed again if it is left empty.

    Parameters
    ----------
    folder : Path
        The run folder.
    wait_seconds : float
        How long to wait for a run that holds it: one whose launcher was killed is about to end.

    Raises
    ------
    InputError
        Another run holds it, or it can't be created or opened.
    """
    created = _create(folder)
    try:
        lock = _take(folder, wait_seconds)
        try:
            yield lock
        finally:
            lock.close()
    finally:
        with contextlib.suppress(OSError):
            for path in created:
                path.rmdir()


def _create(folder: Path) -> list[Path]:
    """Create a folder and its parents; those that were missing, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"weights_dir {folder}: {folder} is a file, not a folder") from None
    except NotADirectoryError:
        file = next(path for path in folder.parents if path.exists())
        raise InputError(f"weights_dir {folder}: {file} is a file, not a folder") from None
    except OSError as error:
        raise InputError(f"weights_dir {folder}: cannot be created ({error.strerror})") from error
    return missing


def _take(folder: Path, wait_seconds: float) -> FolderLock:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"weights_dir {folder}: cannot be opened ({error.strerror})") from error
    try:
        _wait_for(descriptor, folder, wait_seconds)
    except BaseException:
        os.close(descriptor)
        raise
    return FolderLock(descriptor)


def _wait_for(descriptor: int, folder: Path, wait_seconds: float) -> None:
    deadline, told = time.monotonic() + wait_seconds, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise InputError(
                    f"weights_dir {folder} is in use by another run: wait for its end, or choose "
                    "another folder"
                ) from None
        except OSError as error:
            raise InputError(
                f"weights_dir {folder}: cannot be locked ({error.strerror})"
            ) from error
        if not told:
            log.info("%s is in use; waiting %g s for its run to end", folder, wait_seconds)
            told = True
        time.sleep(_LOOK_SECONDS)


def _received(handle: Any) -> FolderLock:
    descriptor = handle.detach()
    # A program that this process may start must not keep the folder locked.
    os.set_inheritable(descriptor, False)
    return FolderLock(descriptor)
