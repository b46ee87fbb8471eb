"""One split of a preprocessed data set, checked against its manifest before it is used."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.data.batch_file import BatchLocation, locate_batch
from tandem.data.safe_io import read_npy
from tandem.errors import InputError

if TYPE_CHECKING:
    from tandem.data.manifest import Manifest, Resize


@dataclass(frozen=True)
class Dataset:
    """Location of the pictures of a split; small and picklable, to be sent to a loader."""

    paths: tuple[str, ...]  # of the batch files, absolute, in dataset order
    offsets: tuple[int, ...]  # bytes from the start of each file to its first pixel
    counts: tuple[int, ...]  # pictures in each file
    layout: str  # b01c (picture, row, column, RGB) or c01b (RGB, row, column, picture)
    image_size: int  # rows and columns of a picture, with its border
    labels_file: str  # .npy of int64 (pictures,), absolute
    resize: "Resize" = "squash"  # how pictures were made squares
    pad: int = 0  # pixels of the border of a picture, on each side

    @property
    def size(self) -> int:
        return sum(self.counts)


def open_split(
    manifest: "Manifest",
    data_folder: Path,
    split: str,
    label_folder: Path,
    batch_folder: Path | None = None,
) -> Dataset:
    """Check every batch file and the labels of a split against the manifest.

    `data_folder` is the manifest's; `split` is ``train`` or ``val``; `label_folder` holds
    ``train_labels.npy`` and ``val_labels.npy``; `batch_folder` holds the split's batch files, if
    they are not where the manifest says. Raises InputError if a file is missing or truncated, or if
    its shape, dtype, layout or number of pictures differs from the manifest, or the labels do.
    """
    located = locate_split(manifest, data_folder, split, batch_folder)
    labels_file = label_folder / f"{split}_labels.npy"
    _check_labels(labels_file, manifest.splits[split].labels)
    return Dataset(
        paths=tuple(str(path.absolute()) for path, _ in located),
        offsets=tuple(location.offset for _, location in located),
        counts=manifest.counts(split),
        layout=manifest.layout,
        image_size=manifest.image_size,
        labels_file=str(labels_file.absolute()),
        resize=manifest.resize,
        pad=manifest.pad,
    )


def locate_split(
    manifest: "Manifest", data_folder: Path, split: str, batch_folder: Path | None = None
) -> list[tuple[Path, BatchLocation]]:
    """Check the batch files of a split and locate their pixels, in dataset order.

    Arguments and errors are those of `open_split`.
    """
    located = []
    for file, count in zip(manifest.splits[split].files, manifest.counts(split), strict=True):
        path = data_folder / file if batch_folder is None else batch_folder / Path(file).name
        location, expected = locate_batch(path), manifest.batch_shape(count)
        if location.shape != expected:
            raise InputError(
                f"{path}: found shape {location.shape}, expected {expected}: {count} pictures of"
                f" {manifest.image_size} x {manifest.image_size} in layout {manifest.layout},"
                " as the manifest says"
            )
        located.append((path, location))
    return located


def _check_labels(path: Path, expected: np.ndarray) -> None:
    remedy = "preprocessing/make_labels.py writes them from the manifest"

    def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
        if dtype != np.int64:
            raise InputError(f"{path}: found {dtype}, expected int64 labels; {remedy}")
        if shape != expected.shape:
            raise InputError(
                f"{path}: found labels of shape {shape}, expected {expected.shape}, one for"
                f" each picture of the manifest; {remedy}"
            )

    try:
        labels = read_npy(path, check)
    except FileNotFoundError:
        raise InputError(f"{path}: there are no labels; {remedy}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: the labels cannot be read ({error}); {remedy}") from None
    differing = np.flatnonzero(labels != expected)
    if len(differing):
        first = differing[0]
        raise InputError(
            f"{path}: found label {labels[first]} for picture {first}, expected {expected[first]}"
            f" as the manifest says ({len(differing)} labels differ); {remedy}"
        )
