"""How fast is preprocessing, against Pillow's decoding and resizing alone? And from archives?

    python -m benchmarks.preprocessing

Ours is the whole program: it starts, lists the pictures, decodes, resizes, sums them for the mean
image, writes batch files to disk and ends. Pillow's is as many running processes that decode and
resize and discard the result. The same program then reads the same pictures from webdataset's
archives and from parquet files; their copy is timed by itself. The files are in the page cache.
"""

import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.measure import Comparison, Measured, compare, measure, run
from benchmarks.pictures import write_jpegs
from tandem.data.class_names import imagenet_names
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import choose
from tandem.preprocessing.sources.parquet import COPIES_NAME

PROGRAMS = Path(__file__).parents[1] / "preprocessing"
TARGET = 1.15
ARCHIVES_TARGET = 0.9  # of the speed from folders
CHUNK = 16  # pictures per task of a process
SHARD = 1000  # pictures in an archive or a parquet file


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
    paths, wnids = [], [*imagenet_names()][:7]
    for number in range(sizes.pictures):
        split, wnid = "train" if number % 10 else "val", wnids[number % 7]
        path = folder / split / wnid / f"{wnid}_{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(jpegs[number % len(jpegs)])
        paths.append(path)
    return paths


def write_archives(folder: Path, paths: Sequence[Path]) -> None:
    """Write the pictures as webdataset's archives and as parquet files, into two folders."""
    import pyarrow
    import pyarrow.parquet

    wnids = [*imagenet_names()]
    for name in ("wds", "parquet"):
        (folder / name).mkdir()
    for split, name in (("train", "train"), ("val", "validation")):
        some = [path for path in paths if path.parts[-3] == split]
        starts = range(0, len(some), SHARD)
        for number, start in enumerate(starts):
            rows = []
            with tarfile.open(folder / "wds" / f"{name}-{number:04d}.tar", "w") as archive:
                for path in some[start : start + SHARD]:
                    content, label = path.read_bytes(), wnids.index(path.parent.name)
                    rows.append((content, f"{path.stem}_{path.parent.name}.JPEG", label))
                    for suffix, data in (("cls", str(label).encode()), ("jpg", content)):
                        member = tarfile.TarInfo(f"{path.stem}.{suffix}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
            images = [{"bytes": content, "path": path} for content, path, _ in rows]
            table = pyarrow.table({"image": images, "label": [label for *_, label in rows]})
            file = f"{name}-{number:05d}-of-{len(starts):05d}.parquet"
            pyarrow.parquet.write_table(table, folder / "parquet" / file, row_group_size=100)


def preprocess(folder: Path, out: str, size: int, program: str = "make_hkl.py") -> None:
    """Preprocess the pictures of `folder` into `out`, by one of the programs."""
    split_folders = [f"--train-img-dir={folder / 'train'}", f"--val-img-dir={folder / 'val'}"]
    _run(program, split_folders, out, size)


def preprocess_source(source: Path, out: str, size: int) -> None:
    """Preprocess the pictures in the archives of a folder."""
    _run("make_hkl.py", [f"--source={source}"], out, size)


def _run(program: str, pictures: list[str], out: str, size: int) -> None:
    command = [sys.executable, str(PROGRAMS / program), *pictures]
    command += ["--image-size", str(size), "--tar-root-dir", out]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def copy(folder: Path, out: Path) -> None:
    """Copy the parquet files into archives, as preprocessing does once."""
    choose(Settings(source=folder / "parquet", tar_root_dir=out)).find()


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
        write_archives(folder, paths)
        copied = folder / "copied"
        copy(folder, copied)
        decode_all(pool, sizes.stored, paths[: cores * CHUNK])
        for _ in range(rounds):
            # The output is removed outside the timing.
            with tempfile.TemporaryDirectory(dir=folder) as out:
                outs = {name: Path(out, name) for name in ("folders", "tars", "parquet", "copy")}
                shutil.copytree(
                    copied / COPIES_NAME, outs["parquet"] / COPIES_NAME, copy_function=os.link
                )
                read, size = partial(preprocess_source, size=sizes.stored), sizes.stored
                steps = {
                    "preprocessing": partial(preprocess, folder, str(outs["folders"]), size),
                    "Pillow alone": partial(decode_all, pool, size, paths),
                    "from archives": partial(read, folder / "wds", str(outs["tars"])),
                    "from parquet, copied": partial(read, folder / "parquet", str(outs["parquet"])),
                    "the copy of parquet": partial(copy, folder, outs["copy"]),
                }
                times.append(measure(steps, rounds=1, warmups=0))
    ours, pillow, tars, parquet, copies = (
        Measured(some[0].name, tuple(measured.seconds[0] for measured in some))
        for some in zip(*times, strict=True)
    )
    question = f"{sizes.pictures} JPEGs of {sizes.columns} x {sizes.rows}, {cores} cores"
    yield compare(question, ours, pillow, "speed", TARGET)
    yield compare(question, tars, ours, "speed", ARCHIVES_TARGET)
    yield compare(question, parquet, ours, "speed", ARCHIVES_TARGET)
    yield compare(question, copies, ours, "time")


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=3))
