"""Buckets of gradients that are averaged while earlier layers are still being computed, replayed.

As `tandem.distributed.buckets` has it: one after another, in a fixed order, each as soon as all of
its gradients are ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Average:
    """The seconds in which a bucket is averaged."""

    cores: float  # of the cores that compute as well, which compute nothing meanwhile
    links: float  # of others: cables, or the links between GPUs

    @property
    def seconds(self) -> float:
        return self.cores + self.links


def exposed_seconds(end: float, ready: Sequence[float], averages: Sequence[Average]) -> float:
    """Return by how much averages make a step longer.

    Parameters
    ----------
    end : float
        Seconds from the step's beginning until all gradients are computed, without any exchange.
    ready : sequence of float
        The same until each bucket may be sent, in the order in which they are.
    averages : sequence of Average
        Of each bucket.
    """
    delay = finished = 0.0  # of the computing; of the last bucket
    for at, average in zip(ready, averages, strict=True):
        begin = max(finished, at + delay)
        if begin < end + delay:
            delay += average.cores
        finished = begin + average.seconds
    return max(finished, end + delay) - end
