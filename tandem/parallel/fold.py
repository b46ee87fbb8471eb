"""Combination of the partial results of slices and workers into one result."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.distributed.allreduce import library_of

Op = str | None

OPS: tuple[Op, ...] = ("avg", "uavg", "sum", "prod", "max", "min", "gather", None)
"""Operations that may fold an output; ``c_`` before a name, by way of the CPU, changes nothing."""

UPDATE_OPS: tuple[Op, ...] = (*OPS, "inc")
"""Operations that may fold an update: "inc" adds the sum of the slices' differences to the old."""

_AVERAGES = ("avg", "uavg")


def check_op(op: Any, dtype: str | np.dtype | None, what: str, is_update: bool = False) -> Op:
    """Check that results of a dtype can be folded by an op, and return the op without ``c_``.

    Parameters
    ----------
    op : str or None
        One of `OPS`, or of `UPDATE_OPS` for an update.
    dtype : str, dtype or None
        That of the variable; None for one that is no tensor.
    what : str
        How error messages call the variable, such as "output 0".
    is_update : bool
        Whether it is an update.

    Raises
    ------
    ValueError
        There is no such op.
    TypeError
        It is not defined for the dtype.
    """
    ops = UPDATE_OPS if is_update else OPS
    plain = op[2:] if isinstance(op, str) and op.startswith("c_") else op
    if not (plain is None or isinstance(plain, str)) or plain not in ops or op == "c_inc":
        listed = ", ".join("None" if known is None else repr(known) for known in ops)
        raise ValueError(f"{what}: the op is {op!r}; it can be {listed}")
    if plain is None:
        return None
    if dtype is None:
        raise TypeError(f"{what} is no tensor, and has no {plain!r}; its op can only be None")
    kind = np.dtype(dtype).kind
    if plain in _AVERAGES and kind in "biu":
        way = '"inc" to count rows, "max" to count calls' if is_update else '"sum"'
        raise TypeError(
            f"{what} is {dtype}, and an average would be rounded: cast it to a float, or use "
            f"the op {way}"
        )
    if plain in ("sum", "prod", "inc") and kind == "b":
        raise TypeError(f"{what} is bool, which has no {plain!r}: cast it to an integer")
    return plain


