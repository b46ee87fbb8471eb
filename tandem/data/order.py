"""The order of an epoch, and the division of its minibatches among the trainers.

The order is a pure function of the seed and the epoch, the same in every process and for every
number of trainers.
"""

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


def trainer_rows(
    minibatch: npt.NDArray[np.int64], rank: int, batch_size: int
) -> npt.NDArray[np.int64]:
    """Trainer `rank`'s rows of a global minibatch: at most `batch_size`, perhaps none."""
    return minibatch[rank * batch_size : (rank + 1) * batch_size]
