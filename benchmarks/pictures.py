"""Made-up pictures, so that the benchmarks run anywhere."""

from pathlib import Path

import numpy as np
from PIL import Image

from tandem.data.batch_file import locate_batch, write_batch
from tandem.data.dataset import Dataset
from tandem.data.manifest import Manifest, Split, write_manifest

PER_FILE = 256  # pictures


def write_data_folder(folder: Path, count: int, side: int, classes: int) -> Path:
    """Write all that a run reads, with one picture for validation; return `folder`."""
    for name in ("train_hkl", "val_hkl", "labels", "misc"):
        (folder / name).mkdir(parents=True)
    splits = {}
    for name, some in (("train", count), ("val", 1)):
        data = write_batches(folder / f"{name}_hkl", some, side, classes=classes)
        labels = np.load(data.labels_file, allow_pickle=False)
        np.save(folder / "labels" / f"{name}_labels.npy", labels)
        files = tuple(f"{name}_hkl/{Path(path).name}" for path in data.paths)
        splits[name] = Split(files, tuple(map(str, range(some))), labels)
    np.save(folder / "misc" / "img_mean.npy", np.full((3, side, side), 127, np.float32))
    wnids = tuple(f"n{number:08}" for number in range(classes))
    manifest = Manifest(side, "b01c", PER_FILE, wnids, 0, {}, splits)
    write_manifest(folder / "manifest.json", manifest)
    return folder


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
        layout="b01c",
        image_size=side,
        labels_file=str(labels),
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
