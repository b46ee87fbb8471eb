"""Pictures by dataset index, read from batch files straight to where they are wanted."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from tandem.data.untrusted import read_npy
from tandem.errors import InputError

if TYPE_CHECKING:
    from tandem.data.dataset import Dataset

_MOST_BUFFERS = 1024  # that one preadv takes: IOV_MAX of Linux and macOS


class PictureReader:
    """Read pictures and labels of a split by dataset index.

    In layout b01c a picture is contiguous in its file and is read straight into its row, with one
    system call for each run of neighbours; `shuffle: images` therefore costs a call a picture, and
    from a disk that has to seek, a seek. In layout c01b every pixel of a picture is apart from the
    next, so the whole file is read (the last one is kept) and transposed: slower by an order of
    magnitude, and when pictures come from all files at random, a whole file is read for each.

    Parameters
    ----------
    dataset : Dataset
        The split.
    max_open : int
        Batch files that are kept open at a time; those used longest ago are closed.
    """

    def __init__(self, dataset: "Dataset", max_open: int = 64) -> None:
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}; at least one file has to be open")
        self.dataset = dataset
        self._max_open = max_open
        self._ends = np.cumsum(np.asarray(dataset.counts, np.int64))
        self._open: OrderedDict[int, int] = OrderedDict()
        self._block: tuple[int, npt.NDArray[np.uint8]] | None = None

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """(row, column, RGB)."""
        return (self.dataset.image_size, self.dataset.image_size, 3)

    def read(self, indices: npt.ArrayLike, out: npt.NDArray[np.uint8]) -> None:
        """Read pictures into the rows of `out`.

        Parameters
        ----------
        indices : int64 (n,)
            Dataset indices, in any order, repeated or not.
        out : uint8 (n, S, S, 3)
            (batch, row, column, RGB), in C order.

        Raises
        ------
        IndexError
            An index is outside the split.
        InputError
            A batch file is gone, is shorter than it was, or can't be read.
        ValueError
            `out` has another shape or dtype, or is not in C order.
        """
        wanted = self._checked(indices)
        expected = (len(wanted), *self.picture_shape)
        if out.shape != expected or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(
                f"pictures are read into uint8 {expected} in C order, not {out.dtype} {out.shape}"
            )
        if len(wanted) == 0:
            return
        # In the order of the files: each is opened once, and its neighbours are found together.
        destinations = np.argsort(wanted, kind="stable")
        ordered = wanted[destinations]
        files = np.searchsorted(self._ends, ordered, side="right")
        rows = ordered - (self._ends[files] - np.asarray(self.dataset.counts, np.int64)[files])
        if self.dataset.layout == "b01c":
            self._read_rows(files, rows, destinations, out)
        else:
            self._read_columns(files, rows, destinations, out)

    def labels(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The class of each picture, int64 (n,).

        Raises
        ------
        IndexError
            An index is outside the split.
        InputError
            The labels can't be read, or are not one for each picture.
        """
        return self._labels[self._checked(indices)]

    def close(self) -> None:
        """Close the files and forget what was kept; reading again opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._block = None

    def __enter__(self) -> "PictureReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @cached_property
    def _labels(self) -> npt.NDArray[np.int64]:
        # Read, not mapped: a mapped file that someone shortens kills the process without a word.
        path, size = self.dataset.labels_file, self.dataset.size

        def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
            if (shape, dtype) != ((size,), np.int64):
                raise InputError(f"{path}: found labels {dtype} {shape}, expected int64 ({size},)")

        try:
            return read_npy(Path(path), check)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: the labels can't be read: {error}") from error

    def _checked(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        wanted = np.asarray(indices, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.dataset.size)]
        if outside.size:
            raise IndexError(f"picture {outside[0]} of a split of {self.dataset.size}")
        return wanted

    def _read_rows(
        self,
        files: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        destinations: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Read from b01c files: each run of neighbours with one call, into its rows."""
        size = out[0].nbytes
        flat = out.reshape(-1).data
        for start, end in _runs(files, rows):
            views = [
                flat[row * size : (row + 1) * size] for row in destinations[start:end].tolist()
            ]
            self._read_exactly(int(files[start]), int(rows[start]) * size, views)

    def _read_columns(
        self,
        files: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        destinations: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Read from c01b files: each whole, transposed a row of the pictures at a time."""
        side, channels = self.dataset.image_size, 3
        for start, end in _runs(files):
            block, some = self._whole_file(int(files[start])), rows[start:end]
            for y in range(side):
                # In two steps, of which each stays in the cache: four times as fast as in one.
                by_pixel = block[:, y].take(some, axis=-1).reshape(channels * side, -1)
                by_picture = np.ascontiguousarray(by_pixel.T).reshape(-1, channels, side)
                out[destinations[start:end], y] = by_picture.transpose(0, 2, 1)

    def _whole_file(self, file: int) -> npt.NDArray[np.uint8]:
        """The pictures of a c01b file, uint8 (RGB, row, column, picture)."""
        if self._block is None or self._block[0] != file:
            side = self.dataset.image_size
            self._block = None
            block = np.empty((3, side, side, self.dataset.counts[file]), np.uint8)
            self._read_exactly(file, 0, [block.reshape(-1).data])
            self._block = (file, block)
        return self._block[1]

    def _read_exactly(self, file: int, position: int, views: Sequence[memoryview]) -> None:
        """Fill `views` in turn with what begins `position` bytes into the pictures of a file."""
        begin = self.dataset.offsets[file] + position
        end = begin + sum(len(view) for view in views)
        remaining = list(views)
        try:
            descriptor = self._descriptor(file)
            while remaining:
                count = os.preadv(descriptor, remaining[:_MOST_BUFFERS], begin)
                if count == 0:
                    self._refuse(file, f"truncated: found {begin} bytes, expected at least {end}")
                begin += count
                remaining = _after(remaining, count)
        except FileNotFoundError:
            self._refuse(file, "it is gone, expected a batch file that was there at the start")
        except OSError as error:
            self._refuse(file, f"found a file that can't be read ({error.strerror})")

    def _refuse(self, file: int, what: str) -> NoReturn:
        raise InputError(f"{self.dataset.paths[file]}: {what}") from None

    def _descriptor(self, file: int) -> int:
        descriptor = self._open.pop(file, None)
        if descriptor is None:
            if len(self._open) >= self._max_open:
                os.close(self._open.popitem(last=False)[1])
            descriptor = os.open(self.dataset.paths[file], os.O_RDONLY | os.O_CLOEXEC)
        self._open[file] = descriptor
        return descriptor


def _runs(
    files: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None
) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch in one file; with `rows`, of neighbours in it."""
    changes = np.diff(files) != 0
    if rows is not None:
        changes |= np.diff(rows) != 1
    cuts = (np.flatnonzero(changes) + 1).tolist()
    yield from zip([0, *cuts], [*cuts, len(files)], strict=True)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left to fill of `views` when the first `count` bytes have been read."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
