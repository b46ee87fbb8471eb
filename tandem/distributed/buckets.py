"""Gradients averaged in buckets, while those of earlier layers are still being computed.

The backward pass ends with the first layer, so what the last layers need sent can travel meanwhile
(Li et al. 2020, "PyTorch Distributed", section 3.2.2). Buckets are parts of the one vector of
gradients, taken from its end.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.distributed.allreduce import AllReduce
from tandem.distributed.exchange import Exchange

Wait = Callable[[], None]


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
    """Average each bucket of gradients as soon as all of them are there.

    A thread of each step does so, while this one computes. The buckets are averaged in their order
    at every rank, whatever the order in which they get ready.

    Parameters
    ----------
    buckets : sequence of Bucket
        The same at all ranks.
    vector : float (n,)
        This rank's gradients.
    collectives : sequence of AllReduce
        What averages each bucket. They are used by one thread after another.
    mark : callable
        Called by this thread when a gradient is told of; what it returns is called by the other
        one, and returns when the gradient is there. On the host it is at once.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        vector: np.ndarray,
        collectives: Sequence[AllReduce],
        mark: Callable[[], Wait] = lambda: _there,
    ) -> None:
        self._mark = mark
        self._names = [bucket.names for bucket in buckets]
        self._work = [
            (collective, vector[bucket.extent])
            for bucket, collective in zip(buckets, collectives, strict=True)
        ]
        self._round: _Round | None = None

    def before_gradients(self, shares: Sequence[float]) -> None:
        """See `Exchange`."""
        self._end_round()  # of a step whose gradients were not used
        self._round = _Round(self._names, self._work, shares)
        self._round.start()

    def on_gradient_ready(self, name: str) -> None:
        """See `Exchange`."""
        if self._round is not None:
            self._round.arrivals.put((name, self._mark()))

    def before_update(self, shares: Sequence[float]) -> None:
        """Wait until all buckets are averaged."""
        self._end_round()

    def leave(self) -> None:
        """See `Exchange`."""
        self._end_round()

    def _end_round(self) -> None:
        if self._round is not None:
            self._round.finish()
            self._round = None


class _Round(threading.Thread):
    """The buckets of one step, averaged one after another.

    Attributes
    ----------
    arrivals : queue of (str, callable)
        Names of gradients that are told of, and what waits until they are there.
    """

    def __init__(
        self,
        names: Sequence[frozenset[str]],
        work: Sequence[tuple[AllReduce, np.ndarray]],
        shares: Sequence[float],
    ) -> None:
        super().__init__(name="buckets", daemon=True)
        self._names, self._work, self._shares = names, work, shares
        self._error: BaseException | None = None
        self.arrivals: queue.SimpleQueue[tuple[str, Wait]] = queue.SimpleQueue()

    def run(self) -> None:
        """Wait for each bucket, and average it."""
        arrived: set[str] = set()
        try:
            for names, (collective, vector) in zip(self._names, self._work, strict=True):
                while not names <= arrived:
                    name, wait = self.arrivals.get()
                    wait()
                    arrived.add(name)
                collective.average(vector, self._shares)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for all buckets. Raises what averaging has raised."""
        self.join()
        if self._error is not None:
            raise self._error


def _there() -> None:
    """What has been told of on the host is there."""
