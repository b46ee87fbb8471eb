"""How fast is preprocessing, against Pillow's decoding and resizing alone?

    python -m benchmarks.preprocessing

Ours is the whole program: it starts, lists the pictures, decodes, resizes, sums them for the mean
image, writes batch files to disk and ends. Pillow's is as many running processes that decode and
resize and discard the result. The JPEGs are in the page cache.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.measure import Comparison, Measured, compare, measure, run
from benchmarks.pictures import write_jpegs

PROGRAMS = Path(__file__).parents[1] / "preprocessing"
TARGET = 0.95
CHUNK = 16  # pictures per task of a process


@dataclass(frozen=True)
class Sizes:
    """Sizes of the data set."""

    pictures: int = 4000  # one in ten for validation
    different: int = 200  # distinct files that they link to
    rows: int = 375  # of the JPEGs, in pixels
    columns: int = 500
    stored: int = 256  # side of the stored pictures


PAPER = Sizes()


def write_pictures(folder: Path, sizes: Sizes) -> list[Path]:
    """Write class folders of training and validation pictures into `folder`."""
    store = folder / "different"
    store.mkdir()
    jpegs = write_jpegs(store, sizes.different, sizes.rows, sizes.columns)
    paths = []
    for number in range(sizes.pictures):
        split = "train" if number % 10 else "val"
        path = folder / split / f"n{number % 7:08d}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(jpegs[number % len(jpegs)])
        paths.append(path)
    return paths


def preprocess(folder: Path, out: str, size: int, program: str = "make_hkl.py") -> None:
    """Preprocess the pictures of `folder` into `out`, by one of the programs."""
    command = [sys.executable, str(PROGRAMS / program), "--image-size", str(size)]
    command += ["--tar-root-dir", out]
    command += ["--train-img-dir", str(folder / "train"), "--val-img-dir", str(folder / "val")]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def decode(size: int, paths: Sequence[Path]) -> None:
    """Decode and resize each picture by Pillow."""
    for path in paths:
        with Image.open(path) as image:
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            rgb.resize((size, size), Image.Resampling.BILINEAR)


def decode_all(pool: Any, size: int, paths: Sequence[Path]) -> None:
    """Decode all pictures in running processes."""
    chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
    pool.map(partial(decode, size), chunks, chunksize=1)


def answer(rounds: int, sizes: Sizes = PAPER) -> Iterator[Comparison]:
    """Make pictures, preprocess them, compare."""
    cores = len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as name,
        multiprocessing.get_context("spawn").Pool(cores) as pool,
    ):
        folder, times = Path(name), []
        paths = write_pictures(folder, sizes)
        decode_all(pool, sizes.stored, paths[: cores * CHUNK])
        for _ in range(rounds):
            # The output is removed outside the timing.
            with tempfile.TemporaryDirectory(dir=folder) as out:
                steps = {
                    "preprocessing": partial(preprocess, folder, out, sizes.stored),
                    "Pillow alone": partial(decode_all, pool, sizes.stored, paths),
                }
                times.append(measure(steps, rounds=1, warmups=0))
    ours, pillow = (
        Measured(some[0].name, tuple(measured.seconds[0] for measured in some))
        for some in zip(*times, strict=True)
    )
    question = f"{sizes.pictures} JPEGs of {sizes.columns} x {sizes.rows}, {cores} cores"
    yield compare(question, ours, pillow, "speed", TARGET)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=3))
