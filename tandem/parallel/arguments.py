"""The arguments of a call: in order, of the right types, and divided over the ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from pytensor import scalar
from pytensor.tensor.variable import TensorVariable

from tandem.parallel.data import Data
from tandem.parallel.description import Description
from tandem.parallel.fold import check_op
from tandem.parallel.local_function import Share
from tandem.parallel.messages import ArrayLocation, Call, Rows
from tandem.parallel.registry import axes, label
from tandem.parallel.selection import Batch, Selection, is_same, select_local, select_many
from tandem.parallel.team import Team
from tandem.split import edges
from tandem.validation import refuse_masked

if TYPE_CHECKING:
    from tandem.parallel.pool import Pool

Reserve = Callable[[Team, Sequence[tuple[tuple[int, ...], np.dtype]]], list[ArrayLocation]]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, checked: what all ranks compute on."""

    values: Sequence[Any]  # of the inputs, arrays or `Data`, scattered ones first
    rows: Sequence[Selection]  # of each scattered input
    counts: tuple[int, ...] | None  # rows of each rank; None: nothing is divided
    local: Sequence[Selection] | None  # rows of each rank's sliceable variables; None: all
    slices: int
    outputs: tuple[int, ...]  # numbers of those that are computed

    def share(self, rank: int, ranks: int) -> Share:
        """Return what one rank computes."""
        local = None if self.local is None else self.local[rank]
        return Share(rank, ranks, self.rows, self.counts, local, self.slices, self.outputs)

    def pack(self, function: int, team: Team, reserve: Reserve) -> Call:
        """Put the inputs where workers see them, and make the message of the call.

        Of an array only the selected rows are copied. `reserve` gives places for arrays of given
        shapes and dtypes.
        """
        selections = [*self.rows, *[None] * (len(self.values) - len(self.rows))]
        pairs = list(zip(self.values, selections, strict=True))
        used = [rows for value, rows in pairs if isinstance(value, Data) and rows is not None]
        listed = {id(s): s.indices for s in (*used, *(self.local or ())) if s.indices is not None}
        kinds = [_kind(value, rows) for value, rows in pairs if not isinstance(value, Data)]
        kinds += [(indices.shape, indices.dtype) for indices in listed.values()]
        places = iter(reserve(team, kinds) if kinds else ())
        inputs, sent = [], []
        for value, rows in pairs:
            if isinstance(value, Data):
                place = team.buffers.place(value.buffer, value.data, value.array_place[0])
            else:
                place = next(places)
                area = team.buffers.array(place)
                if rows is None:
                    area[...] = value
                else:
                    rows.take(value, 0, rows.count, out=area)
                    rows = Selection(rows.count)
            inputs.append(place)
            if rows is not None:
                sent.append(rows)
        where = {key: next(places) for key in listed}
        for key, place in where.items():
            team.buffers.array(place)[...] = listed[key]

        def packed(every: Sequence[Selection]) -> tuple[Rows, ...]:
            return tuple(Rows(s.count, s.start, s.step, where.get(id(s))) for s in every)

        return Call(
            function,
            tuple(inputs),
            packed(sent),
            self.counts,
            None if self.local is None else packed(self.local),
            self.slices,
            self.outputs,
        )


