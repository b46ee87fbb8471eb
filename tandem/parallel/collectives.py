"""Collective operations on shared variables, which may differ between the ranks of a pool."""

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable

from tandem.parallel.data import Data
from tandem.parallel.messages import Open, Put, Reduce, Vector
from tandem.parallel.registry import axes, label
from tandem.parallel.residents import reduced
from tandem.parallel.selection import Batch, select
from tandem.parallel.team import Team
from tandem.parallel.transfers import Transfers
from tandem.validation import refuse_masked

log = logging.getLogger(__name__)

Weights = Literal["rows", "equal"] | Sequence[float]
Variables = SharedVariable | str | Sequence[SharedVariable | str]

REDUCTIONS = ("avg", "sum", "prod", "max", "min")


class Collectives(Transfers):
    """Operations on the shared variables of all ranks, called in the master.

    Variables are given themselves, or by name, one or several in a list or tuple; of one, the
    result is its result, of several, a list. `nccl` of the original is accepted and has no effect.
    """

    _has_logged_weights = False

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
        numbers, team = self._numbers(shared_vars), self.opened()
        found = self._paired(shared_vars, numbers, values)
        found = [
            self.registry.variables[number].get_value() if value is None else value
            for number, value in zip(numbers, found, strict=True)
        ]
        self._put(team, numbers, found)

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
        numbers, team = self._numbers(shared_vars), self.opened()
        found = self._paired(shared_vars, numbers, values)
        if any(value is None for value in found):
            raise TypeError("scatter needs a value for each variable")
        found = [_selected(value, batch) for value in found]
        self._put(team, numbers, found, scattered=True)

    def set_value(
        self, rank: int, shared_vars: Variables, values: Any, batch: Batch = None
    ) -> None:
        """Set variables on one rank, to values or to the rows of them that `batch` selects.

        Raises
        ------
        IndexError, TypeError, ValueError
            As `scatter`; there is no such rank.
        """
        self._check_rank(rank)
        numbers, team = self._numbers(shared_vars), self.opened()
        found = self._paired(shared_vars, numbers, values)
        if any(value is None for value in found):
            raise TypeError("set_value needs a value for each variable")
        if batch is not None:
            found = [_selected(value, batch) for value in found]
        self._put(team, numbers, found, only=rank)

    # Reading

    def get_value(self, rank: int, shared_vars: Variables) -> Any:
        """Return copies of the values of variables on one rank; ValueError without such a rank."""
        self._check_rank(rank)
        numbers, team = self._numbers(shared_vars), self.opened()
        values = [every[rank] for every in self._published(team, numbers, rank)]
        return _alike(shared_vars, [np.array(value) for value in values])

    def get_shapes(self, shared_vars: Variables) -> Any:
        """Return the shape of variables on each rank, a list by rank."""
        numbers = self._numbers(shared_vars)
        self.opened()
        return _alike(shared_vars, [self._shapes(number) for number in numbers])

    def get_lengths(self, shared_vars: Variables) -> Any:
        """Return the length of the first axis of variables on each rank, a list by rank."""
        numbers = self._numbers(shared_vars)
        self.opened()
        for number in numbers:
            if self.registry.variables[number].type.ndim == 0:
                raise TypeError(f"{label(self.registry.variables[number])} has no first axis")
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
        numbers, team = self._numbers(shared_vars), self.opened()
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
        numbers, team = self._numbers(shared_vars), self.opened()
        for number in numbers:
            self._check_shapes(number, 1)
            if self.registry.is_resident(number):
                raise TypeError(
                    f"{label(self.registry.variables[number])} is resident, of a fixed shape, and "
                    "can't take the values of all ranks"
                )
        joined = [np.concatenate(every) for every in self._published(team, numbers)]
        self._put(team, numbers, joined)

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
            Set the master's variables; otherwise the values are returned, and no variable changes:
            sums and products of integers as int64 or uint64.

        Raises
        ------
        TypeError, ValueError
            As of `all_reduce`.
        """
        numbers, team, op = self._numbers(shared_vars), self.opened(), _plain(op)
        shares = [self._shares(number, op, weights) for number in numbers]
        results = []
        for every, share in zip(self._published(team, numbers), shares, strict=True):
            results.append(reduced(every, op, share, widens=not in_place))
        if not in_place:
            return _alike(shared_vars, results)
        for number, result in zip(numbers, results, strict=True):
            self.registry.variables[number].set_value(result)
        self.registry.clear_rows(numbers)
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

        Terms are added in rank order; all ranks hold the same bits. Sums and products of integers
        that exceed the variable's dtype wrap.

        Parameters
        ----------
        op : "avg", "sum", "prod", "max" or "min"
        weights : "rows", "equal", or sequence of float by rank
            Of an average. "rows": a variable that each rank has computed from rows, by its last
            function, is weighed by their numbers, as are others of its vector that this function
            has written, and one without rows is not read; others are weighed equally. Other
            reductions read one without rows only where the function computes new values from old
            ones, or with "equal".

        Raises
        ------
        TypeError
            Average of integers.
        ValueError
            Shapes differ; there is no such reduction; weights do not fit.
        """
        numbers, team, op = self._numbers(shared_vars), self.opened(), _plain(op)
        shares = {number: tuple(self._shares(number, op, weights)) for number in numbers}
        self.registry.clear_rows(numbers)  # also where the rest fails
        in_place = [number for number in numbers if self._is_reduced_in_place(team, number, op)]
        staged = [number for number in numbers if number not in in_place]
        alone = [] if team.sees_memory else staged  # each rank has its own
        staged = staged if team.sees_memory else []
        published = dict(zip(staged, self._publish(team, staged), strict=True))
        # First those for which ranks wait for each other: a fault in another leaves none waiting.
        vectors = [Vector(number, shares[number]) for number in alone]
        vectors += [Vector(self.registry.extents[number], shares[number]) for number in in_place]
        vectors += [Vector(where, shares[number]) for number, where in published.items()]
        self._run(team, Reduce(tuple(vectors), op))
        if staged:
            first = tuple(published[number][self.master_rank] for number in staged)
            self._run(team, Put(tuple(staged), first))
            for number, place in zip(staged, first, strict=True):
                for rank in range(self.ranks):
                    self.registry.set_shape(number, rank, place.shape)

    # Helpers

    def _is_reduced_in_place(self, team: Team, number: int, op: str) -> bool:
        """Return whether a variable is reduced where it lies; others go through staging memory."""
        extent, residents = self.registry.extents.get(number), self.rank.residents
        if extent is None:
            return False
        if not residents.is_open(extent, op):
            self._run(team, Open(extent))
        return residents.reduces(extent, op)

    def _numbers(self, shared_vars: Variables) -> list[int]:
        """Number variables, which are given themselves or by name."""
        every = shared_vars if isinstance(shared_vars, list | tuple) else [shared_vars]
        numbers = [self._number(variable) for variable in every]
        if len(set(numbers)) != len(numbers):
            raise ValueError("a variable is given twice")
        return numbers

    def _number(self, variable: Any) -> int:
        if isinstance(variable, str):
            found = [n for n, v in self.registry.variables.items() if v.name == variable]
            if len(found) != 1:
                count = f"{len(found)} shared variables" if found else "no shared variable"
                raise ValueError(f"{count} of this pool with the name {variable!r}")
            return found[0]
        if not isinstance(variable, SharedVariable):
            raise TypeError(f"a shared variable is needed, not {type(variable).__name__}")
        return self.registry.number_of(variable)

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
        variable = self.registry.variables[number]
        kind = variable.type.clone(shape=(None,) * variable.type.ndim)
        if isinstance(value, Data) and value.data.dtype == kind.dtype and value.ndim == kind.ndim:
            return value
        refuse_masked(value, label(variable))
        try:
            plain = np.asarray(value) if isinstance(value, Data) else value
            if isinstance(plain, np.ndarray):
                plain = np.require(plain, requirements="A")  # as fields of records are not
            return kind.filter(plain, allow_downcast=None)
        except (TypeError, ValueError) as error:
            what = f"{label(variable)} is {kind.dtype} with {axes(kind.ndim)}"
            try:
                got = np.asarray(value)
            except ValueError:
                raise TypeError(f"{what}; got what is no array: {error}") from error
            raise TypeError(f"{what}; got {got.dtype} with {axes(got.ndim)}") from error

    def _check_rank(self, rank: int) -> None:
        if not isinstance(rank, int | np.integer):
            raise TypeError(f"a rank is an integer, not {rank!r}")
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank}; there are {self.ranks}")

    def _shares(self, number: int, op: str, weights: Weights) -> list[float]:
        """The weight of each rank's value in a reduction; 0 for one that is not read."""
        variable = self.registry.variables[number]
        self._check_shapes(number, 0)
        kind = np.dtype(variable.type.dtype).kind
        if op in ("sum", "prod") and kind == "b":
            raise TypeError(f"{label(variable)} is bool, which has no {op!r}")
        if op == "avg" and kind not in "fc":
            raise TypeError(
                f"{label(variable)} is {variable.type.dtype}, whose average would be rounded: use "
                'op="sum"'
            )
        rows = self.registry.rows(number)
        if not isinstance(weights, str):
            return _given_shares(weights, self.ranks, op)
        if weights not in ("rows", "equal"):
            raise ValueError(f"weights is {weights!r}; it can be 'rows', 'equal', or numbers")
        if rows is None or weights == "equal":
            return [1 / self.ranks if op == "avg" else 1.0] * self.ranks
        if op != "avg":
            # What a rank without rows holds is of an earlier call, and counts where it is added to.
            adds = self.registry.adds(number)
            return [float(count > 0 or adds) for count in rows]
        if len(set(rows)) > 1 and not self._has_logged_weights:
            self._has_logged_weights = True
            log.info(
                "%s is averaged by the rows from which each worker has computed it, %s; "
                'weights="equal" weighs workers equally',
                label(variable),
                list(rows),
            )
        return [count / sum(rows) for count in rows]


