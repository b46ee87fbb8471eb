"""Files of known data sets, written as their specifications say."""

import gzip
import struct
from pathlib import Path

import numpy as np

from tandem.datasets.arrays import Data
from tandem.datasets.idx import FILES


def random_pictures(train: int, test: int, shape: tuple[int, ...], classes: int = 10) -> Data:
    """Random pictures and labels of both splits."""
    rng = np.random.default_rng(train)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.integers(0, 256, (count, *shape)).astype(np.uint8)
        return x, rng.integers(0, classes, count)

    return split(train), split(test)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write an array of unsigned bytes, gzipped if the name says so."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, data: Data, packed: bool = False) -> None:
    """Write the four files of MNIST."""
    for name, array in zip(FILES, (each for pair in data for each in pair), strict=True):
        write_idx(folder / f"{name}{'.gz' * packed}", array)


def write_cifar(folder: Path, name: str, data: Data, coarse: bool = False) -> Path:
    """Write the binary version, in the folder that its archive has; return this folder.

    CIFAR-10's training pictures are dealt to five files, in order. Of CIFAR-100 the labels are fine
    ones, with 0 as the coarse ones, or coarse ones, with 99 less them as the fine ones.
    """
    inner = folder / ("cifar-10-batches-bin" if name == "cifar10" else "cifar-100-binary")
    inner.mkdir(parents=True)
    for (x, y), split in zip(data, ("train", "test"), strict=True):
        records = []
        for pixels, label in zip(x, y, strict=True):
            labels = [label] if name == "cifar10" else [label, 99 - label] if coarse else [0, label]
            planes = [pixels[..., colour].tobytes() for colour in range(3)]
            records.append(bytes(labels) + b"".join(planes))
        if name == "cifar100":
            (inner / f"{split}.bin").write_bytes(b"".join(records))
        elif split == "test":
            (inner / "test_batch.bin").write_bytes(b"".join(records))
        else:
            each = len(records) // 5
            for i in range(5):
                part = records[i * each : (i + 1) * each]
                (inner / f"data_batch_{i + 1}.bin").write_bytes(b"".join(part))
    return inner
