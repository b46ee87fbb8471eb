"""Batch files in the order of the list: good pictures fill them without holes.

A bad picture shifts all later ones, so the content of a file is known only when everything before
it is decoded. Pictures are therefore decoded ahead into free slots of a shared array, and taken out
in the order of the list; a file is a list of slots. These are neighbours until the first bad
picture; such a file is written without a copy.
"""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from tandem.data.batch_file import write_batch
from tandem.data.colour import colour_moments
from tandem.preprocessing.border import inside, unwritable
from tandem.preprocessing.listed import Listed
from tandem.preprocessing.pool import CHUNK, DecodePool, Task
from tandem.preprocessing.progress import Progress, Skipped, SplitProgress, save_progress
from tandem.preprocessing.report import Report
from tandem.validation import is_printable


def batch_name(split: str, number: int) -> str:
    """Path of a batch file, relative to the folder of the manifest."""
    return f"{split}_hkl/{number:04d}.hkl"


class BatchWriter:
    """Writes batch files in a thread of its own, and the progress after each.

    `progress` is final once `flush` has returned.
    """

    def __init__(self, folder: Path, layout: str, progress: Progress) -> None:
        self.progress = progress
        self._folder = folder
        self._layout = layout
        self._thread = ThreadPoolExecutor(1)
        self._written: deque[Future[tuple[int, ...]]] = deque()
        self._complete = True  # every file so far is on disk, and in the progress

    def submit(
        self, split: str, done: SplitProgress, slots: tuple[int, ...], pictures: np.ndarray
    ) -> None:
        """Write the next file of a split, after which its progress is `done`.

        `pictures` is uint8 (slot, row, column, RGB); those in `slots` must not change until
        `take_back` returns them.
        """
        self._written.append(self._thread.submit(self._write, split, done, slots, pictures))

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

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _write(
        self, split: str, done: SplitProgress, slots: tuple[int, ...], pictures: np.ndarray
    ) -> tuple[int, ...]:
        if not self._complete:
            raise RuntimeError("the batch file before this one was not written")
        self._complete = False
        neighbours = slots == tuple(range(slots[0], slots[0] + len(slots)))
        chosen = pictures[slots[0] : slots[-1] + 1] if neighbours else pictures[list(slots)]
        path = self._folder / batch_name(split, done.files - 1)
        try:
            write_batch(path, chosen, self._layout)
            # All files together are larger than memory, and reused pages are cheaper than new ones.
            if hasattr(os, "posix_fadvise"):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            sums, moments = self.progress.sums, self.progress.moments
            if split == "train":
                own = inside(chosen, self.progress.spec["pad"])
                # 32 bits hold the sum of any file: a picture adds at most 255.
                sums = sums + own.sum(0, dtype=np.uint32)
                moments = moments + colour_moments(own)
            splits = self.progress.splits | {split: done}
            self.progress = replace(self.progress, sums=sums, moments=moments, splits=splits)
            save_progress(self._folder, self.progress)
        except OSError as error:
            raise unwritable(path, error) from error
        self._complete = True
        return slots


class SplitWriter:
    """Makes the batch files of one split, continuing from the writer's progress."""

    def __init__(
        self,
        split: str,
        listed: Listed,
        batch_size: int,
        pool: DecodePool,
        writer: BatchWriter,
        report: Report,
    ) -> None:
        done = writer.progress.splits[split]
        self._split = split
        self._listed = listed
        self._total = len(listed.pictures)
        self._batch_size = batch_size
        self._pool = pool
        self._writer = writer
        self._report = report
        self._decoding: deque[tuple[Task, Future[list[str | None]]]] = deque()
        self._good: list[tuple[int, int]] = []  # slot and position, decoded and in no file yet
        self._skipped = list(done.skipped)
        self._files = done.files
        self._submitted = self._collected = done.cursor

    def run(self) -> None:
        """Make the files; on return the writer has them all."""
        while self._collected < self._total:
            self._submit()
            if self._decoding:
                self._collect(*self._decoding.popleft())
            self._pool.free.extend(self._writer.take_back(wait=not self._decoding))
        if self._good:
            self._write(len(self._good), self._total)

    def _submit(self) -> None:
        free = self._pool.free
        while (count := min(CHUNK, self._total - self._submitted)) and count <= len(free):
            slots = tuple(free.popleft() for _ in range(count))
            positions = range(self._submitted, self._submitted + count)
            task = Task(slots, tuple(map(self._listed.place, positions)))
            self._decoding.append((task, self._pool.submit(task)))
            self._submitted += count

    def _collect(self, task: Task, future: "Future[list[str | None]]") -> None:
        for slot, reason in zip(task.slots, future.result(), strict=True):
            if not is_printable(self._listed.pictures[self._collected]):
                # A line of the manifest's lists is one name, in UTF-8.
                reason = "its name is not printable in UTF-8"
            if reason is None:
                self._good.append((slot, self._collected))
            else:
                self._skipped.append(Skipped(self._collected, reason))
                self._pool.free.append(slot)
                self._report.skip(self._split, self._skipped[-1])
            self._collected += 1
        self._report.advance(len(task.slots))
        while len(self._good) >= self._batch_size:
            self._write(self._batch_size, self._good[self._batch_size - 1][1] + 1)

    def _write(self, count: int, cursor: int) -> None:
        """Write the oldest `count` pictures; the list is processed up to `cursor`."""
        slots = tuple(slot for slot, _ in self._good[:count])
        del self._good[:count]
        self._files += 1
        skipped = tuple(skipped for skipped in self._skipped if skipped.position < cursor)
        done = SplitProgress(cursor, self._files, skipped)
        self._writer.submit(self._split, done, slots, self._pool.pictures)
