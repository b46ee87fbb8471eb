"""Values of shared variables on their way between ranks, through memory that all see."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.memory import HostBuffer
from tandem.parallel.data import Data
from tandem.parallel.messages import ArrayLocation, Open, Publish, Put, Reduce, Release
from tandem.parallel.rank import Rank
from tandem.parallel.registry import Registry, Shape, label
from tandem.parallel.team import Team
from tandem.split import edges

_ALIGNMENT = 256  # bytes


class Transfers(ABC):
    """Base of a pool's master and ranks, as they write and read variables of all ranks."""

    ranks: int
    master_rank: int
    registry: Registry
    rank: Rank  # the master's
    staging: HostBuffer  # for values on their way

    @abstractmethod
    def opened(self) -> Team:
        """Return the workers, which have all functions and variables; RuntimeError if closed."""

    def _run(self, team: Team, task: Put | Publish | Reduce | Open | Release) -> None:
        team.run(task, lambda: self.rank.do(task))

    def _is_seen(self, number: int) -> bool:
        """Return whether the master reads and writes a variable of all ranks by itself."""
        return self.registry.is_resident(number) and self.rank.residents.is_seen

    def _put(
        self,
        team: Team,
        numbers: Sequence[int],
        values: Sequence[Any],
        scattered: bool = False,
        only: int | None = None,
    ) -> None:
        """Set variables on all ranks, or only one, to values or to their parts of the rows."""
        ranks = range(self.ranks) if only is None else [only]
        parts = {}
        for number, value in zip(numbers, values, strict=True):
            array = np.asarray(value)
            if self._is_seen(number) and not (array.flags.owndata or isinstance(value, Data)):
                array = array.copy()  # it may lie in a resident that is written before it is read
            bounds = edges(len(array), self.ranks) if scattered else []
            parts[number] = [
                array[bounds[rank] : bounds[rank + 1]] if scattered else array for rank in ranks
            ]
            for part in parts[number]:
                self._check_fits(number, part.shape)
        self.registry.clear_rows(numbers)  # also where the rest fails
        pairs = zip(numbers, values, strict=True)
        sent = [(number, value) for number, value in pairs if not self._is_seen(number)]
        places = self._staged(team, [value for _, value in sent])  # before residents change
        for number in filter(self._is_seen, numbers):
            extent = self.registry.extents[number]
            for rank, part in zip(ranks, parts[number], strict=True):
                np.copyto(self.rank.residents.value(extent, rank), part)
        if sent:
            self._run(team, Put(tuple(number for number, _ in sent), places, scattered, only))
        for number, _ in sent:
            for rank, part in zip(ranks, parts[number], strict=True):
                self.registry.set_shape(number, rank, part.shape)

    def _check_fits(self, number: int, shape: Shape) -> None:
        variable = self.registry.variables[number]
        lengths = variable.type.shape
        if any(n is not None and n != m for n, m in zip(lengths, shape, strict=True)):
            raise ValueError(
                f"{label(variable)} has the shape {lengths}; a value has the shape {shape}"
            )

    def _staged(self, team: Team, values: Sequence[Any]) -> tuple[ArrayLocation, ...]:
        """Put values where all ranks see them; `Data` is there already."""
        arrays = [value for value in values if not isinstance(value, Data)]
        areas = iter(self.reserve(team, [(array.shape, array.dtype) for array in arrays]))
        places = []
        for value in values:
            if isinstance(value, Data):
                places.append(team.buffers.place(value.buffer, value.data, value.array_place[0]))
            else:
                places.append(next(areas))
                team.buffers.array(places[-1])[...] = value
        return tuple(places)

    def reserve(self, team: Team, kinds: Sequence[tuple[Shape, np.dtype]]) -> list[ArrayLocation]:
        """Reserve staging memory for arrays of such shapes and dtypes."""
        places, end, number = [], 0, team.buffers.number(self.staging)
        for shape, dtype in kinds:
            places.append(ArrayLocation(number, dtype.str, tuple(shape), end))
            size = math.prod(shape) * dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self.staging.nbytes:
            self.staging.resize(end)
        return places

    def _publish(
        self, team: Team, numbers: Sequence[int], only: int | None = None
    ) -> list[tuple[ArrayLocation, ...]]:
        """Have ranks write variables where all see them; places by variable, then rank."""
        if not numbers:
            return []
        kinds = [
            (shape, np.dtype(self.registry.variables[number].type.dtype))
            for number in numbers
            for shape in self._shapes(number)
        ]
        places = self.reserve(team, kinds)
        by_variable = [
            tuple(places[i * self.ranks : (i + 1) * self.ranks]) for i in range(len(numbers))
        ]
        self._run(team, Publish(tuple(numbers), tuple(by_variable), only))
        return by_variable

    def _published(
        self, team: Team, numbers: Sequence[int], only: int | None = None
    ) -> list[list[np.ndarray]]:
        """Values by variable, then rank, where they lie: of all ranks, or only one that is read."""
        unseen = [number for number in numbers if not self._is_seen(number)]
        published = dict(zip(unseen, self._publish(team, unseen, only), strict=True))
        values = []
        for number in numbers:
            if number in published:
                values.append([team.buffers.array(place) for place in published[number]])
            else:
                extent, value = self.registry.extents[number], self.rank.residents.value
                values.append([value(extent, rank) for rank in range(self.ranks)])
        return values

    def _shapes(self, number: int) -> list[Shape]:
        return [self.registry.shape(number, rank, self.master_rank) for rank in range(self.ranks)]

    def _check_shapes(self, number: int, first: int) -> None:
        """Raise ValueError unless shapes are equal on all ranks, from axis `first` on."""
        shapes, variable = self._shapes(number), self.registry.variables[number]
        if variable.type.ndim < first:
            raise ValueError(f"{label(variable)} has no axis on which values could be joined")
        if len({shape[first:] for shape in shapes}) > 1:
            raise ValueError(f"{label(variable)} has different shapes on the ranks: {shapes}")
