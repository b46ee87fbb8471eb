"""The order of an epoch, and how its minibatches are divided over the trainers.

The order is a pure function of the seed and the epoch, the same in every process and for every
number of trainers: global minibatch k is ``order[k * G : (k + 1) * G]``, and trainer r takes rows
``r * b`` to ``(r + 1) * b`` of it.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tandem.philox import Purpose, words

Shuffle = Literal["none", "files", "images"]

_CHUNK = 1 << 14  # keys that are computed at a time, so that Philox works in the cache


def epoch_order(
    counts: Sequence[int], shuffle: Shuffle, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Every picture of a split once, in the order of an epoch.

    A shuffle sorts by 64-bit Philox keys, one for each thing that is shuffled; equal keys, of which
    there are hardly ever any, keep their order.

    Parameters
    ----------
    counts : sequence of int
        Pictures in each batch file, in dataset order.
    shuffle : "none", "files" or "images"
        As stored; the files shuffled, the pictures of a file as stored; all pictures shuffled.
    seed, epoch : int
        Of the run; from 0.

    Returns
    -------
    int64 (sum(counts),)
        Dataset indices.

    Raises
    ------
    ValueError
        `shuffle` is none of the three.
    """
    sizes = np.asarray(counts, np.int64)
    total = int(sizes.sum())
    if shuffle == "none":
        return np.arange(total, dtype=np.int64)
    if shuffle == "images":
        return _shuffled(total, seed, epoch)
    if shuffle == "files":
        files = _shuffled(len(sizes), seed, epoch)
        starts = np.cumsum(sizes) - sizes
        places = np.cumsum(sizes[files]) - sizes[files]
        return np.repeat(starts[files] - places, sizes[files]) + np.arange(total, dtype=np.int64)
    raise ValueError(f"shuffle is {shuffle!r}; it can be one of {', '.join(get_args(Shuffle))}")


def minibatch_count(pictures: int, global_batch: int) -> int:
    """How many minibatches of `global_batch` hold all pictures, the last perhaps short."""
    return -(-pictures // global_batch)


def global_minibatch(
    order: npt.NDArray[np.int64], k: int, global_batch: int
) -> npt.NDArray[np.int64]:
    """The dataset indices of global minibatch `k`, from 0; the last may be short.

    Raises
    ------
    IndexError
        The epoch has no minibatch `k`.
    """
    count = minibatch_count(len(order), global_batch)
    if not 0 <= k < count:
        raise IndexError(f"minibatch {k} of an epoch of {count}")
    return order[k * global_batch : (k + 1) * global_batch]


def trainer_rows(
    minibatch: npt.NDArray[np.int64], rank: int, batch_size: int
) -> npt.NDArray[np.int64]:
    """Trainer `rank`'s rows of a global minibatch: at most `batch_size`, perhaps none."""
    return minibatch[rank * batch_size : (rank + 1) * batch_size]


def _shuffled(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """0 to n - 1, sorted by their keys."""
    keys = np.empty(n, np.uint64)
    for start in range(0, n, _CHUNK):
        some = np.arange(start, min(start + _CHUNK, n), dtype=np.int64)
        high, low = words(seed, epoch, some, Purpose.ORDER, 2).T.astype(np.uint64)
        keys[start : start + len(some)] = high << np.uint64(32) | low
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
