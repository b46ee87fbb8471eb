"""Collective operations on shared variables, which may differ between the ranks of a pool."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable

from tandem.memory import HostBuffer
from tandem.parallel.data import Data
from tandem.parallel.fold import Fold
from tandem.parallel.messages import Place, Publish, Put, Reduce, Rows, Task, Vector
from tandem.parallel.registry import Registry, Shape, label
from tandem.parallel.selection import Batch, Selection, select
from tandem.parallel.team import Team
from tandem.split import edges

log = logging.getLogger(__name__)

Weights = Literal["rows", "equal"] | Sequence[float]
Variables = SharedVariable | str | Sequence[SharedVariable | str]

REDUCTIONS = ("avg", "sum", "prod", "max", "min")

_ALIGNMENT = 256  # bytes


class Collectives(ABC):
    """Operations on the shared variables of all ranks, called in the master.

    Variables are given themselves, or by name, one or several in a list or tuple; of one, the
    result is its result, of several, a list. `nccl` of the original is accepted and has no effect.
    """

    ranks: int
    master_rank: int
    _registry: Registry
    _rank: Rank  # the master's
    _staging: HostBuffer  # for values on their way
    _has_logged_weights = False

    @abstractmethod
    def _opened(self) -> Team:
        """Return the workers, which have all functions and variables; RuntimeError if closed."""

    # Writing

    def broadcast(self, shared_vars: Variables, values: Any = None, nccl: bool = True) -> None:
        """Give all ranks the master's values of variables, or new values.

        Parameters
        ----------
        values : array, `Data`, or a list of them, optional
            One for each variable; None, also among others, stands for the master's value.

        Raises
        ------
        TypeError
            A value does not fit its variable.
        """
        numbers, team = self._numbers(shared_vars), self._opened()
        found = self._paired(shared_vars, numbers, values)
        self._put(team, numbers, found, None)

    def scatter(self, shared_vars: Variables, values: Any, batch: Batch = None) -> None:
        """Divide the rows of values over the ranks: each sets its variable to its part.

        Parameters
        ----------
        values : array, `Data`, or a list of them
            One for each variable.
        batch : int, slice, sequence or array of int, optional
            The rows that are divided, see `Function`.

        Raises
        ------
        IndexError
            `batch` names rows that do not exist.
        TypeError, ValueError
            A value does not fit its variable.
        """
        numbers, team = self._numbers(shared_vars), self._opened()
        found = self._paired(shared_vars, numbers, values)
        if any(value is None for value in found):
            raise TypeError("scatter needs a value for each variable")
        self._put(team, numbers, found, [select(_length(value), batch) for value in found])

    def set_value(self, rank: int, shared_vars: Variables, values: Any, batch: Batch = None) -> None:
        """Set variables on one rank, to values or to the rows of them that `batch` selects.

        Raises
        ------
        IndexError, TypeError, ValueError
            As `scatter`; there is no such rank.
        """
        self._check_rank(rank)
        numbers, team = self._numbers(shared_vars), self._opened()
        found = self._paired(shared_vars, numbers, values)
        if batch is not None:
            found = [_selected(value, batch) for value in found]
        self._put(team, numbers, found, None, rank)

    # Reading

    def get_value(self, rank: int, shared_vars: Variables) -> Any:
        """Return copies of the values of variables on one rank; ValueError without such a rank."""
        self._check_rank(rank)
        numbers, team = self._numbers(shared_vars), self._opened()
        values = [every[rank] for every in self._published(team, numbers, rank)]
        return _alike(shared_vars, [np.array(value) for value in values])

    def get_shapes(self, shared_vars: Variables) -> Any:
        """Return the shape of variables on each rank, a list by rank."""
        numbers = self._numbers(shared_vars)
        self._opened()
        return _alike(shared_vars, [self._shapes(number) for number in numbers])

    def get_lengths(self, shared_vars: Variables) -> Any:
        """Return the length of the first axis of variables on each rank, a list by rank."""
        numbers = self._numbers(shared_vars)
        self._opened()
        for number in numbers:
            if self._registry.variables[number].type.ndim == 0:
                raise TypeError(f"{label(self._registry.variables[number])} has no first axis")
        return _alike(shared_vars, [[s[0] for s in self._shapes(n)] for n in numbers])

    def gather(self, shared_vars: Variables, nd_up: int = 1, nccl: bool = True) -> Any:
        """Return the values of variables on all ranks, in the master.

        Parameters
        ----------
        nd_up : int
            1: along a new first axis, by rank, for which shapes must be equal. 0: joined on the
            first axis.

        Raises
        ------
        ValueError
            Shapes do not fit, or `nd_up` is neither.
        """
        numbers, team = self._numbers(shared_vars), self._opened()
        if nd_up not in (0, 1):
            raise ValueError(f"nd_up is {nd_up!r}; it can be 0 or 1")
        for number in numbers:
            self._check_shapes(number, 0 if nd_up else 1)
        join = np.stack if nd_up else np.concatenate
        return _alike(shared_vars, [join(every) for every in self._published(team, numbers)])

    def all_gather(self, shared_vars: Variables, nccl: bool = True) -> None:
        """Give all ranks the values of all, joined on the first axis.

        Raises
        ------
        TypeError
            A variable is resident, and its shape is fixed.
        ValueError
            Shapes do not fit.
        """
        numbers, team = self._numbers(shared_vars), self._opened()
        for number in numbers:
            self._check_shapes(number, 1)
            if self._registry.is_resident(number):
                raise TypeError(
                    f"{label(self._registry.variables[number])} is resident, of a fixed shape, and "
                    "can't take the values of all ranks"
                )
        joined = [np.concatenate(every) for every in self._published(team, numbers)]
        self._put(team, numbers, joined, None)

    # Reducing

    def reduce(
        self,
        shared_vars: Variables,
        op: str = "avg",
        in_place: bool = True,
        nccl: bool = True,
        *,
        weights: Weights = "rows",
    ) -> Any:
        """Reduce the values of all ranks in the master.

        Parameters
        ----------
        op, weights
            As of `all_reduce`.
        in_place : bool
            Set the master's variables; otherwise the values are returned, and no variable changes.

        Raises
        ------
        TypeError, ValueError
            As of `all_reduce`.
        """
        numbers, team = self._numbers(shared_vars), self._opened()
        shares = [self._shares(number, op, weights) for number in numbers]
        results = []
        for every, share in zip(self._published(team, numbers), shares, strict=True):
            results.append(reduced(every, op, share))
        if not in_place:
            return _alike(shared_vars, results)
        for number, result in zip(numbers, results, strict=True):
            self._registry.variables[number].set_value(result)
        self._registry.clear_rows(numbers)
        return None

    def all_reduce(
        self,
        shared_vars: Variables,
        op: str = "avg",
        nccl: bool = True,
        *,
        weights: Weights = "rows",
    ) -> None:
        """Reduce the values of all ranks, and set the variables of all to the result.

        Terms are added in rank order; all ranks hold the same bits.

        Parameters
        ----------
        op : "avg", "sum", "prod", "max" or "min"
        weights : "rows", "equal", or sequence of float by rank
            Of an average. "rows": a variable that each rank has computed from rows, by its last
            function, is weighed by their numbers, and one without rows is not read; others are
            weighed equally.

        Raises
        ------
        TypeError
            Average of integers.
        ValueError
            Shapes differ; there is no such reduction; weights do not fit.
        """
        numbers, team = self._numbers(shared_vars), self._opened()
        shares = [tuple(self._shares(number, op, weights)) for number in numbers]
        private = [number for number in numbers if not self._registry.is_resident(number)]
        published = dict(zip(private, self._publish(team, private), strict=True))
        vectors = []
        for number, share in zip(numbers, shares, strict=True):
            where = published.get(number) or self._registry.extents[number]
            vectors.append(Vector(where, share))
        self._run(team, Reduce(tuple(vectors), op))
        if private:
            first = tuple(published[number][self.master_rank] for number in private)
            self._run(team, Put(tuple(private), first, None))
            for number, place in zip(private, first, strict=True):
                for rank in range(self.ranks):
                    self._registry.set_shape(number, rank, place.shape)
        self._registry.clear_rows(numbers)

    # Helpers

    def _run(self, team: Team, task: Put | Publish | Reduce) -> None:
        team.run(task, lambda: self._rank.do(task))

    def _numbers(self, shared_vars: Variables) -> list[int]:
        """Number variables, which are given themselves or by name."""
        every = shared_vars if isinstance(shared_vars, list | tuple) else [shared_vars]
        numbers = [self._number(variable) for variable in every]
        if len(set(numbers)) != len(numbers):
            raise ValueError("a variable is given twice")
        return numbers

    def _number(self, variable: Any) -> int:
        if isinstance(variable, str):
            found = [n for n, v in enumerate(self._registry.variables) if v.name == variable]
            if len(found) != 1:
                count = "no shared variable" if not found else f"{len(found)} shared variables"
                raise ValueError(f"{count} of this pool has the name {variable!r}")
            return found[0]
        if not isinstance(variable, SharedVariable):
            raise TypeError(f"a shared variable is needed, not {type(variable).__name__}")
        return self._registry.number_of(variable)

    def _paired(self, shared_vars: Variables, numbers: Sequence[int], values: Any) -> list[Any]:
        """Pair values with variables; each is an array or `Data` that fits, or None."""
        if values is None:
            return [None] * len(numbers)
        if not isinstance(shared_vars, list | tuple):
            values = [values]
        elif not isinstance(values, list | tuple) or len(values) != len(numbers):
            raise TypeError(f"{len(numbers)} variables need a list or tuple of as many values")
        return [
            None if value is None else self._fitting(number, value)
            for number, value in zip(numbers, values, strict=True)
        ]

    def _fitting(self, number: int, value: Any) -> Any:
        variable = self._registry.variables[number]
        kind = variable.type.clone(shape=(None,) * variable.type.ndim)
        if isinstance(value, Data) and value.data.dtype == kind.dtype and value.ndim == kind.ndim:
            return value
        try:
            return kind.filter(np.asarray(value), allow_downcast=None)
        except TypeError as error:
            got = np.asarray(value)
            raise TypeError(
                f"{label(variable)} is {kind.dtype} with {kind.ndim} axes; got {got.dtype} with "
                f"{got.ndim}"
            ) from error

    def _put(
        self,
        team: Team,
        numbers: Sequence[int],
        values: Sequence[Any],
        rows: Sequence[Selection] | None,
        only: int | None = None,
    ) -> None:
        """Set variables on all ranks, or only one, to values or to their parts of the rows."""
        ranks = range(self.ranks) if only is None else [only]
        master = self._registry.variables
        values = [
            master[number].get_value(borrow=True) if value is None else value
            for number, value in zip(numbers, values, strict=True)
        ]
        parts = [self._parts(value, rows and rows[i]) for i, value in enumerate(values)]
        for number, every in zip(numbers, parts, strict=True):
            for rank in ranks:
                self._check_shape(number, every[rank].shape)
        sent = []
        for index, number in enumerate(numbers):
            if self._registry.is_resident(number):
                for rank in ranks:
                    self._rank.residents.write(
                        self._registry.extents[number], rank, parts[index][rank]
                    )
            else:
                sent.append(index)
        if sent:
            places = self._staged(team, [values[index] for index in sent])
            packed = None
            if rows is not None:
                packed = tuple(self._packed(team, rows[index]) for index in sent)
            variables = tuple(numbers[index] for index in sent)
            self._run(team, Put(variables, tuple(places), packed, only))
        for index in sent:
            for rank in ranks:
                self._registry.set_shape(numbers[index], rank, parts[index][rank].shape)
        self._registry.clear_rows(numbers)
