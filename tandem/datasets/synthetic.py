"""Random pictures with classes that can be learned, the same on every machine."""

import numpy as np

from tandem.datasets.arrays import Data, Pair
from tandem.errors import InputError
from tandem.philox import Purpose, words

_CHUNK = 512  # pictures whose words are in memory at a time
_TRAIN, _TEST, _PATTERNS = 0, 1, 2  # the counter's epoch


def make_pictures(
    train: int = 1024,
    test: int = 256,
    size: int = 32,
    channels: int = 3,
    classes: int = 10,
    seed: int = 0,
) -> Data:
    """Make pictures by counted randomness: half a pattern of the class, half noise.

    Picture i does not depend on how many there are. Returns uint8 (n, size, size, channels),
    without the last axis for one channel, and int64 labels (n,). Raises InputError for numbers that
    make no pictures.
    """
    most = {"train": 1 << 24, "test": 1 << 24, "size": 1 << 12, "classes": 1 << 16}
    least = {"train": 1, "test": 0, "size": 1, "classes": 1}
    given = {"train": train, "test": test, "size": size, "classes": classes}
    for name, value in given.items():
        if type(value) is not int or not least[name] <= value <= most[name]:
            raise InputError(
                f"synthetic: found {name} {value!r}, expected a whole number from {least[name]} to"
                f" {most[name]}"
            )
    if channels not in (1, 3):
        raise InputError(f"synthetic: found {channels!r} channels, expected 1 or 3")
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise InputError(f"synthetic: found the seed {seed!r}, expected one from 0 to 2**64 - 1")
    shape = (size, size) if channels == 1 else (size, size, channels)
    patterns = _bytes(seed, _PATTERNS, np.arange(classes), shape)

    def split(count: int, epoch: int) -> Pair:
        x = np.empty((count, *shape), np.uint8)
        y = np.empty(count, np.int64)
        for start in range(0, count, _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, count))
            # The first word chooses the class; `_bytes` begins after it.
            y[rows] = words(seed, epoch, rows, Purpose.SYNTHETIC, 1)[:, 0] % classes
            x[rows] = patterns[y[rows]] // 2 + _bytes(seed, epoch, rows, shape) // 2
        return x, y

    return split(train, _TRAIN), split(test, _TEST)


def _bytes(seed: int, epoch: int, indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes for each index: uint8 (n, ...), four of each word after the first."""
    count = int(np.prod(shape))
    drawn = words(seed, epoch, indices, Purpose.SYNTHETIC, 1 + -(-count // 4))[:, 1:]
    found = np.ascontiguousarray(drawn.astype("<u4")).view(np.uint8)
    return found[:, :count].reshape(len(indices), *shape)
