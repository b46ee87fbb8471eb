"""Batch files in the order of the list: good pictures fill them without holes.

Which pictures a file holds is known only when all before them are decoded, since a bad one shifts
the rest. So pictures are squashed into free slots of a shared array, ahead of need, and taken out
in the order of the list; a file is a list of slots. Those lie side by side until the first bad
picture, and then the file is written without a copy.
"""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from tandem.data.batch_file import write_batch
from tandem.errors import InputError
from tandem.preprocessing.listing import Listed
from tandem.preprocessing.pool import CHUNK, SquashPool, Task
from tandem.preprocessing.progress import Progress, Skipped, SplitProgress, save_progress


def batch_name(split: str, number: int) -> str:
    """Path of a batch file, relative to the folder of the manifest."""
    return f"{split}_hkl/{number:04d}.hkl"


@dataclass(frozen=True)
class _Batch:
    """A file to write, and how far its split is when it is written."""

    split: str
    slots: tuple[int, ...]
    progress: SplitProgress


class BatchWriter:
    """Writes batch files in a thread of its own, and after each a record of the progress.

    Parameters
    ----------
    folder : Path
        The folder of the manifest.
    layout : str
        Of the files.
    progress : Progress
        Where to go on.

    Attributes
    ----------
    progress : Progress
        What is written; settled once `flush` has returned.
    """

    def __init__(self, folder: Path, layout: str, progress: Progress) -> None:
        self.progress = progress
        self._folder = folder
        self._layout = layout
        self._thread = ThreadPoolExecutor(1)
        self._written: deque[Future[tuple[int, ...]]] = deque()
        self._whole = True  # every file so far is on disk, and recorded

    def submit(self, batch: _Batch, pictures: np.ndarray) -> None:
        """Write `batch`, whose slots lie in `pictures` and must keep until they come back."""
        self._written.append(self._thread.submit(self._write, batch, pictures))

    def take_back(self, *, wait: bool) -> list[int]:
        """Slots whose pictures are on disk; with `wait`, at least those of the oldest file."""
        slots: list[int] = []
        while self._written and (wait or self._written[0].done()):
            slots += self._written.popleft().result()
            wait = False
        return slots

    def flush(self) -> None:
        """Wait until everything is on disk."""
        while self._written:
            self.take_back(wait=True)

    def __enter__(self) -> "BatchWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _write(self, batch: _Batch, pictures: np.ndarray) -> tuple[int, ...]:
        if not self._whole:
            raise RuntimeError("the batch file before this one was not written")
        self._whole = False
        chosen = _select(pictures, batch.slots)
        path = self._folder / batch_name(batch.split, batch.progress.files - 1)
        try:
            write_batch(path, chosen, self._layout)
            _forget(path)
            sums = self.progress.sums
            if batch.split == "train":
                # 32 bits hold the sum of any file: a picture adds at most 255.
                sums = sums + chosen.sum(0, dtype=np.uint32)
            splits = self.progress.splits | {batch.split: batch.progress}
            self.progress = replace(self.progress, sums=sums, splits=splits)
            save_progress(self._folder, self.progress)
        except OSError as error:
            raise InputError(
                f"{error.filename or path}: cannot be written: {error.strerror or error}; what is"
                " done stays, and the same command goes on from there"
            ) from error
        self._whole = True
        return batch.slots


def _forget(path: Path) -> None:
    """Drop a file that is on disk from the cache of the system.

    All files together are larger than memory, and pages used again are cheaper than new ones.
    """
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _select(pictures: np.ndarray, slots: tuple[int, ...]) -> np.ndarray:
    first = slots[0]
    if slots == tuple(range(first, first + len(slots))):
        return pictures[first : first + len(slots)]
    return pictures[list(slots)]


class ProgressReporter(Protocol):
    """Who is told how it goes on, in the order of the list."""

    def advance(self, count: int) -> None:
        """`count` more pictures are dealt with."""

    def skip(self, split: str, skipped: Skipped) -> None:
        """A picture is left out. May raise, which stops the run."""


@dataclass(frozen=True)
class _Good:
    """A picture that is squashed, and in no file yet."""

    slot: int
    position: int


class SplitMaker:
    """Makes the batch files of one split, from where the writer's progress stands.

    Parameters
    ----------
    split : str
        ``train`` or ``val``.
    listed : Listed
        Its pictures.
    batch_size : int
        Pictures per file.
    pool : SquashPool
        Has `slots_needed` slots; some may still wait to be written.
    writer : BatchWriter
        Writes the files.
    reporter : ProgressReporter
        Is told how it goes on.
    """

    def __init__(
        self,
        split: str,
        listed: Listed,
        batch_size: int,
        pool: SquashPool,
        writer: BatchWriter,
        reporter: ProgressReporter,
    ) -> None:
        done = writer.progress.splits[split]
        self._split = split
        self._listed = listed
        self._total = len(listed.pictures)
        self._batch_size = batch_size
        self._pool = pool
        self._writer = writer
        self._observer = reporter
        self._squashing: deque[tuple[Task, Future[list[str | None]]]] = deque()
        self._good: list[_Good] = []
        self._skipped = list(done.skipped)
        self._files = done.files
        self._handed_out = self._collected = done.cursor

    def run(self) -> None:
        """Make the files; on return the writer has them all."""
        while self._collected < self._total:
            self._hand_out()
            if self._squashing:
                self._collect(*self._squashing.popleft())
            self._pool.free.extend(self._writer.take_back(wait=not self._squashing))
        if self._good:
            self._write(len(self._good), self._total)

    def _hand_out(self) -> None:
        free = self._pool.free
        while (count := min(CHUNK, self._total - self._handed_out)) and count <= len(free):
            slots = tuple(free.popleft() for _ in range(count))
            positions = range(self._handed_out, self._handed_out + count)
            folder = str(self._listed.folder)
            paths = tuple(f"{folder}/{self._listed.pictures[position]}" for position in positions)
            task = Task(slots, paths)
            self._squashing.append((task, self._pool.submit(task)))
            self._handed_out += count

    def _collect(self, task: Task, future: "Future[list[str | None]]") -> None:
        for slot, reason in zip(task.slots, future.result(), strict=True):
            if reason is None:
                self._good.append(_Good(slot, self._collected))
            else:
                self._skipped.append(Skipped(self._collected, reason))
                self._pool.free.append(slot)
                self._observer.skip(self._split, self._skipped[-1])
            self._collected += 1
        self._observer.advance(len(task.slots))
        while len(self._good) >= self._batch_size:
            self._write(self._batch_size, self._good[self._batch_size - 1].position + 1)

    def _write(self, count: int, cursor: int) -> None:
        """Write the oldest `count` pictures; the list is dealt with as far as `cursor`."""
        slots = tuple(good.slot for good in self._good[:count])
        del self._good[:count]
        self._files += 1
        skipped = tuple(skipped for skipped in self._skipped if skipped.position < cursor)
        progress = SplitProgress(cursor, self._files, skipped)
        self._writer.submit(_Batch(self._split, slots, progress), self._pool.pictures)
