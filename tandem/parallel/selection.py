"""The rows of arrays on which a call works: its `batch` and `batch_s`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Batch = None | int | np.integer[Any] | slice | Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows of an array, in the order in which they are used.

    Row ``i`` of them is row ``start + step * i`` of the array or, with `indices`, int64 (count,),
    row ``indices[i]``, which is never negative.
    """

    count: int
    start: int = 0
    step: int = 1
    indices: npt.NDArray[np.int64] | None = None

    def part(self, lo: int, hi: int) -> slice | npt.NDArray[np.int64]:
        """Return what picks rows ``lo:hi`` of the selection when an array is indexed with it.

        Raises
        ------
        IndexError
            They are not rows of the selection.
        """
        if not 0 <= lo <= hi <= self.count:
            raise IndexError(f"a selection of {self.count} rows has no part {lo}:{hi}")
        if self.indices is not None:
            return self.indices[lo:hi]
        if lo == hi:
            return slice(0, 0)
        first, last = self.start + self.step * lo, self.start + self.step * (hi - 1)
        if self.step > 0:
            return slice(first, last + 1, self.step)
        # A stop of -1 would be the last row of the array.
        return slice(first, last - 1 if last else None, self.step)

    def take(
        self, array: npt.NDArray[Any], lo: int, hi: int, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Return rows ``lo:hi`` of the selection: a view of the array where that is possible.

        With `out`, of the shape and dtype of these rows, they are copied there, and it is returned.
        The array has at least the length for which the selection was made.
        """
        part = self.part(lo, hi)
        if out is None:
            return array[part]
        if isinstance(part, slice) or not array.flags.c_contiguous:  # np.take would copy all of it
            np.copyto(out, array[part])
        else:
            # With mode "raise", np.take would fill a copy of `out`; the indices have been checked.
            np.take(array, part, axis=0, out=out, mode="clip")
        return out


def select(length: int, batch: Batch) -> Selection:
    """Select rows of an array.

    Parameters
    ----------
    length : int
        Rows of the array.
    batch : None, int, slice, sequence of int, or array
        None selects all rows, an integer n the first n; a slice or integers, those that they select
        from an array of that length; booleans, one for each row, those where they are true.

    Raises
    ------
    IndexError
        `batch` names rows that do not exist.
    TypeError, ValueError
        `batch` is none of these.
    """
    if batch is None:
        return Selection(length)
    if isinstance(batch, slice):
        return _sliced(length, batch)
    if isinstance(batch, int | np.integer) and not isinstance(batch, bool):
        if not 0 <= batch <= length:
            raise IndexError(f"the first {batch} rows are selected, of {length}")
        return Selection(int(batch))
    return _indexed(length, _numbers(batch))


def select_many(
    lengths: Sequence[int],
    batch: Batch = None,
    minibatch: Sequence[bool] = (),
    names: Sequence[str] = (),
) -> Selection:
    """Select rows of all scattered inputs of one call.

    Parameters
    ----------
    lengths : sequence of int
        Rows of each input; at least one input.
    batch : None, int, slice, sequence of int, or array
        As `select` has it.
    minibatch : sequence of bool
        By input, whether it already holds the selected rows, as its rows 0 to ``count - 1``; none
        does if empty.
    names : sequence of str
        By input, how error messages call it; by default "input 0" and so on.

    Returns
    -------
    Selection
        The same rows for every input that is no minibatch; its `count` is that of the call.

    Raises
    ------
    IndexError
        `batch` names rows that an input does not have.
    TypeError, ValueError
        `batch` is of no kind that selects; it selects different rows of inputs of different
        lengths; lengths differ and there is no `batch`; a minibatch is too short.
    """
    cut = minibatch or [False] * len(lengths)
    whole = [length for length, is_cut in zip(lengths, cut, strict=True) if not is_cut]
    if batch is None:
        if lengths.count(lengths[0]) != len(lengths):
            raise ValueError(f"the inputs differ in length: {_listed(lengths, names)}")
        return Selection(lengths[0])
    if not whole:
        selection = Selection(_count(batch))
    else:
        selection = _select_common(whole, batch, _listed(lengths, names))
    if any(is_cut and n < selection.count for n, is_cut in zip(lengths, cut, strict=True)):
        raise ValueError(
            f"the batch has {selection.count} rows, and a minibatch has fewer: "
            + _listed(lengths, names)
        )
    return selection


def select_local(lengths: Sequence[int], batch_s: Batch | Sequence[Batch]) -> list[Selection]:
    """Select rows of what each worker has of its own.

    Parameters
    ----------
    lengths : sequence of int
        Rows that each worker has.
    batch_s : None, int, slice, sequence or array, or a list or tuple of slices or sequences
        What `select` takes, for all workers; or one slice, list, tuple or array for each. A list of
        plain integers is for all workers.

    Returns
    -------
    list of Selection
        By worker.

    Raises
    ------
    IndexError
        Rows are selected that a worker does not have.
    TypeError, ValueError
        `batch_s` is none of these, or there is not one for each worker.
    """
    each: Sequence[Any] = [batch_s] * len(lengths)
    if isinstance(batch_s, list | tuple) and any(
        isinstance(member, slice | list | tuple | np.ndarray) for member in batch_s
    ):
        each = batch_s
        if len(each) != len(lengths):
            raise ValueError(f"batch_s has {len(each)} members, for {len(lengths)} workers")
    return [
        _named(f"batch_s of worker {rank}", length, batch)
        for rank, (length, batch) in enumerate(zip(lengths, each, strict=True))
    ]


def _sliced(length: int, batch: slice) -> Selection:
    rows = range(length)[batch]
    start, stop = batch.start, batch.stop
    # Python would clip these, and rows be missing. Downwards, `start` is a row, not an edge.
    is_start_beyond = start is not None and (
        start < -length or start > length - (rows.step < 0 and length > 0)
    )
    lowest = -length - (rows.step < 0)  # beyond the first row
    if is_start_beyond or (stop is not None and not lowest <= stop <= length):
        remedy = f"; end it at {length}" if stop is not None and stop > length else ""
        raise IndexError(f"the slice {_written(batch)} reaches beyond the {length} rows{remedy}")
    return Selection(len(rows), rows.start, rows.step)


def _numbers(batch: Any) -> npt.NDArray[Any]:
    """Return integers or booleans (n,)."""
    if isinstance(batch, np.ndarray):
        numbers = batch
    elif isinstance(batch, list | tuple | range) or (
        hasattr(batch, "__array__") and not isinstance(batch, np.generic)
    ):
        numbers = _as_array(batch)
    else:
        raise TypeError(
            "rows are selected by an integer, a slice, or a list or array of integers or "
            f"booleans, not by {type(batch).__name__} {batch!r}"
        )
    if numbers.ndim != 1:
        raise ValueError(
            f"rows are selected by an array of 1 dimension, not of {numbers.ndim}: "
            f"its shape is {numbers.shape}"
        )
    if numbers.dtype.kind not in "biu":
        if numbers.size == 0 and not isinstance(batch, np.ndarray):  # an empty list
            return numbers.astype(np.int64)
        raise TypeError(f"rows are selected by integers or booleans, not by {numbers.dtype}")
    return numbers


def _as_array(batch: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(batch)
    except ValueError:
        raise ValueError("rows are selected by one list of integers, not by nested lists") from None


def _indexed(length: int, numbers: npt.NDArray[Any]) -> Selection:
    if numbers.dtype.kind == "b":
        if len(numbers) != length:
            raise IndexError(f"there are {len(numbers)} booleans, for {length} rows")
        (indices,) = np.nonzero(numbers)
        return Selection(len(indices), indices=indices)
    if not len(numbers):
        return Selection(0, indices=numbers.astype(np.int64))
    lowest, highest = np.minimum.reduce(numbers), np.maximum.reduce(numbers)
    if highest >= length or lowest < -length:
        beyond = highest if highest >= length else lowest
        raise IndexError(f"index {beyond} is selected, of {length} rows")
    indices = numbers if numbers.dtype == np.int64 else numbers.astype(np.int64)
    if lowest < 0:
        indices = np.where(indices < 0, indices + length, indices)
    return Selection(len(indices), indices=indices)


def _count(batch: Any) -> int:
    """Return how many rows minibatches hold that a batch has selected elsewhere."""
    if isinstance(batch, slice):
        raise ValueError(
            "every input is a minibatch, of which a slice does not say how many rows it selects: "
            "pass their number"
        )
    if isinstance(batch, int | np.integer) and not isinstance(batch, bool):
        return select(max(0, int(batch)), batch).count
    numbers = _numbers(batch)
    return int(np.count_nonzero(numbers)) if numbers.dtype.kind == "b" else len(numbers)


def _select_common(lengths: Sequence[int], batch: Any, listed: str) -> Selection:
    """Select the same rows of inputs that may differ in length."""
    selection = _named("batch", lengths[0], batch)
    for length in set(lengths) - {lengths[0]}:
        if not is_same(selection, _named("batch", length, batch)):
            raise ValueError(
                "the inputs differ in length, and the batch selects different rows of them: "
                + listed
            )
    return selection


def is_same(one: Selection, other: Selection) -> bool:
    """Return whether two selections by one batch are the same rows."""
    if one.count != other.count or one.indices is None or other.indices is None:
        return (one.count, one.start, one.step) == (other.count, other.start, other.step)
    return one.indices is other.indices or np.array_equal(one.indices, other.indices)


def _named(what: str, length: int, batch: Any) -> Selection:
    """Select rows, and begin the message of an error with what has selected them."""
    try:
        return select(length, batch)
    except (IndexError, TypeError, ValueError) as error:
        error.args = (f"{what}: {error}",)
        raise


def _written(batch: slice) -> str:
    ends = ("" if end is None else str(end) for end in (batch.start, batch.stop))
    return ":".join(ends) + ("" if batch.step is None else f":{batch.step}")


def _listed(lengths: Sequence[int], names: Sequence[str]) -> str:
    called = names or [f"input {position}" for position in range(len(lengths))]
    return ", ".join(f"{name} has {length}" for name, length in zip(called, lengths, strict=True))
