"""A data-parallel function, as the master calls it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from pytensor import scalar
from pytensor.tensor.variable import TensorVariable

from tandem.parallel.data import Data, data
from tandem.parallel.description import Description
from tandem.parallel.fold import Fold, check_op
from tandem.parallel.local_function import LocalFunction, Share, partial_weights
from tandem.parallel.messages import Answer, Call, Rows
from tandem.parallel.registry import label
from tandem.parallel.selection import Batch, Selection, select_local, select_many
from tandem.parallel.team import Team
from tandem.split import edges

if TYPE_CHECKING:
    from tandem.parallel.pool import Pool


@dataclass
class Times:
    """Where the time of a function's calls has gone, in seconds, as the master sees it.

    The parts are those of table 1 of Stooke and Abbeel (2017, arXiv 1710.04162).
    """

    excerpt: float = 0.0  # taking this rank's rows of the inputs
    function: float = 0.0  # computing
    straggler: float = 0.0  # waiting for workers that took longer
    reduce: float = 0.0  # reducing or gathering the outputs
    calls: int = 0


class Function:
    """A function whose rows are divided over the ranks of a pool. Made by `function`.

    Called as the PyTensor function of the same graph: with its inputs in their order, or by name,
    each an array or a `Data`. Rows of scattered inputs are divided by `tandem.split.edges`; each
    rank computes its part, and outputs are reduced.

    Attributes
    ----------
    times : Times
        Of all calls so far.
    """

    def __init__(
        self, pool: "Pool", number: int, description: Description, returns_list: bool
    ) -> None:
        self.times, self.number, self.description = Times(), number, description
        self._pool, self._returns_list = pool, returns_list
        self.local = LocalFunction(description, pool.make_mode, pool.rank.gpu)
        self._inputs = [*description.scattered, *description.broadcast]
        self._updated = [label(update.variable) for update in description.updates]
        # Data need not have lengths that are known before.
        self._kinds = [v.type.clone(shape=(None,) * v.type.ndim) for v in self._inputs]
        self._labels = [_named(i, variable) for i, variable in enumerate(self._inputs)]
        number_of = pool.registry.number_of
        self._written = [number_of(update.variable) for update in description.updates]
        from_rows = description.updates_from_rows()
        self._written_from_rows = [number_of(update.variable) for update in from_rows]
        self._all_outputs = tuple(range(len(description.outputs)))

    @property
    def name(self) -> str | None:
        """The name that it was given when it was made."""
        name: str | None = self.description.options.get("name")
        return name

    def __repr__(self) -> str:
        return f"Function({self.name or self.number}, {self._pool.ranks} ranks)"

    def __call__(
        self,
        *args: Any,
        output_subset: Sequence[int] | None = None,
        batch: Batch = None,
        batch_s: Any = None,
        num_slices: int = 1,
        **named: Any,
    ) -> Any:
        """Compute on all ranks.

        Parameters
        ----------
        *args, **named : array or Data
            Inputs. Arrays are copied, once, to memory that all ranks see; `Data` is there.
        output_subset : sequence of int, optional
            Numbers of the outputs that are computed, all by default. Updates are always made.
        batch : int, slice, or sequence or array of int or bool, optional
            Rows of the scattered inputs to work on: the first n, or those that it selects. Inputs
            that are minibatches hold these rows already.
        batch_s : as `batch`, or a list of slices or sequences, one for each rank
            Rows of each rank's own sliceable variables to work on.
        num_slices : int
            Each rank computes its rows in so many parts, which takes less memory. All start from
            the same values of the shared variables.

        Returns
        -------
        ndarray, or list of ndarray
            As outputs were given. None for one of op None, if the master has no rows.

        Raises
        ------
        IndexError
            A selection names rows that do not exist. No worker has been told.
        TypeError
            An input is missing, or its dtype or number of axes does not fit.
        ValueError
            Inputs differ in length; there is no row at all.
        RuntimeError
            The pool is closed.
        WorkerLost
            A worker process has ended.
        """
        pool = self._pool
        team = pool.opened()
        inputs = self._ordered(args, named)
        values = [self._conditioned(i, value) for i, value in enumerate(inputs)]
        slices = self._checked_slices(num_slices)
        outputs = self._all_outputs
        if output_subset is not None:
            outputs = self._checked_subset(output_subset)
        rows = self._rows(values, batch)
        counts, local = self._counts(rows, batch_s)
        share = Share(
            pool.master_rank,
            pool.ranks,
            rows,
            counts,
            None if local is None else local[pool.master_rank],
            slices,
            outputs,
        )
        task = self._packed(team, values, share, local) if pool.ranks > 1 else None
        own, answers = team.run(task, lambda: self._own(values, share), self._updated)
        self._count(team.waited)
        began = time.perf_counter()
        results = self._reduced(team, own, answers, share)
        self.times.reduce += time.perf_counter() - began
        self._record(counts, answers)
        if self._returns_list:
            return results
        return results[0] if results else None

    def as_theano(self, *args: Any, **named: Any) -> Any:
        """Compute in the master alone, on all rows: what a PyTensor function of the graph does.

        Takes the inputs, and returns the outputs, of a call. Updates are made in the master.
        """
        self._pool.check_open()
        values = [
            np.asarray(self._conditioned(i, value))
            for i, value in enumerate(self._ordered(args, named))
        ]
        count = len(self.description.scattered)
        if count:
            self._rows(values[:count], None)
        results = self.local.whole(
            [
                value.astype(variable.type.dtype, copy=False)
                for value, variable in zip(values, self._inputs, strict=True)
            ]
        )
        if (gpu := self._pool.rank.gpu) is not None:
            results = gpu.download(results)
        self._pool.registry.clear_rows(self._written)
        if self._returns_list:
            return results
        return results[0] if results else None

    def build_inputs(
        self,
        *args: Any,
        force_cast: bool = False,
        oversize: float = 1,
        minibatch: bool | Sequence[bool] = False,
        **named: Any,
    ) -> Any:
        """Make a `Data` of each input's dtype and number of axes, and copy a value into it.

        Parameters
        ----------
        *args, **named : array
            As of a call.
        force_cast, oversize
            See `data`.
        minibatch : bool, or sequence of bool by input
            See `data`.

        Returns
        -------
        Data, or tuple of Data
        """
        values = self._ordered(args, named)
        are_cut = [minibatch] * len(values) if isinstance(minibatch, bool) else list(minibatch)
        if len(are_cut) != len(values):
            raise ValueError(f"minibatch has {len(are_cut)} members, for {len(values)} inputs")
        made = tuple(
            data(
                value,
                var=variable,
                minibatch=is_cut,
                force_cast=force_cast,
                oversize=oversize,
                name=variable.name,
            )
            for value, variable, is_cut in zip(values, self._inputs, are_cut, strict=True)
        )
        return made[0] if len(made) == 1 else made

    # Inputs

    def _ordered(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Put inputs that are given by name at their positions."""
        if not named and len(args) == len(self._inputs):
            return list(args)
        values: list[Any] = [*args, *[_MISSING] * (len(self._inputs) - len(args))]
        if len(args) > len(self._inputs):
            raise TypeError(f"{len(args)} inputs are given, the function has {len(self._inputs)}")
        positions = {variable.name: i for i, variable in enumerate(self._inputs)}
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

    def _conditioned(self, position: int, value: Any) -> Any:
        """Return an input as an array of its dtype, or a `Data` that can be up-cast to it."""
        kind = self._kinds[position]
        if isinstance(value, Data):
            fits = kind.dtype == value.dtype or scalar.upcast(kind.dtype, value.dtype.name) == (
                kind.dtype
            )
            if fits and value.ndim == kind.ndim:
                return value
            got = f"{value.dtype} with {value.ndim} axes"
        else:
            try:
                return kind.filter(value, strict=False, allow_downcast=None)
            except (TypeError, ValueError):
                array = np.asarray(value)
                got = f"{array.dtype} with {array.ndim} axes"
        raise TypeError(
            f"{self._labels[position]} is {kind.dtype} with {kind.ndim} axes; got {got}"
        )

    def _checked_slices(self, number: Any) -> int:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise ValueError(f"num_slices is {number!r}; it is an integer of at least 1")
        if number > 1:
            if not self.description.is_divided:
                raise ValueError("num_slices: the function has nothing to slice")
            for update in self.description.updates:
                what = f"the update of {label(update.variable)}"
                check_op(update.op, update.variable.type.dtype, what, is_update=True)
        return int(number)

    def _checked_subset(self, subset: Sequence[int]) -> tuple[int, ...]:
        count = len(self._all_outputs)
        for number in subset:
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                raise TypeError(f"output_subset: {number!r} is no integer")
            if not 0 <= number < count:
                raise ValueError(f"output_subset: there is no output {number}, of {count}")
        return tuple(sorted({int(number) for number in subset}))

    # Rows

    def _rows(self, values: Sequence[Any], batch: Batch) -> list[Selection]:
        """Select the rows of each scattered input."""
        scattered = values[: len(self.description.scattered)]
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
        pool, sliceables = self._pool, self.description.sliceables
        counts = None
        if rows:
            bounds = edges(rows[0].count, pool.ranks)
            counts = tuple(hi - lo for lo, hi in pairwise(bounds))
        local = None
        if sliceables:
            lengths = [pool.get_lengths(variable) for variable in sliceables]
            selected = [select_local(each, batch_s) for each in lengths]
            local = None if batch_s is None else selected[0]
            found = [tuple(part.count for part in each) for each in selected]
            for variable, other in zip(sliceables, found, strict=True):
                expected = counts or found[0]
                if other != expected:
                    raise ValueError(
                        f"{label(variable)} has {list(other)} rows on the ranks, where the others "
                        f"have {list(expected)}"
                    )
            counts = counts or found[0]
        elif batch_s is not None:
            raise TypeError("batch_s: the function has no sliceable variables")
        if counts is not None and not sum(counts):
            raise ValueError("there is no row to compute on")
        return counts, local

    def _packed(
        self, team: Team, values: Sequence[Any], share: Share, local: Sequence[Selection] | None
    ) -> Call:
        """Put what the workers need where they see it: rows of arrays, and indices."""
        if not values and not local:
            return Call(self.number, (), (), share.counts, None, share.slices, share.outputs)
        reserved: list[tuple[Selection | None, np.ndarray]] = []
        sent: list[Selection] = []
        rows = [*share.rows, *[None] * (len(values) - len(share.rows))]
        for value, selection in zip(values, rows, strict=True):
            if not isinstance(value, Data):
                reserved.append((selection, value))
        indices = {id(s): s.indices for s in (*share.rows, *(local or ())) if s.indices is not None}
        kinds = [
            ((s.count, *v.shape[1:]) if s is not None else v.shape, v.dtype) for s, v in reserved
        ]
        kinds += [(array.shape, array.dtype) for array in indices.values()]
        places = iter(self._pool.reserve(team, kinds))
        inputs = []
        for value, selection in zip(values, rows, strict=True):
            if isinstance(value, Data):
                inputs.append(team.buffers.place(value.buffer, value.data, value.array_place[0]))
                if selection is not None:
                    sent.append(selection)
                continue
            place = next(places)
            area = team.buffers.array(place)
            if selection is None:
                area[...] = value
            else:
                selection.take(value, 0, selection.count, out=area)
                sent.append(Selection(selection.count))
            inputs.append(place)
        where = {}
        for key, array in indices.items():
            where[key] = next(places)
            team.buffers.array(where[key])[...] = array

        def packed(s: Selection) -> Rows:
            return Rows(s.count, s.start, s.step, where.get(id(s)))

        return Call(
            self.number,
            tuple(inputs),
            tuple(packed(selection) for selection in sent),
            share.counts,
            None if local is None else tuple(packed(selection) for selection in local),
            share.slices,
            share.outputs,
        )

    # Results

    def _own(self, values: Sequence[Any], share: Share) -> list[np.ndarray] | None:
        """Compute the master's part."""
        rank = self._pool.rank
        if rank.gpu is not None:
            for value in values:
                if isinstance(value, Data):
                    rank.gpu.lock(value.buffer)
        folds = self.local.run([np.asarray(value) for value in values], share)
        return None if folds is None else rank.as_arrays([fold.value() for fold in folds])

    def _reduced(
        self,
        team: Team,
        own: Sequence[np.ndarray] | None,
        answers: Mapping[int, Answer],
        share: Share,
    ) -> list[Any]:
        """Fold the results of all ranks, in rank order."""
        results = []
        for i, number in enumerate(share.outputs):
            op = self.description.output_ops[number]
            if op is None:
                results.append(None if own is None else own[i])
                continue
            counts = share.counts or (1,) * share.ranks
            _, divisor = partial_weights(counts, share.slices, op)
            fold = Fold(op, divisor)
            for rank in range(share.ranks):
                if rank == share.rank:
                    if own is not None:
                        fold.add(own[i])
                    continue
                places = answers[rank].results
                if places is not None:
                    place = places[i]
                    assert place is not None
                    result = team.results[rank].array(place.shape, place.dtype, place.offset)
                    # The next answer overwrites it.
                    fold.add(result.copy(), is_own=True)
            results.append(np.asarray(fold.value()))
        return results

    def _count(self, waited: float) -> None:
        self.times.excerpt += self.local.excerpt
        self.times.function += self.local.function
        self.times.straggler += waited
        self.times.calls += 1

    def _record(self, counts: tuple[int, ...] | None, answers: Mapping[int, Answer]) -> None:
        """Remember what the call has written: shapes, and rows that it was computed from."""
        registry = self._pool.registry
        registry.clear_rows(self._written)
        if counts is not None:
            registry.record_rows(self._written_from_rows, counts)
        for rank, answer in answers.items():
            for number, shape in answer.shapes.items():
                registry.set_shape(number, rank, shape)


_MISSING = object()


def _named(position: int, variable: TensorVariable) -> str:
    name = f" ({variable.name})" if variable.name else ""
    return f"input {position}{name}"
