"""Reading of pictures by dataset index from batch files into given memory."""

import itertools
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from tandem.data.safe_io import read_npy
from tandem.errors import InputError, explained

if TYPE_CHECKING:
    from tandem.data.dataset import Dataset

_MOST_BUFFERS = 1024  # that one preadv takes: IOV_MAX of Linux and macOS
_LEAST_BYTES = 1 << 20  # for a thread: handing it less takes longer than reading it

Take = Callable[[int, npt.NDArray[np.uint8]], None]


class _OpenFile:
    """An open file, closed with its last reference: no thread reads from it then."""

    def __init__(self, path: str) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class _OpenFiles:
    """Open files by number, of which at most `most` stay open; for any thread."""

    def __init__(self, paths: Sequence[str], most: int) -> None:
        self._paths, self._most = paths, most
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> _OpenFile:
        """The file, which stays open while it is referred to."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        # Several threads may open files at once, and rarely the same one.
        opened = _OpenFile(self._paths[number])
        with self._lock:
            self._open[number] = opened
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return opened

    @property
    def descriptors(self) -> list[int]:
        """The files that stay open, those used last at the end."""
        return [opened.descriptor for opened in self._open.values()]

    def close(self) -> None:
        """Close all; they are opened again when they are needed."""
        self._open.clear()


class PictureReader:
    """Reads pictures, or rows of arrays, and labels of a split by dataset index.

    In layout b01c, and of arrays, a picture is contiguous in its file and is read directly into its
    row, with one system call for each run of neighbours; `shuffle: images` therefore costs a call,
    and on a hard disk a seek, for each picture. A band always needs its own call. In layout c01b
    the pixels of a picture are scattered, so the whole file is read (the last one is kept) and
    transposed: slower by an order of magnitude, and with random pictures a whole file is read for
    each. At most `max_open` batch files are kept open; the least recently used are closed.

    In layout b01c, `threads` share what is read, in the order of the files: system calls do not
    hold the interpreter's lock. The pool of threads lives until `close`. A reader is for one caller
    at a time.
    """

    def __init__(self, dataset: "Dataset", max_open: int = 64, threads: int = 1) -> None:
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}; at least one file has to be open")
        if threads < 1:
            raise ValueError(f"threads is {threads}; at least one has to read")
        self.dataset = dataset
        self._columns = dataset.pictures is not None and dataset.pictures.layout == "c01b"
        self._threads = threads
        self._files = _OpenFiles(dataset.paths, max_open)
        counts = np.asarray(dataset.counts, np.int64)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._offsets = np.asarray(dataset.offsets, np.int64)
        self._pool: ThreadPoolExecutor | None = None
        self._block: tuple[int, npt.NDArray[np.uint8]] | None = None
        self._scratch = np.empty(0, np.uint8)

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """The shape of a row: of a picture (row, column, RGB)."""
        return self.dataset.row.shape

    def read(self, indices: npt.ArrayLike, out: npt.NDArray[Any]) -> None:
        """Read pictures into the rows of `out`, uint8 (n, row, column, RGB) in C order.

        Of arrays, `out` has their dtype and the shape of their rows.

        `indices`, (n,), may be in any order and repeat. Raises IndexError for an index outside the
        split, InputError if a batch file is gone, is shorter than it was or cannot be read, and
        ValueError if `out` does not fit.
        """
        wanted, dtype = self._checked(indices), self.dataset.row.dtype
        expected = (len(wanted), *self.picture_shape)
        if out.shape != expected or out.dtype != dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"pictures are read into {dtype} {expected} in C order, not {out.dtype} {out.shape}"
            )
        if len(wanted) == 0:
            return
        files, rows, destinations = self._by_file(wanted)
        if self._columns:
            self._read_columns(files, rows, destinations, out)
            return
        size, flat = out[0].nbytes, out.reshape(-1).view(np.uint8).data
        numbers, begins = files.tolist(), (self._offsets[files] + rows * size).tolist()
        views = [flat[row * size : (row + 1) * size] for row in destinations.tolist()]

        def read(_: int, part: slice) -> None:
            before = part.start
            for start, end in _runs(files[part], rows[part]):
                first = before + start
                self._read_exactly(numbers[first], begins[first], views[first : before + end])

        self._in_parts(len(wanted), size, read)

    def bands(
        self, indices: npt.ArrayLike, tops: npt.NDArray[np.int64], height: int, take: Take
    ) -> None:
        """Read `height` rows of each picture, one at a time, so that they stay in the cache.

        Of arrays there are none.

        Parameters
        ----------
        indices, tops : int64 (n,)
            Dataset indices, in any order, repeated or not, and the first row of each band.
        take : callable
            Called by the thread that reads, in the order of its files, with a picture's position in
            `indices` and with its band, uint8 (height, S, 3) = (row, column, RGB), which the next
            one overwrites.
        """
        wanted, side = self._checked(indices), self.picture_shape[0]
        if self._columns:
            # Files are read whole, so all pictures are read at once.
            pictures = self._scratch_of((len(wanted), *self.picture_shape))
            self.read(wanted, pictures)
            for position, top in enumerate(tops.tolist()):
                take(position, pictures[position, top : top + height])
            return
        files, rows, positions = self._by_file(wanted)
        begins = self._offsets[files] + (rows * side + tops[positions]) * side * 3
        pieces = list(zip(files.tolist(), begins.tolist(), positions.tolist(), strict=True))
        bands = self._scratch_of((self._threads, height, side, 3))

        def read(number: int, part: slice) -> None:
            band = bands[number]
            for file, begin, position in pieces[part]:
                self._read_exactly(file, begin, [band.reshape(-1).data])
                take(position, band)

        self._in_parts(len(wanted), bands[0].nbytes, read)

    def labels(self, indices: npt.ArrayLike) -> npt.NDArray[Any]:
        """The class of each picture, int64 (n,), or its target; raises IndexError or InputError."""
        return self._labels[self._checked(indices)]

    def close(self) -> None:
        """Close the files, free the buffers, end the threads; reading starts all of it again."""
        if self._pool is not None:
            self._pool.shutdown()
        self._files.close()
        self._pool, self._block, self._scratch = None, None, np.empty(0, np.uint8)

    def __enter__(self) -> "PictureReader":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @cached_property
    def _labels(self) -> npt.NDArray[Any]:
        # Read, not mapped: when a mapped file is truncated, the kernel kills the process.
        path, target = self.dataset.labels_file, self.dataset.target
        expected = (self.dataset.size, *target.shape)

        def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
            if (shape, dtype) != (expected, np.dtype(target.dtype)):
                raise InputError(
                    f"{path}: found labels {dtype} {shape}, expected {target.dtype} {expected}"
                )

        with explained(path, "the labels can't be read", ValueError):
            return read_npy(Path(path), check)

    def _checked(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        wanted = np.asarray(indices, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.dataset.size)]
        if outside.size:
            raise IndexError(f"picture {outside[0]} of a split of {self.dataset.size}")
        return wanted

    def _by_file(self, wanted: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """Sort by file: the file of each picture, its row in it, and its position in `wanted`."""
        positions = np.argsort(wanted, kind="stable")
        ordered = wanted[positions]
        files = np.searchsorted(self._ends, ordered, side="right")
        return files, ordered - self._starts[files], positions

    def _in_parts(self, count: int, nbytes: int, work: Callable[[int, slice], None]) -> None:
        """Divide equal pieces of `nbytes` among threads that do `work`, and wait for all.

        `work` gets the number of the part too. The error of the first part that failed is raised.
        """
        number = max(1, min(self._threads, count, count * nbytes // _LEAST_BYTES))
        ends = [count * k // number for k in range(number + 1)]
        first, *others = [slice(a, b) for a, b in itertools.pairwise(ends)]
        if others and self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "reader")
        pool: Any = self._pool
        futures = [pool.submit(work, k, part) for k, part in enumerate(others, 1)]
        try:
            work(0, first)
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def _scratch_of(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Memory that is reused by the next call."""
        size = math.prod(shape)
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size].reshape(shape)

    def _read_columns(
        self,
        files: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        destinations: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Read c01b files, each whole, and transpose them row by row."""
        side, _, channels = self.picture_shape
        for start, end in _runs(files):
            block, some = self._whole_file(int(files[start])), rows[start:end]
            for y in range(side):
                # Two steps that each stay in the cache are four times as fast as one.
                by_pixel = block[:, y].take(some, axis=-1).reshape(channels * side, -1)
                by_picture = np.ascontiguousarray(by_pixel.T).reshape(-1, channels, side)
                out[destinations[start:end], y] = by_picture.transpose(0, 2, 1)

    def _whole_file(self, file: int) -> npt.NDArray[np.uint8]:
        """The pictures of a c01b file, uint8 (RGB, row, column, picture)."""
        if self._block is None or self._block[0] != file:
            side, _, channels = self.picture_shape
            self._block = None
            block = np.empty((channels, side, side, self.dataset.counts[file]), np.uint8)
            self._read_exactly(file, self.dataset.offsets[file], [block.reshape(-1).data])
            self._block = (file, block)
        return self._block[1]

    def _read_exactly(self, file: int, begin: int, views: Sequence[memoryview]) -> None:
        """Fill `views` in turn from byte `begin` of a file."""
        end = begin + sum(map(len, views))
        try:
            opened = self._files[file]
            while begin < end:
                count = os.preadv(opened.descriptor, views[:_MOST_BUFFERS], begin)
                if count == 0:
                    self._refuse(file, f"truncated: found {begin} bytes, expected at least {end}")
                begin += count
                if begin < end:
                    views = _after(views, count)
        except FileNotFoundError:
            self._refuse(file, "the batch file was removed during the run")
        except OSError as error:
            self._refuse(file, f"found a file that can't be read: {error.strerror}")

    def _refuse(self, file: int, what: str) -> NoReturn:
        raise InputError(f"{self.dataset.paths[file]}: {what}") from None


def _runs(
    files: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None
) -> Iterator[tuple[int, int]]:
    """Begin and end of each run in one file; with `rows`, of each run of neighbours."""
    changes = np.diff(files) != 0
    if rows is not None:
        changes |= np.diff(rows) != 1
    cuts = (np.flatnonzero(changes) + 1).tolist()
    yield from zip([0, *cuts], [*cuts, len(files)], strict=True)


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The part of `views` after the first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
