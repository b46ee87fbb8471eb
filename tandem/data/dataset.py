"""One split of a data set, checked against its manifest before it is used."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.data.batch_file import BatchLocation, locate_batch
from tandem.errors import InputError
from tandem.memory import CLASS_LABEL, RowType

if TYPE_CHECKING:
    from tandem.data.manifest import ArrayManifest, Manifest, Resize


@dataclass(frozen=True)
class StoredPictures:
    """The storage and the preprocessing of the pictures of a split."""

    layout: str = "b01c"  # (picture, row, column, RGB); or c01b (RGB, row, column, picture)
    resize: "Resize" = "squash"  # how pictures were made squares
    pad: int = 0  # pixels of the border of a picture, on each side


@dataclass(frozen=True)
class Dataset:
    """Location of the rows of a split; small and picklable, to be sent to a loader.

    Rows are pictures, or rows of arrays: these are used as they are, neither cropped nor mirrored,
    and without a mean image.
    """

    paths: tuple[str, ...]  # of the batch files, absolute, in dataset order
    offsets: tuple[int, ...]  # bytes from the start of each file to its first pixel
    counts: tuple[int, ...]  # rows in each file
    labels_file: str  # .npy of a target for each row, absolute
    row: RowType  # of a picture uint8 (S, S, RGB), with its border
    target: RowType = CLASS_LABEL  # of what belongs to a row: its class, or a row of numbers
    pictures: StoredPictures | None = None  # None: rows of arrays

    @property
    def size(self) -> int:
        return sum(self.counts)

    @property
    def image_size(self) -> int:
        """Rows and columns of a picture, with its border."""
        return self.row.shape[0]


def open_split(
    manifest: "Manifest | ArrayManifest",
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

    The content of batch files is not looked at: a run would start only when it had read them all.
    `tandem.preprocessing.arrays.matches` compares it with the manifest's checksums.
    """
    located = locate_split(manifest, data_folder, split, batch_folder)
    labels_file = label_folder / f"{split}_labels.npy"
    manifest.check_labels(split, labels_file)
    return Dataset(
        paths=tuple(str(path.absolute()) for path, _ in located),
        offsets=tuple(location.offset for _, location in located),
        counts=manifest.counts(split),
        labels_file=str(labels_file.absolute()),
        row=manifest.row,
        target=manifest.target,
        pictures=manifest.stored,
    )


def locate_split(
    manifest: "Manifest | ArrayManifest",
    data_folder: Path,
    split: str,
    batch_folder: Path | None = None,
) -> list[tuple[Path, BatchLocation]]:
    """Check the batch files of a split and locate their pixels, in dataset order.

    Arguments and errors are those of `open_split`.
    """
    located, rows = [], None if manifest.stored is not None else manifest.row.dtype
    for file, count in zip(manifest.splits[split].files, manifest.counts(split), strict=True):
        path = data_folder / file if batch_folder is None else batch_folder / Path(file).name
        location = locate_batch(path, rows)
        expected = manifest.batch_shape(count)
        if location.shape != expected:
            raise InputError(
                f"{path}: found shape {location.shape}, expected {expected}:"
                f" {manifest.describe_batch(count)}, as the manifest says"
            )
        located.append((path, location))
    return located
