"""Pictures made up for benchmarks and tests, so that these run anywhere."""

from pathlib import Path

import numpy as np
from PIL import Image

from tandem.data.batch_file import locate_batch, write_batch
from tandem.data.dataset import Dataset
from tandem.data.manifest import Manifest, Split, write_manifest
from tandem.files import write_array


def write_batches(folder: Path, count: int, side: int, per_file: int = 256) -> Dataset:
    """A data set of noise, of ten classes.

    Parameters
    ----------
    folder : Path
        Where it goes.
    count : int
        Pictures.
    side : int
        Their rows and columns, pixels.
    per_file : int
        Pictures of a batch file.
    """
    rng = np.random.default_rng(0)
    counts = tuple(min(per_file, count - start) for start in range(0, count, per_file))
    paths = [folder / f"{number:04d}.hkl" for number in range(len(counts))]
    for path, some in zip(paths, counts, strict=True):
        write_batch(path, rng.integers(0, 256, (some, side, side, 3), np.uint8), "b01c")
    labels = folder / "labels.npy"
    np.save(labels, rng.integers(0, 10, count))
    return Dataset(
        paths=tuple(map(str, paths)),
        offsets=tuple(locate_batch(path).offset for path in paths),
        counts=counts,
        layout="b01c",
        image_size=side,
        labels_file=str(labels),
    )


def write_jpegs(folder: Path, count: int, rows: int = 375, columns: int = 500) -> list[Path]:
    """JPEGs like ImageNet's in pixels and, with 90 KB, in bytes: soft colours under fine noise."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number:05d}.JPEG" for number in range(count)]
    for path in paths:
        colours = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        soft = np.asarray(colours.resize((columns, rows), Image.Resampling.BICUBIC), np.int16)
        grain = rng.integers(-24, 25, (rows, columns, 1), np.int16)
        pixels = np.clip(soft + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, quality=90)
    return paths


def write_data_set(
    folder: Path,
    train: int = 13,
    validation: int = 7,
    classes: int = 3,
    image_size: int = 70,
    per_file: int = 5,
    layout: str = "b01c",
    seed: int = 0,
) -> Path:
    """Write all that preprocessing makes, of random pictures; return `folder`.

    A picture is noise whose brightness depends on its class, so that there is something to learn.
    """
    rng = np.random.default_rng(seed)
    splits = {}
    pixels = {}
    for name, size in (("train", train), ("val", validation)):
        labels = rng.integers(0, classes, size)
        noise = rng.integers(0, 128, (size, image_size, image_size, 3))
        brightness = 127 * labels // max(classes - 1, 1)
        pixels[name] = (noise + brightness[:, None, None, None]).astype(np.uint8)
        files = []
        for start in range(0, size, per_file):
            file = folder / f"{name}_hkl" / f"{start // per_file:04}.hkl"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_batch(file, pixels[name][start : start + per_file], layout)
            files.append(f"{name}_hkl/{file.name}")
        splits[name] = Split(tuple(files), tuple(f"{i}.JPEG" for i in range(size)), labels)
        (folder / "labels").mkdir(exist_ok=True)
        write_array(folder / "labels" / f"{name}_labels.npy", labels)
    (folder / "misc").mkdir(exist_ok=True)
    mean = pixels["train"].mean(axis=0, dtype=float).astype(np.float32).transpose(2, 0, 1)
    write_array(folder / "misc" / "img_mean.npy", mean)
    wnids = tuple(f"n{i:08}" for i in range(classes))
    manifest = Manifest(image_size, layout, per_file, wnids, seed, {}, splits)
    write_manifest(folder / "manifest.json", manifest)
    return folder
