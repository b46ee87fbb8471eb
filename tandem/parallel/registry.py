"""The shared variables of a pool: their numbers, shapes on all ranks, and rows."""

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.sharedvar import TensorSharedVariable

from tandem.parallel.messages import Extent

Shape = tuple[int, ...]


@dataclass
class _Record:
    """The rows from which each rank has computed a variable."""

    counts: tuple[int, ...]
    adds: bool  # to its old value, which ranks without rows still hold
    witness: Any  # tells whether the master has set the variable since


class Registry:
    """The shared variables of a pool, by number.

    A resident variable has an extent of every rank's memory. Another is private: each rank has an
    array of its own, whose shape may differ.
    """

    def __init__(self) -> None:
        self.variables: dict[int, SharedVariable] = {}
        self.extents: dict[int, Extent] = {}  # of residents
        self._parts: dict[int, tuple[int, ...]] = {}  # of a vector: the variables that lie in it
        self._vectors: dict[int, int] = {}  # of such a variable: the vector
        self._numbers: dict[SharedVariable, int] = {}
        self._shapes: dict[int, dict[int, Shape]] = {}  # of private ones, by rank
        self._records: dict[int, _Record] = {}

    def number_of(self, variable: SharedVariable) -> int:
        """Number a variable, which may be new.

        Raises TypeError if it holds no tensor.
        """
        number = self._numbers.get(variable)
        if number is not None:
            return number
        if not isinstance(variable, TensorSharedVariable):
            raise TypeError(
                f"{label(variable)} is a shared variable of {variable.type}; those of tensors can "
                "be shared with workers"
            )
        if hasattr(variable, "buffer"):
            raise TypeError(
                f"{label(variable)} lies on a device of this process alone: make it by the pool's "
                "`shared`, which all workers see"
            )
        return self._add(variable)

    def add_resident(self, variable: SharedVariable, extent: Extent) -> int:
        """Number a variable that lies in an extent of every rank's memory."""
        number = self._add(variable)
        self.extents[number] = extent
        return number

    def add_parts(self, vector: SharedVariable, parts: Iterable[SharedVariable]) -> None:
        """Remember that variables lie in a vector."""
        number, inside = self._numbers[vector], tuple(self._numbers[part] for part in parts)
        self._parts[number] = inside
        self._vectors |= dict.fromkeys(inside, number)

    def vector_of(self, number: int) -> int:
        """Return the vector in which a variable lies, or the variable itself."""
        return self._vectors.get(number, number)

    def _add(self, variable: SharedVariable) -> int:
        number = self._numbers[variable] = len(self.variables)
        self.variables[number] = variable
        return number

    def is_resident(self, number: int) -> bool:
        return number in self.extents

    def forget_ranks(self) -> None:
        """Forget what ranks have computed: others begin with the master's values."""
        self._shapes.clear()
        self._records.clear()

    # Shapes

    def shape(self, number: int, rank: int, master: int) -> Shape:
        """The shape of a variable on a rank."""
        if number in self.extents:
            return self.extents[number].shape
        variable = self.variables[number]
        if rank == master:
            return tuple(variable.get_value(borrow=True).shape)
        return self._shapes[number][rank]

    def set_shape(self, number: int, rank: int, shape: Sequence[int]) -> None:
        self._shapes.setdefault(number, {})[rank] = tuple(shape)

    # Rows

    def record_rows(
        self, numbers: Iterable[int], counts: tuple[int, ...], adds: Collection[int] = ()
    ) -> None:
        """Remember that each rank has computed variables from so many rows.

        `adds` are those whose new values are computed from the old ones too.
        """
        for number in numbers:
            for part in (number, *self._parts.get(number, ())):
                self._records[part] = _Record(counts, number in adds, self._witness(part))

    def clear_rows(self, numbers: Iterable[int]) -> None:
        """Forget it: variables have been written in another way."""
        for number in numbers:
            for part in (number, *self._parts.get(number, ())):
                self._records.pop(part, None)

    def rows(self, number: int) -> tuple[int, ...] | None:
        """Rows from which each rank has computed a variable, if that was its last write."""
        found = {self._rows(part) for part in self._parts.get(number, (number,))}
        return found.pop() if len(found) == 1 else None

    def adds(self, number: int) -> bool:
        """Test if a variable of which there are `rows` was computed from its old value too."""
        return any(self._records[part].adds for part in self._parts.get(number, (number,)))

    def _rows(self, number: int) -> tuple[int, ...] | None:
        record = self._records.get(number)
        if record is None or not _is_same(record.witness, self._witness(number)):
            return None
        return record.counts

    def _witness(self, number: int) -> Any:
        """Return what changes when a variable is set, or the vector in which it lies."""
        vector = self._vectors.get(number)
        own = _witness(self.variables[number])
        return own if vector is None else (own, _witness(self.variables[vector]))


def label(variable: SharedVariable) -> str:
    """Return how messages call a variable."""
    return repr(variable.name) if variable.name else "a shared variable without name"


def axes(number: int) -> str:
    """Return how messages call a number of axes."""
    return f"{number} {'axis' if number == 1 else 'axes'}"


def _witness(variable: SharedVariable) -> Any:
    """Return what changes when a variable is set."""
    writes = getattr(variable, "writes", None)
    if writes is not None:
        return writes
    value = variable.container.storage[0]
    return weakref.ref(value) if isinstance(value, np.ndarray) else value


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, weakref.ref) and isinstance(now, weakref.ref):
        return before() is not None and before() is now()
    return bool(before == now)
