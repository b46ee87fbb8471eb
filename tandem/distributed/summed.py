"""The exchange of `sum_rows`: gradients of groups of rows, added in a tree over their numbers.

Each trainer adds the gradients of its own groups as they come, and holds the sums of the nodes that
it has whole. Then trainer i completes the tree for shard i of the vector, and gives it to all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from tandem.data.order import trainer_shares
from tandem.distributed.allreduce import shard
from tandem.distributed.exchange import Exchange
from tandem.distributed.group import Group
from tandem.distributed.tree import TreeSum
from tandem.memory.parameters import HostMemory

Nodes = list[tuple[int, int]]

_BLOCK = 1 << 17  # elements that are added at a time: few enough for caches, and few calls


class SummedGradients(Exchange, ABC):
    """Average gradients of groups of rows, with the same bits for every number of trainers."""

    # Whether a trainer's last group is added when all are, in one pass over memory.
    _keeps_last = False

    def __init__(self, group: Group, memory: HostMemory, rows: int) -> None:
        super().__init__()
        self._group, self._rows = group, rows
        self._gradients, self._own = memory.flat["gradients"], memory.rank
        self._partials = memory.partials
        size = self._gradients[0].size
        self._shards = [shard(size, group.size, rank) for rank in range(group.size)]
        self._begin()

    def before_gradients(self, shares: Sequence[float]) -> None:
        self._begin()

    def _begin(self) -> None:
        self._sum: TreeSum[np.ndarray] = _SumInPlace()
        self._valid = 0

    def after_gradients(self, number: int, rows: int, is_last: bool) -> None:
        own, partials = self._gradients[self._own], self._partials[self._own]
        if rows < self._rows:
            own *= rows / self._rows
        self._valid += rows
        if is_last and self._keeps_last:
            self._sum.nodes.append((0, number))
            return
        self._sum.push(own, 0, number)
        *_, last = self._sum.terms
        if last is own and own is not partials[0]:  # the next group's gradients come there
            self._sum.terms[-1] = partials[len(self._sum.terms) - 1]
            np.copyto(self._sum.terms[-1], own)

    def before_update(self, shares: Sequence[float]) -> None:
        found = self._group.all_gather_object((self._sum.nodes, self._valid))
        every = [nodes for nodes, _ in found]
        divisor = sum(valid for _, valid in found) / self._rows
        target = self._gradients[self._own][self._shards[self._group.rank]]
        terms = self._terms(every)
        for start in range(0, target.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            whole: TreeSum[np.ndarray] = TreeSum()
            for nodes, own in zip(every, terms, strict=True):
                for node, term in zip(nodes, own, strict=True):
                    whole.push(term[part], *node)
            np.divide(whole.total(), target.dtype.type(divisor), out=target[part])
        self._share()

    @abstractmethod
    def _terms(self, every: Sequence[Nodes]) -> list[list[np.ndarray]]:
        """This rank's shard of each trainer's partial sums, of these nodes."""

    @abstractmethod
    def _share(self) -> None:
        """Give this rank's shard of the gradients to all."""


class SummedInMemory(SummedGradients):
    """Of trainers that see each other's vectors."""

    _keeps_last = True

    def _terms(self, every: Sequence[Nodes]) -> list[list[np.ndarray]]:
        part = self._shards[self._group.rank]
        vectors = zip(every, self._partials, self._gradients, strict=True)
        return [
            [vector[part] for vector in (*partials[: len(nodes) - 1], last)] if nodes else []
            for nodes, partials, last in vectors
        ]

    def _share(self) -> None:
        part, first = self._shards[self._group.rank], self._gradients[self._own]
        for other in self._gradients:
            if other is not first:
                other[part] = first[part]
        if self._group.size > 1:
            self._group.barrier()


class SummedByMessages(SummedGradients):
    """Of trainers that send each other their shards."""

    def __init__(self, group: Group, memory: HostMemory, rows: int) -> None:
        super().__init__(group, memory, rows)
        own = self._shards[group.rank]
        shape = len(self._partials[0]), group.size, own.stop - own.start
        self._received = np.empty(shape, self._gradients[0].dtype)

    def _terms(self, every: Sequence[Nodes]) -> list[list[np.ndarray]]:
        (partials,), none = self._partials, [slice(0, 0)] * self._group.size
        for number in range(max(map(len, every))):
            received = self._received[number].reshape(-1)
            width = self._received.shape[2]
            parts = [
                slice(rank * width, (rank + (number < len(nodes))) * width)
                for rank, nodes in enumerate(every)
            ]
            has_one = number < len(self._sum.nodes)
            sent = partials[number if has_one else 0]
            self._group.all_to_all_parts(sent, self._shards if has_one else none, received, parts)
        return [[*self._received[: len(nodes), rank]] for rank, nodes in enumerate(every)]

    def _share(self) -> None:
        self._group.all_gather(self._gradients[0], self._shards)


class _SumInPlace(TreeSum[np.ndarray]):
    """A sum of vectors whose first halves are overwritten."""

    def _added(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        first += second
        return first


def most_partials(global_batch: int, trainers: int, rows: int) -> int:
    """Return the most partial sums that a trainer holds, of groups of `rows` rows.

    A trainer of one group needs no memory for its sum, and counts as none.
    """
    most = 0
    for own in trainer_shares(global_batch, trainers, rows):
        numbers, found = range(own.start // rows, own.stop // rows), TreeSum[int]()
        for number in numbers if len(numbers) > 1 else ():
            found.push(0, 0, number)
            most = max(most, len(found.nodes))
    return most
