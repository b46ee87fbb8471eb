"""Gradients averaged in buckets, while those of earlier layers are still being computed.

The backward pass ends with the first layer, so what the last layers need sent can travel meanwhile
(Li et al. 2020, "PyTorch Distributed", section 3.2.2). Buckets are parts of the one vector of
gradients, taken from its end.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.distributed.allreduce import AllReduce
from tandem.distributed.exchange import Exchange
from tandem.distributed.rank_vector import RankVector, Wait


@dataclass(frozen=True)
class Bucket:
    """Neighbours in the vector of gradients, which are averaged together.

    Attributes
    ----------
    names : frozenset of str
        Of the parameters.
    extent : slice
        Their elements of the vector, padding included.
    """

    names: frozenset[str]
    extent: slice


def divide(offsets: Mapping[str, int], size: int, most: int) -> list[Bucket]:
    """Divide a vector into buckets, the last parameters first.

    Parameters
    ----------
    offsets : mapping of str to int
        First element of each parameter, ascending.
    size : int
        Elements of the vector.
    most : int
        Elements that a bucket may have; a parameter that alone has more is a bucket by itself.

    Returns
    -------
    list of Bucket
        From the end of the vector to its beginning.
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


class BucketedGradients(Exchange):
    """Average each bucket of gradients as soon as all of them are ready.

    A thread of each step does so, while the trainer's thread computes. The buckets are averaged in
    their order at every rank, whatever the order in which they get ready.

    Parameters
    ----------
    buckets : sequence of Bucket
        The same at all ranks.
    vector : RankVector
        This rank's gradients.
    all_reduces : sequence of AllReduce
        What averages each bucket. They are used by one thread after another.
    """

    def __init__(
        self, buckets: Sequence[Bucket], vector: RankVector, all_reduces: Sequence[AllReduce]
    ) -> None:
        super().__init__(vector)
        self._gradients = vector
        self._work = [
            (bucket.names, all_reduce, vector.own[bucket.extent])
            for bucket, all_reduce in zip(buckets, all_reduces, strict=True)
        ]
        self._round: _Round | None = None

    def before_gradients(self, shares: Sequence[float]) -> None:
        self._end_round()  # of a step whose gradients were not used
        self._round = _Round(self._gradients, self._work, shares)
        self._round.start()

    def on_gradient_ready(self, name: str) -> None:
        if self._round is not None:
            self._round.arrivals.put((name, self._gradients.mark()))

    def before_update(self, shares: Sequence[float]) -> None:
        """Wait until all buckets are averaged."""
        self._end_round()

    def leave(self) -> None:
        self._end_round()
        super().leave()

    def _end_round(self) -> None:
        if self._round is not None:
            self._round.finish()
            self._round = None


class _Round(threading.Thread):
    """The buckets of one step, averaged one after another.

    Attributes
    ----------
    arrivals : queue of (str, callable)
        Names of gradients that are reported ready, and what waits until they are computed.
    """

    def __init__(
        self,
        vector: RankVector,
        work: Sequence[tuple[frozenset[str], AllReduce, Any]],
        shares: Sequence[float],
    ) -> None:
        super().__init__(name="buckets", daemon=True)
        self._vector, self._work, self._shares = vector, work, shares
        self._error: BaseException | None = None
        self.arrivals: queue.SimpleQueue[tuple[str, Wait]] = queue.SimpleQueue()

    def run(self) -> None:
        """Wait for each bucket, and average it."""
        arrived: set[str] = set()
        try:
            for names, all_reduce, part in self._work:
                while not names <= arrived:
                    name, wait = self.arrivals.get()
                    wait()
                    arrived.add(name)
                with self._vector.working():
                    all_reduce.average(part, self._shares)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for all buckets. Raises what averaging has raised."""
        self.join()
        if self._error is not None:
            raise self._error