def row_weights(counts: Sequence[int]) -> tuple[list[float], float]:
    """Find the weights of partial averages over `counts` rows, and what their sum is divided by.

    Weights are the counts, without their common factor, over the least power of two that is not
    below their sum; the divisor is their sum. So no weight is rounded in a float dtype that holds
    the reduced counts: up to 2048 in float16, 2**24 in float32, 2**53 in float64; greater ones are
    rounded to nearest. The average of equal numbers is then that number but for roundings of sums,
    where ``float32(1/3)`` would make it grow. No weight is above 1, so none makes a finite partial
    infinite. A single partial has weight 1 and divisor 1.

    Raises
    ------
    ValueError
        There is no row, or a count is negative.
    """
    if not any(counts) or min(counts) < 0:
        raise ValueError(f"there is no average of partial results over {list(counts)} rows")
    common = math.gcd(*counts)
    reduced = [count // common for count in counts]
    power = 1 << (sum(reduced) - 1).bit_length()
    return [count / power for count in reduced], sum(reduced) / power


def op_weights(op: Op, counts: Sequence[int]) -> tuple[list[float], float]:
    """Return the weights of partial results over `counts` rows, and the divisor, for any op.

    "avg" weighs a partial by its rows, "uavg" all that were computed alike; other ops use no
    weights, so these are 1. Where a call has no rows, each partial result counts as one.
    """
    if op == "uavg":
        counts = [int(count > 0) for count in counts]
    return row_weights(counts) if op in _AVERAGES else ([1.0] * len(counts), 1.0)


class Fold:
    """Partial results, folded by an op from left to right.

    A worker folds its slices and gives each its weight; the master folds the workers' values, which
    are weighted already, and divides. ::

        weights, divisor = op_weights("avg", [2, 3, 4])
        fold = Fold("avg")             # in a worker with the first two slices
        fold.add(first, weights[0])
        fold.add(second, weights[1])
        total = Fold("avg", divisor)   # in the master
        total.add(fold.value())
        total.add(other_workers_value)
        average = total.value()

    So one worker with N slices and N workers with one do the same operations in the same order.
    Partial results are NumPy arrays or scalars, or PyTorch tensors, of one dtype, which the result
    has too; products, sums and the quotient are each rounded once. "gather" joins on axis 0, and
    makes a vector of partial results without dimensions; None keeps the last. A NaN in any makes
    maximum and minimum NaN. With `widens` sums and products of integers are int64 or uint64, as
    those of ``numpy.sum`` and ``numpy.prod``; without it, they wrap where they exceed their dtype.
    """

    def __init__(self, op: Op, divisor: float = 1.0, widens: bool = False) -> None:
        self.op, self._divisor = op, divisor
        self._widens = widens and op in ("sum", "prod")
        self._as_unsigned: Any = None  # the dtype to give a tensor of unsigned integers
        self._parts: list[Any] = []  # what was added; of all ops but "gather" the total alone
        self._is_own = False  # whether the total may be changed

    def add(self, partial: Any, weight: float = 1.0, is_own: bool = False) -> None:
        """Add the next partial result.

        It is kept by reference where that is possible, so its memory must not be reused before
        `value`. It is not changed, unless `is_own` gives it away.
        """
        if isinstance(partial, np.generic):
            partial, is_own = np.asarray(partial), True
        if self._widens:
            # PyTorch has no sum of uint64, whose bits are those of int64.
            if not isinstance(partial, np.ndarray) and not partial.dtype.is_signed:
                self._as_unsigned = library_of(partial).uint64
            partial = _widened(partial)
        if self.op == "gather":
            self._parts.append(partial)
            return
        if self.op in _AVERAGES and weight != 1:
            if is_own:
                partial *= weight
            else:
                partial, is_own = _as_array(partial * weight), True
        if self.op is None or not self._parts:
            self._parts, self._is_own = [partial], is_own
        else:
            self._parts, self._is_own = [self._folded(self._parts[0], partial)], True

    def value(self) -> Any:
        """Return the result, divided.

        Raises
        ------
        ValueError
            Nothing was added.
        """
        if not self._parts:
            raise ValueError(f"there is no partial result to fold by {self.op!r}")
        first = self._parts[0]
        if self.op == "gather":
            if first.ndim == 0:
                return library_of(first).stack(self._parts)
            return first if len(self._parts) == 1 else library_of(first).concatenate(self._parts)
        if self._divisor != 1:
            # A tensor by a tensor: on a GPU a number would be replaced by its reciprocal.
            is_array = isinstance(first, np.ndarray)
            divisor = self._divisor if is_array else first.new_full((), self._divisor)
            if self._is_own:
                first /= divisor
            else:
                first, self._is_own = _as_array(first / divisor), True
            self._parts, self._divisor = [first], 1.0
        return first if self._as_unsigned is None else first.view(self._as_unsigned)

    def _folded(self, total: Any, partial: Any) -> Any:
        if total.shape != partial.shape:  # which would be broadcast where one has a length of 1
            raise ValueError(
                f"partial results of shapes {tuple(total.shape)} and {tuple(partial.shape)} can't "
                f'be reduced by {self.op!r}; "gather" joins them'
            )
        library, own = library_of(total), {"out": total} if self._is_own else {}
        if self.op == "max":
            result = library.maximum(total, partial, **own)
        elif self.op == "min":
            result = library.minimum(total, partial, **own)
        elif self.op == "prod":
            result = library.multiply(total, partial, **own)
        else:
            result = library.add(total, partial, **own)
        return _as_array(result)


def _widened(partial: Any) -> Any:
    """Integers as int64 or uint64, of tensors always int64; other numbers as they are."""
    if isinstance(partial, np.ndarray):
        kind = partial.dtype.kind
        return partial.astype(f"{kind}8", copy=False) if kind in "iu" else partial
    is_integer = not (partial.is_floating_point() or partial.is_complex())
    return partial.to(library_of(partial).int64) if is_integer else partial


def _as_array(result: Any) -> Any:
    """Return NumPy's scalars, its results for arrays without dimensions, as such arrays."""
    return np.asarray(result) if isinstance(result, np.generic) else result
