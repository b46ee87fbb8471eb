"""Processes that decode pictures into memory that the parent sees too.

Pillow releases the interpreter's lock while it decodes and resizes, but not while it opens a file
and copies pixels out. On two cores threads are as fast as processes; on many cores that remainder
would run on one core at a time.
"""

import functools
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

import numpy as np

from tandem.data.decode import (
    MOST_PICTURE_BYTES,
    BadPictureError,
    Resample,
    decode_picture,
    keep_memory,
    resize_by_pillow,
    too_large,
)
from tandem.data.manifest import Resize
from tandem.data.safe_io import open_file
from tandem.errors import InputError
from tandem.memory.host import HostBuffer
from tandem.preprocessing.border import inside
from tandem.preprocessing.listed import WHOLE, PictureLocation
from tandem.preprocessing.zips import ZIP, unzipped
from tandem.processes.spawn import SPAWN

# Enough that handing out work costs little, few enough that the processes end together.
CHUNK = 16
# A copy of this process is at work at once; a new one would import NumPy and Pillow first. No
# thread of this process is at work when it is copied. On other systems than Linux, libraries have
# threads that are.
START = get_context("fork") if sys.platform == "linux" else SPAWN
# Pictures of each process for which loops are loaded: they save a thousandth of a second each.
_MANY = 1000


@dataclass(frozen=True)
class Task:
    """Pictures to decode: those at `places` into the `slots` of the shared memory, one each."""

    slots: tuple[int, ...]
    places: tuple[PictureLocation, ...]


class DecodePool:
    """Decodes about `count` pictures into slots of a shared array, in `workers` processes.

    With one worker, the work is done in this process, when it is submitted. `pictures` is uint8
    (slot, row, column, RGB): pictures of `size` rows and columns in a border of `pad` zeros.
    `free` are the slots not in use; whoever submits a task takes them, and returns them.
    """

    def __init__(
        self, workers: int, slots: int, size: int, resize: Resize, pad: int = 0, count: int = 0
    ) -> None:
        self.free = deque(range(slots))
        side = size + 2 * pad
        shape = (slots, side, side, 3)
        self._resize, self._pad = resize, pad
        self._resample = _resample(many := count >= _MANY * workers)
        self._buffer: HostBuffer | None = None
        self._executor: Executor | None = None
        if workers == 1:
            keep_memory()
            self.pictures = np.zeros(shape, np.uint8)
            return
        self._buffer = HostBuffer.create(slots * side * side * 3, name="tandem-pictures")
        self.pictures = self._buffer.array(shape, np.uint8)
        self._executor = ProcessPoolExecutor(
            workers,
            START,
            initializer=_start_worker,
            initargs=(self._buffer, shape, resize, pad, many),
        )
        self._executor.submit(int)  # starts the processes

    def submit(self, task: Task) -> "Future[list[str | None]]":
        """Start a task; its result is, for each picture, why it is bad, or None."""
        if self._executor is not None:
            return self._executor.submit(_decode_in_worker, task)
        future: Future[list[str | None]] = Future()
        pictures = inside(self.pictures, self._pad)
        future.set_result(_decode_all(pictures, task, self._resize, self._resample))
        return future

    def __enter__(self) -> "DecodePool":
        return self

    def __exit__(self, *failure: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        del self.pictures
        if self._buffer is not None:
            self._buffer.close()


# Tasks carry no state, so a worker keeps here what its initializer was given.
_shared: tuple[HostBuffer, np.ndarray, Resize, Resample] | None = None


@functools.cache
def _resample(many: bool) -> Resample:
    """Return how pictures are resized. A process that is copied has what its parent loaded."""
    if not many:
        return resize_by_pillow
    from tandem.data.resample import Resampler

    return Resampler()


def _start_worker(
    buffer: HostBuffer, shape: tuple[int, ...], resize: Resize, pad: int, many: bool
) -> None:
    global _shared
    follow_parent()
    keep_memory()
    _shared = buffer, inside(buffer.array(shape, np.uint8), pad), resize, _resample(many)


def follow_parent() -> None:
    """Let this process end with its parent, also where that is killed, and not by Ctrl-C."""
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _decode_in_worker(task: Task) -> list[str | None]:
    if _shared is None:
        raise RuntimeError("this process was not started by DecodePool")
    _, pictures, resize, resample = _shared
    return _decode_all(pictures, task, resize, resample)


def _decode_all(
    pictures: np.ndarray, task: Task, resize: Resize, resample: Resample
) -> list[str | None]:
    pairs = zip(task.slots, task.places, strict=True)
    return [_decode(pictures[slot], place, resize, resample) for slot, place in pairs]


def _decode(
    picture: np.ndarray, place: PictureLocation, resize: Resize, resample: Resample
) -> str | None:
    try:
        content = _read(place)
        picture[...] = decode_picture(content, len(picture), resize, resample)
    except BadPictureError as reason:
        return str(reason)
    return None


def _read(place: PictureLocation) -> bytes:
    """Read a picture. One that cannot be read is no bad one, so an InputError is raised.

    Raises BadPictureError for what is not a file, such as a pipe or a device, which could be read
    for ever, and for one that is too large.
    """
    try:
        with open_file(Path(place.path)) as file:
            is_whole = place.size == WHOLE
            size = os.fstat(file.fileno()).st_size if is_whole else place.size
            if size > MOST_PICTURE_BYTES:
                raise BadPictureError(too_large(size))
            content = os.pread(file.fileno(), size, 0 if is_whole else place.offset)
    except ValueError as error:
        raise BadPictureError(str(error)) from None
    except OSError as error:
        raise InputError(f"{place.path}: the picture cannot be read: {error.strerror}") from None
    if not is_whole and len(content) < size:
        raise InputError(
            f"{place.path}: found {len(content)} bytes at byte {place.offset}, expected a picture"
            f" of {place.size}; the file has changed"
        )
    if not is_whole and place.path.endswith(ZIP):
        try:
            return unzipped(content, MOST_PICTURE_BYTES)
        except ValueError as error:
            raise BadPictureError(str(error)) from None
    return content
