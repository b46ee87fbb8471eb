"""Gradients averaged in buckets, while those of earlier layers are still being computed.

The backward pass ends with the first layer, so what the last layers need sent can travel meanwhile
(Li et al. 2020, "PyTorch Distributed", section 3.2.2). Buckets are parts of the one vector of
gradients, taken from its end.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.distributed.allreduce import AllReduce
from tandem.distributed.exchange import Exchange
from tandem.distributed.rank_vector import RankVector, Wait


@dataclass(frozen=True)
class Bucket:
    """Neighbours in the vector of gradients, which are averaged together."""

    names: frozenset[str]  # of the parameters
    extent: slice  # their elements of the vector, padding included


def divide(offsets: Mapping[str, int], size: int, most: int) -> list[Bucket]:
    """Divide a vector into buckets of at most `most` elements, the last parameters first.

    `offsets` are the first element of each parameter, ascending, and `size` the vector's elements.
    A parameter that alone has more than `most` is a bucket by itself.
    """
    buckets: list[Bucket] = []
    names: list[str] = []
    begin = end = size
    for name, start in reversed(list(offsets.items())):
        if names and end - start > most:
            buckets.append(Bucket(frozenset(names), slice(begin, end)))
            names, end = [], begin
        names.append(name)
        begin = start
    return [*buckets, Bucket(frozenset(names), slice(begin, end))]


@dataclass(frozen=True)
class BucketWork:
    """The work for a bucket once its gradients are ready."""

    names: frozenset[str]  # of the parameters
    part: Any  # of the vector
    average: Callable[[Any, Sequence[float]], None]


class BucketedGradients(Exchange):
    """Average each bucket of gradients as soon as all of them are ready.

    A thread of each step does so, while the trainer's thread computes. The buckets are averaged in
    their order at every rank, whatever the order in which they get ready.
    """

    def __init__(
        self, buckets: Sequence[Bucket], vector: RankVector, all_reduces: Sequence[AllReduce]
    ) -> None:
        super().__init__(vector)
        self._gradients = vector
        self.work = [
            BucketWork(bucket.names, vector.own[bucket.extent], all_reduce.average)
            for bucket, all_reduce in zip(buckets, all_reduces, strict=True)
        ]
        self._round: _Round | None = None

    def before_gradients(self, shares: Sequence[float]) -> None:
        self._end_round()  # of a step whose gradients were not used
        self._round = _Round(self._gradients, self.work, shares)
        self._round.start()

    def on_gradient_ready(self, name: str) -> None:
        if self._round is not None:
            self._round.arrivals.put((name, self._gradients.mark()))

    def before_update(self, shares: Sequence[float]) -> None:
        self._end_round()

    def leave(self) -> None:
        self._end_round()
        super().leave()

    def _end_round(self) -> None:
        if self._round is not None:
            self._round.finish()
            self._gradients.rejoin()
            self._round = None


class _Round(threading.Thread):
    """The buckets of one step, averaged one after another."""

    def __init__(
        self, vector: RankVector, work: Sequence[BucketWork], shares: Sequence[float]
    ) -> None:
        super().__init__(name="buckets", daemon=True)
        self._vector, self._work, self._shares = vector, work, shares
        self._error: BaseException | None = None
        # Names of ready gradients, each with what waits until it is computed.
        self.arrivals: queue.SimpleQueue[tuple[str, Wait]] = queue.SimpleQueue()

    def run(self) -> None:
        arrived: set[str] = set()
        try:
            for bucket in self._work:
                while not bucket.names <= arrived:
                    name, wait = self.arrivals.get()
                    wait()
                    arrived.add(name)
                with self._vector.working():
                    bucket.average(bucket.part, self._shares)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for all buckets. Raises what averaging has raised."""
        self.join()
        if self._error is not None:
            raise self._error
