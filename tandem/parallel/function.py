"""A data-parallel function, as the master calls it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.parallel.arguments import Signature
from tandem.parallel.data import Data, data
from tandem.parallel.description import Description
from tandem.parallel.fold import Fold
from tandem.parallel.local_function import LocalFunction, Share, partial_weights
from tandem.parallel.messages import Answer
from tandem.parallel.registry import label
from tandem.parallel.selection import Batch
from tandem.parallel.team import Team

if TYPE_CHECKING:
    from tandem.parallel.pool import Pool


@dataclass
class Times:
    """The time of a function's calls by its use, in seconds, as the master sees it.

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
        self._signature = Signature(pool, description)
        self._updated = [label(update.variable) for update in description.updates]
        number_of = pool.registry.number_of
        self._written = [number_of(update.variable) for update in description.updates]
        vector_of = pool.registry.vector_of
        from_rows = {vector_of(number_of(u.variable)) for u in description.updates_from_rows()}
        self._written_from_rows = [n for n in self._written if vector_of(n) in from_rows]
        self._adding = {number_of(u.variable) for u in description.updates if u.reads_itself}

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
            Numbers of the outputs that are computed, all by default. Updates are always made, on a
            rank without rows those that are computed from none: once, not for each slice.
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
        team = pool.opened(self)
        values = self._signature.ordered(args, named)
        arguments = self._signature.check(values, output_subset, batch, batch_s, num_slices)
        share = arguments.share(pool.master_rank, pool.ranks)
        task = None
        if pool.ranks > 1:
            task = arguments.pack(self.number, team, pool.reserve)
        self._pool.registry.clear_rows(self._written)
        try:
            own, answers = team.run(task, lambda: self._own(arguments.values, share), self._updated)
        finally:
            self._record_shapes(team)  # also of ranks that have computed where others failed
        if share.counts is not None:
            self._pool.registry.record_rows(self._written_from_rows, share.counts, self._adding)
        self._count(team.waited)
        began = time.perf_counter()
        results = self._reduced(team, own, answers, share)
        self.times.reduce += time.perf_counter() - began
        if self._returns_list:
            return results
        return results[0] if results else None

    def as_theano(self, *args: Any, **named: Any) -> Any:
        """Compute in the master alone, on all rows: what a PyTensor function of the graph does.

        Takes the inputs, and returns the outputs, of a call. Updates are made in the master.
        """
        self._pool.check_open()
        values = self._signature.ordered(args, named)
        arrays = [np.asarray(value) for value in self._signature.whole(values)]
        results = self.local.whole(arrays)
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
        values = self._signature.ordered(args, named)
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
            for value, variable, is_cut in zip(values, self._signature.inputs, are_cut, strict=True)
        )
        return made[0] if len(made) == 1 else made

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
            fold = Fold(op, divisor, widens=True)
            for rank in range(share.ranks):
                if rank == share.rank:
                    if own is not None:
                        fold.add(own[i])
                    continue
                places = answers[rank].results
                if places is not None:
                    fold.add(team.result(rank, places[i]), is_own=True)
            results.append(np.asarray(fold.value()))
        return results

    def _count(self, waited: float) -> None:
        self.times.excerpt += self.local.excerpt
        self.times.function += self.local.function
        self.times.straggler += waited
        self.times.calls += 1

    def _record_shapes(self, team: Team) -> None:
        """Remember the shapes that a call has given to variables of the workers."""
        for rank, answer in team.answers.items():
            if isinstance(answer, Answer):
                for number, shape in answer.shapes.items():
                    self._pool.registry.set_shape(number, rank, shape)