class Signature:
    """The inputs of a function; checks the arguments of a call before any worker is told of it."""

    def __init__(self, pool: "Pool", description: Description) -> None:
        self._pool, self._description = pool, description
        self.inputs = [*description.scattered, *description.broadcast]
        self._labels = [_named(i, variable) for i, variable in enumerate(self.inputs)]
        self._outputs = tuple(range(len(description.outputs)))

    def check(
        self,
        values: Sequence[Any],
        output_subset: Sequence[int] | None,
        batch: Batch,
        batch_s: Any,
        num_slices: int,
    ) -> Arguments:
        """Check the arguments of a call, of which `values` are those of the inputs in order.

        Raises IndexError, TypeError or ValueError, see `Function`.
        """
        found = self.conditioned(values)
        rows = self._rows(found, batch)
        counts, local = self._counts(rows, batch_s)
        slices = self._checked_slices(num_slices)
        outputs = self._outputs if output_subset is None else self._subset(output_subset)
        return Arguments(found, rows, counts, local, slices, outputs)

    def ordered(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Put inputs that are given by name at their positions."""
        if not named and len(args) == len(self.inputs):
            return list(args)
        values: list[Any] = [*args, *[_MISSING] * (len(self.inputs) - len(args))]
        if len(args) > len(self.inputs):
            raise TypeError(f"{len(args)} inputs are given, the function has {len(self.inputs)}")
        positions = {variable.name: i for i, variable in enumerate(self.inputs)}
        for name, value in named.items():
            if name not in positions:
                raise TypeError(f"the function has no input {name!r}")
            if values[positions[name]] is not _MISSING:
                raise TypeError(f"the input {name!r} is given twice")
            values[positions[name]] = value
        missing = [self._labels[i] for i, value in enumerate(values) if value is _MISSING]
        if missing:
            raise TypeError(f"missing: {', '.join(missing)}")
        return values

    def whole(self, values: Sequence[Any]) -> list[Any]:
        """Check the inputs of a call in the master alone, of all rows, in order."""
        found = self.conditioned(values)
        self._rows(found, None)
        return [
            np.asarray(value).astype(variable.type.dtype, copy=False)
            for value, variable in zip(found, self.inputs, strict=True)
        ]

    def conditioned(self, values: Sequence[Any]) -> list[Any]:
        """Return inputs as arrays of their dtypes, or `Data` that can be up-cast to these."""
        return [self._conditioned(i, value) for i, value in enumerate(values)]

    def _conditioned(self, position: int, value: Any) -> Any:
        kind, got = self.inputs[position].type, value
        if isinstance(value, Data):
            is_safe = kind.dtype in (value.dtype, scalar.upcast(kind.dtype, value.dtype.name))
            if is_safe and _has_lengths(value.shape, kind.shape):
                return value
        else:
            if isinstance(value, np.ndarray) and not value.flags.aligned:  # as of a file's records
                value = value.copy()
            refuse_masked(value, self._labels[position])
            try:
                return kind.filter(value, strict=False, allow_downcast=None)
            except (TypeError, ValueError):
                try:
                    got = np.asarray(value)
                except ValueError as error:
                    raise TypeError(f"{self._labels[position]} is no array: {error}") from error
        text = f"{self._labels[position]} is {_described(kind)}; got {_described(got)}"
        is_castable = np.can_cast(got.dtype, kind.dtype, "same_kind")
        if is_castable and got.dtype != kind.dtype and got.ndim == kind.ndim:
            remedy = (
                f'make it with dtype="{kind.dtype}"'
                if isinstance(got, Data)
                else (f'cast it by astype("{kind.dtype}")')
            )
            text += f": {remedy}"
        raise TypeError(text)

    def _checked_slices(self, number: Any) -> int:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise ValueError(f"num_slices is {number!r}; it is an integer of at least 1")
        if number > 1:
            self._check_unsliced("num_slices")
            if not self._description.is_divided:
                raise ValueError("num_slices: the function has nothing to slice")
            for update in self._description.updates:
                what = f"the update of {label(update.variable)}"
                check_op(update.op, update.variable.type.dtype, what, is_update=True)
        return int(number)

    def _check_unsliced(self, argument: str) -> None:
        """Refuse to cut a variable that the function updates: its rows would get lost."""
        sliceables = self._description.sliceables
        for update in self._description.updates:
            if any(update.variable is variable for variable in sliceables):
                raise ValueError(
                    f"{argument}: the function updates {label(update.variable)}, one of its "
                    "sliceable_shareds, so it takes all of its rows in one call"
                )

    def _subset(self, subset: Sequence[int]) -> tuple[int, ...]:
        count = len(self._outputs)
        if not isinstance(subset, list | tuple | range | np.ndarray):
            raise TypeError(f"output_subset is a list of integers, not {subset!r}")
        for number in subset:
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                raise TypeError(f"output_subset: {number!r} is no integer")
            if not 0 <= number < count:
                raise ValueError(f"output_subset: there is no output {number}, of {count}")
        return tuple(sorted({int(number) for number in subset}))

    def _rows(self, values: Sequence[Any], batch: Batch) -> list[Selection]:
        """Select the rows of each scattered input."""
        scattered = values[: len(self._description.scattered)]
        if not scattered:
            if batch is not None:
                raise TypeError("batch: the function has no scattered input")
            return []
        are_cut = [isinstance(value, Data) and value.minibatch for value in scattered]
        rows = select_many(
            [len(value) for value in scattered], batch, are_cut, self._labels[: len(scattered)]
        )
        whole = Selection(rows.count)
        return [whole if is_cut else rows for is_cut in are_cut]

    def _counts(
        self, rows: Sequence[Selection], batch_s: Any
    ) -> tuple[tuple[int, ...] | None, list[Selection] | None]:
        """Count the rows of each rank; select those of sliceable variables."""
        pool, sliceables = self._pool, self._description.sliceables
        counts = None
        if rows:
            bounds = edges(rows[0].count, pool.ranks)
            counts = tuple(hi - lo for lo, hi in pairwise(bounds))
        local = None
        if sliceables and batch_s is not None:
            self._check_unsliced("batch_s")
        if sliceables:
            lengths = [pool.get_lengths(variable) for variable in sliceables]
            selected = [select_local(each, batch_s) for each in lengths]
            local = None if batch_s is None else selected[0]
            found = [tuple(part.count for part in each) for each in selected]
            for variable, each, other in zip(sliceables, selected, found, strict=True):
                expected = counts or found[0]
                if other != expected:
                    raise ValueError(
                        f"{label(variable)} has {list(other)} rows on the ranks, where the others "
                        f"have {list(expected)}"
                    )
                if not all(map(is_same, each, selected[0])):
                    raise ValueError(
                        f"{label(variable)} and {label(sliceables[0])} differ in length, and "
                        "batch_s selects different rows of them"
                    )
            counts = counts or found[0]
        elif batch_s is not None:
            raise TypeError("batch_s: the function has no sliceable variables")
        if counts is not None and not sum(counts):
            raise ValueError("there is no row to compute on")
        return counts, local


_MISSING = object()


def _named(position: int, variable: TensorVariable) -> str:
    name = f" ({variable.name})" if variable.name else ""
    return f"input {position}{name}"


def _has_lengths(shape: Sequence[int], lengths: Sequence[int | None]) -> bool:
    """Return whether a shape has these lengths, of which None may be any."""
    return len(shape) == len(lengths) and all(
        length in (None, n) for n, length in zip(shape, lengths, strict=True)
    )


def _described(kind: Any) -> str:
    """Describe an array, or a type of which lengths may be known."""
    text = f"{kind.dtype} with {axes(kind.ndim)}"
    if any(n is not None for n in kind.shape):
        lengths = ", ".join("any" if n is None else str(n) for n in kind.shape)
        text += f", ({lengths}{',' if kind.ndim == 1 else ''})"
    return text


def _kind(value: np.ndarray, rows: Selection | None) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an array, or of its selected rows."""
    return (value.shape if rows is None else (rows.count, *value.shape[1:])), value.dtype