def _plain(op: Any) -> str:
    """Check the name of a reduction, and return it without ``c_``."""
    plain = op.removeprefix("c_") if isinstance(op, str) else op
    if plain not in REDUCTIONS:
        raise ValueError(f"there is no reduction {op!r}; there are {', '.join(REDUCTIONS)}")
    return str(plain)


def _given_shares(weights: Sequence[float], ranks: int, op: str) -> list[float]:
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise TypeError(f"weights are numbers, one for each rank, not {weights!r}") from None
    if op != "avg":
        raise ValueError(f"weights are of an average, and the op is {op!r}")
    if len(numbers) != ranks or min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
        raise ValueError(
            f"weights are {numbers}; there are {ranks} ranks, each with a number of at least 0, "
            "not all 0"
        )
    return [number / sum(numbers) for number in numbers]


def _alike(shared_vars: Variables, results: list[Any]) -> Any:
    """Return a list of results for several variables, the result itself for one."""
    return results if isinstance(shared_vars, list | tuple) else results[0]


def _selected(value: Any, batch: Batch) -> Any:
    """The rows of a value, or the value itself without a selection."""
    array = np.asarray(value)
    if array.ndim == 0:
        raise TypeError("a value without axes has no rows")
    if batch is None:
        return value
    selection = select(len(array), batch)
    return selection.take(array, 0, selection.count)
