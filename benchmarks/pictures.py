"""Made-up pictures, so that the benchmarks run anywhere."""

from pathlib import Path

import numpy as np
from PIL import Image

from tandem.data.batch_file import locate_batch, write_batch
from tandem.data.dataset import Dataset, StoredPictures
from tandem.data.manifest import Manifest, Split, write_manifest
from tandem.memory import RowType

PER_FILE = 256  # pictures


def write_data_folder(
    folder: Path, count: int, side: int, classes: int, repeat: int = 1, per_file: int = PER_FILE
) -> Path:
    """Write all that a run reads, with one picture for validation; return `folder`.

    The training pictures are there `repeat` times: each of their files, all of them full, has so
    many names.
    """
    for name in ("train_hkl", "val_hkl", "labels", "misc"):
        (folder / name).mkdir(parents=True)
    splits = {}
    for name, some in (("train", count), ("val", 1)):
        data = write_batches(folder / f"{name}_hkl", some, side, per_file, classes)
        times = repeat if name == "train" else 1
        labels = np.tile(np.load(data.labels_file, allow_pickle=False), times)
        np.save(folder / "labels" / f"{name}_labels.npy", labels)
        files = _link(folder, [Path(path) for path in data.paths], times)
        splits[name] = Split(files, tuple(map(str, range(some * times))), labels)
    np.save(folder / "misc" / "img_mean.npy", np.full((3, side, side), 127, np.float32))
    wnids = tuple(f"n{number:08}" for number in range(classes))
    manifest = Manifest(side, "b01c", per_file, wnids, 0, {}, splits)
    write_manifest(folder / "manifest.json", manifest)
    return folder


def _link(folder: Path, paths: list[Path], times: int) -> tuple[str, ...]:
    """Link each file under several names; return all names, as in a manifest."""
    names = [path.relative_to(folder) for path in paths]
    for number in range(1, times):
        for path in paths:
            link = path.with_stem(f"{number:04d}-{path.stem}")
            link.hardlink_to(path)
            names.append(link.relative_to(folder))
    return tuple(map(str, names))


def write_batches(
    folder: Path, count: int, side: int, per_file: int = PER_FILE, classes: int = 10
) -> Dataset:
    """Write a data set of noise; pictures have `side` rows and columns."""
    rng = np.random.default_rng(0)
    counts = tuple(min(per_file, count - start) for start in range(0, count, per_file))
    paths = [folder / f"{number:04d}.hkl" for number in range(len(counts))]
    for path, some in zip(paths, counts, strict=True):
        write_batch(path, rng.integers(0, 256, (some, side, side, 3), np.uint8), "b01c")
    labels = folder / "labels.npy"
    np.save(labels, rng.integers(0, classes, count))
    return Dataset(
        paths=tuple(map(str, paths)),
        offsets=tuple(locate_batch(path).offset for path in paths),
        counts=counts,
        labels_file=str(labels),
        row=RowType("uint8", (side, side, 3)),
        pictures=StoredPictures(),
    )


def write_jpegs(folder: Path, count: int, rows: int = 375, columns: int = 500) -> list[Path]:
    """Write JPEGs of ImageNet's size, 90 KB each: soft colours under fine noise."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number:05d}.JPEG" for number in range(count)]
    for path in paths:
        colours = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        soft = np.asarray(colours.resize((columns, rows), Image.Resampling.BICUBIC), np.int16)
        grain = rng.integers(-24, 25, (rows, columns, 1), np.int16)
        pixels = np.clip(soft + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, quality=90)
    return paths
