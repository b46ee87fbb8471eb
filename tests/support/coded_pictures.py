"""Pictures whose pixels say which picture they are, where each pixel lay, and of which class."""

from pathlib import Path

import numpy as np

from tandem.data.batch_file import locate_batch, write_batch
from tandem.data.dataset import Dataset, StoredPictures
from tandem.memory import RowType

SIZE = 9


def coded_picture(index: int, label: int, size: int = SIZE) -> np.ndarray:
    """uint8 (row, column, RGB): red says where the pixel lies, green the index, blue the class."""
    picture = np.empty((size, size, 3), np.uint8)
    picture[..., 0] = np.arange(size * size).reshape(size, size) % 256
    picture[..., 1] = index
    picture[..., 2] = label
    return picture


def label_of(index: int) -> int:
    return (7 * index + 3) % 5


def write_coded(
    folder: Path, counts: tuple[int, ...], layout: str = "b01c", size: int = SIZE
) -> Dataset:
    """A data set of coded pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, start = [], 0
    for number, count in enumerate(counts):
        pictures = [coded_picture(i, label_of(i), size) for i in range(start, start + count)]
        paths.append(folder / f"{number:04}.hkl")
        write_batch(paths[-1], np.stack(pictures), layout)
        start += count
    labels = folder / "labels.npy"
    np.save(labels, np.array([label_of(i) for i in range(start)]))
    return Dataset(
        paths=tuple(map(str, paths)),
        offsets=tuple(locate_batch(path).offset for path in paths),
        counts=counts,
        labels_file=str(labels),
        row=RowType("uint8", (size, size, 3)),
        pictures=StoredPictures(layout),
    )
