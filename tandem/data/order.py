"""The order of an epoch, and the division of its minibatches among the trainers.

The order is a pure function of the seed and the epoch, the same in every process and for every
number of trainers.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tandem.philox import Purpose, permutation

Shuffle = Literal["none", "files", "images"]


def epoch_order(
    counts: Sequence[int], shuffle: Shuffle, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Dataset indices of a split, int64, each once, in the order of an epoch (from 0).

    `counts` are the pictures in each batch file, in dataset order. `shuffle` is "none" (as stored),
    "files" (files shuffled, each with its pictures as stored) or "images" (all pictures shuffled).
    """
    sizes = np.asarray(counts, np.int64)
    total = int(sizes.sum())
    if shuffle == "none":
        return np.arange(total, dtype=np.int64)
    if shuffle == "images":
        return permutation(total, seed, epoch, Purpose.ORDER)
    if shuffle == "files":
        files = permutation(len(sizes), seed, epoch, Purpose.ORDER)
        starts = np.cumsum(sizes) - sizes
        begins = np.cumsum(sizes[files]) - sizes[files]
        return np.repeat(starts[files] - begins, sizes[files]) + np.arange(total, dtype=np.int64)
    raise ValueError(f"shuffle is {shuffle!r}; it can be one of {', '.join(get_args(Shuffle))}")


def minibatch_count(pictures: int, global_batch: int) -> int:
    """Number of minibatches in an epoch; the last may be short."""
    return -(-pictures // global_batch)


def global_minibatch(
    order: npt.NDArray[np.int64], k: int, global_batch: int
) -> npt.NDArray[np.int64]:
    """Dataset indices of global minibatch `k`, from 0; raises IndexError beyond the epoch."""
    count = minibatch_count(len(order), global_batch)
    if not 0 <= k < count:
        raise IndexError(f"minibatch {k} of an epoch of {count}")
    return order[k * global_batch : (k + 1) * global_batch]


def trainer_shares(global_batch: int, trainers: int, group: int) -> list[slice]:
    """Each trainer's rows of a global minibatch: whole groups of rows, as evenly as they go.

    The first trainers have a group more where they do not go evenly; there may be fewer groups than
    trainers.
    """
    groups, rest = divmod(global_batch // group, trainers)
    counts = [groups + (rank < rest) for rank in range(trainers)]
    ends = [group * end for end in itertools.accumulate(counts)]
    return [slice(end - group * count, end) for end, count in zip(ends, counts, strict=True)]
