"""Processes that decode_picture pictures into memory that the parent sees too.

Pillow gives up the lock of the interpreter while it decodes and resizes, but not while it opens a
file and copies pixels out. On two cores threads are as fast as processes; on many cores that rest
would be done by one core at a time.
"""

import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

import numpy as np

from tandem.data.decode import BadPictureError, decode_picture, keep_memory
from tandem.errors import InputError
from tandem.memory.host import HostBuffer

# Enough that handing out work costs little, few enough that the processes end together.
CHUNK = 16
# A copy of this process is at work at once; a new one would import NumPy and Pillow first. When it
# is copied no thread of it is at work. Elsewhere than on Linux, libraries have threads that are.
_START = "fork" if sys.platform == "linux" else "spawn"


@dataclass(frozen=True)
class Task:
    """Pictures to decode_picture: `paths` into the `slots` of the shared memory, one each."""

    slots: tuple[int, ...]
    paths: tuple[str, ...]


class SquashPool:
    """Squashes pictures into slots of a shared array.

    Parameters
    ----------
    workers : int
        Processes. With 1, the work is done in this process, when it is submitted.
    slots : int
        Pictures that the array holds.
    size : int
        S, pixels.

    Attributes
    ----------
    pictures : uint8 (slots, S, S, 3)
        (slot, row, column, RGB).
    free : deque of int
        Slots that hold nothing. Whoever submits a task takes them, and brings them back.
    """

    def __init__(self, workers: int, slots: int, size: int) -> None:
        self.free = deque(range(slots))
        shape = (slots, size, size, 3)
        self._executor: Executor | None = None
        if workers == 1:
            self._buffer = None
            keep_memory()
            self.pictures = np.empty(shape, np.uint8)
            return
        self._buffer = HostBuffer.create(slots * size * size * 3, name="tandem-pictures")
        self.pictures = self._buffer.array(shape, np.uint8)
        self._executor = ProcessPoolExecutor(
            workers, get_context(_START), initializer=_start_worker, initargs=(self._buffer, shape)
        )

    def submit(self, task: Task) -> "Future[list[str | None]]":
        """Begin a task; its result says of each picture why it is bad, or None."""
        if self._executor is not None:
            return self._executor.submit(_squash_in_worker, task)
        future: Future[list[str | None]] = Future()
        future.set_result(_squash_into(self.pictures, task))
        return future

    def __enter__(self) -> "SquashPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        del self.pictures
        if self._buffer is not None:
            self._buffer.close()


@dataclass(frozen=True)
class _Worker:
    buffer: HostBuffer
    pictures: np.ndarray


# A worker's tasks come without state, so what the initializer was given has to wait here.
_worker: _Worker | None = None


def _start_worker(buffer: HostBuffer, shape: tuple[int, ...]) -> None:
    global _worker
    # Ctrl-C reaches the whole group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_memory()
    _worker = _Worker(buffer, buffer.array(shape, np.uint8))


def _end_with_parent() -> None:
    """End this process when its parent has died without being able to say so."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _squash_in_worker(task: Task) -> list[str | None]:
    if _worker is None:
        raise RuntimeError("a task came to a process that was not started by SquashPool")
    return _squash_into(_worker.pictures, task)


def _squash_into(pictures: np.ndarray, task: Task) -> list[str | None]:
    return [
        _squash_one(pictures[slot], path) for slot, path in zip(task.slots, task.paths, strict=True)
    ]


def _squash_one(picture: np.ndarray, path: str) -> str | None:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        # A file that cannot be read says nothing about the picture in it.
        raise InputError(f"{path}: the picture cannot be read: {error.strerror}") from None
    try:
        picture[...] = decode_picture(content, len(picture))
    except BadPictureError as reason:
        return str(reason)
    return None


def slots_needed(batch_size: int, workers: int) -> int:
    """Slots enough for one file to be written, one to be filled, and two tasks for each process.

    More would only be more memory, which costs when it is first touched.
    """
    return 2 * batch_size + 2 * workers * CHUNK
