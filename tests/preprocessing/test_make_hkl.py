"""Pictures to batch files: each arrives once, with its own label, and counts once in the mean."""

import errno
import importlib.metadata
import itertools
import os
import shutil
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import make_hkl
import numpy as np
import pytest

from tandem import __version__
from tandem.data.dataset import locate_split
from tandem.data.decode import MOST_PICTURE_BYTES
from tandem.data.manifest import Manifest, read_manifest
from tandem.data.resample import Resampler
from tandem.files import locked
from tandem.preprocessing import batches, pool, report
from tandem.preprocessing.pool import DecodePool, Task
from tandem.preprocessing.prepare import mean_of
from tests.support.picture_files import (
    GARBAGE,
    PER_FILE,
    SIDE,
    Pictures,
    Refusal,
    contents,
    encoded,
    stored,
    write_exact,
)


def source_of(split: str, name: str) -> np.ndarray:
    wnid, file = name.split("/")
    return encoded(split, wnid, int(file.partition(".")[0]))


def check_arrival(out: Path, pictures: Pictures, bad: set[str], layout: str = "b01c") -> Manifest:
    """Every good picture is in the batch files once, whole, where the manifest says."""
    manifest = read_manifest(out)
    for split in ("train", "val"):
        names = manifest.splits[split].pictures
        root = pictures.root / split
        there = {str(path.relative_to(root)) for path in root.glob("*/*.JPEG")}
        assert sorted(names) == sorted(name for name in there if f"{split}/{name}" not in bad)
        batches = stored(out, split, layout)
        labels = manifest.splits[split].labels
        assert len(batches) == len(labels) == len(names)
        for name, label, pixels in zip(names, labels, batches, strict=True):
            np.testing.assert_array_equal(pixels, source_of(split, name))
            assert manifest.wnids[label] == f"n{pixels[0, 0, 0]:02d}"
        located = locate_split(manifest, out, split)
        assert [path for path, _ in located] == sorted((out / f"{split}_hkl").iterdir())
    return manifest


@pytest.mark.parametrize(("layout", "workers"), [("b01c", "1"), ("c01b", "1"), ("b01c", "3")])
def test_every_picture_arrives_with_its_label(
    pictures: Pictures, out: Path, layout: str, workers: str
) -> None:
    assert make_hkl.main(pictures.options(out, "--layout", layout, "--workers", workers)) == 0
    manifest = check_arrival(out, pictures, set(), layout)
    assert manifest.counts("train") == (4, 4, 4, 1)
    assert manifest.counts("val") == (4, 2)
    assert (out / "misc" / "skipped.txt").read_bytes() == b""
    there = {path.name for path in out.iterdir()}
    assert there == {"manifest.json", "misc", "train_hkl", "val_hkl"}


def test_the_manifest_says_how_it_was_made(pictures: Pictures, out: Path) -> None:
    make_hkl.main(pictures.options(out, "--seed", "5", "--layout", "c01b"))
    manifest = read_manifest(out)
    assert (manifest.image_size, manifest.layout, manifest.seed) == (SIDE, "c01b", 5)
    assert manifest.pictures_per_file == PER_FILE
    assert manifest.wnids == ("n03", "n10", "n20")
    assert manifest.versions["tandem"] == __version__
    for name in ("numpy", "pillow", "hickle", "h5py"):
        assert manifest.versions[name] == importlib.metadata.version(name)
    assert "python" in manifest.versions


def mean_by_loops(sources: list[np.ndarray]) -> np.ndarray:
    """The exact mean of each pixel, rounded once to float64 and once to float32."""
    mean = np.zeros((3, SIDE, SIDE), np.float32)
    for channel, row, column in itertools.product(range(3), range(SIDE), range(SIDE)):
        total = sum(int(pixels[row, column, channel]) for pixels in sources)
        mean[channel, row, column] = float(Fraction(total, len(sources)))
    return mean


def test_the_mean_is_exact_for_all_of_imagenet() -> None:
    """A sum in float32 is off by whole levels here."""
    count = 1_281_167
    sums = np.full((2, 2, 3), 255 * count - 1, np.int64)
    sums[0, 1, 2] = 7
    mean = mean_of(sums, count)
    assert mean.dtype == np.float32
    assert mean[0, 0, 0] == np.float32((255 * count - 1) / count)
    assert mean[2, 0, 1] == np.float32(7 / count)


# Positions in the lists of 13 training and 6 validation pictures.
BAD_POSITIONS = {
    "none": (set(), set()),
    "the first": ({0}, {0}),
    "the last": ({12}, {5}),
    "one in the middle": ({5}, {2}),
    "every second": (set(range(0, 13, 2)), {1, 3, 5}),
    "the first ten": (set(range(10)), set()),
    "all after one file": (set(range(4, 13)), set()),
    "all but the last": (set(range(12)), set(range(5))),
}


@pytest.mark.parametrize(
    ("where", "workers"), [*((where, "1") for where in BAD_POSITIONS), ("every second", "2")]
)
def test_a_bad_picture_is_left_out_everywhere(
    pictures: Pictures, out: Path, tmp_path: Path, where: str, workers: str
) -> None:
    make_hkl.main(pictures.options(tmp_path / "whole"))
    listed = read_manifest(tmp_path / "whole").splits
    bad = [
        f"{split}/{listed[split].pictures[position]}"
        for split, positions in zip(("train", "val"), BAD_POSITIONS[where], strict=True)
        for position in sorted(positions)
    ]
    for name in bad:
        (pictures.root / name).write_bytes(GARBAGE)
    assert make_hkl.main(pictures.options(out, "--workers", workers)) == 0
    manifest = check_arrival(out, pictures, set(bad))
    lines = (out / "misc" / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == bad
    assert all("not a picture" in line.split("\t")[1] for line in lines)
    kept = [source_of("train", name) for name in manifest.splits["train"].pictures]
    mean = np.load(out / "misc" / "img_mean.npy")
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(mean, mean_by_loops(kept))
    for split in ("train", "val"):
        expected = [n for n in listed[split].pictures if f"{split}/{n}" not in bad]
        assert list(manifest.splits[split].pictures) == expected


@pytest.mark.parametrize("name", ["a\u200db.JPEG", "a\nb.JPEG", "a\tb.JPEG", "a\udcff.JPEG"])
def test_a_picture_whose_name_is_not_printable_is_left_out(
    pictures: Pictures, out: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = pictures.root / "train" / "n03"
    next(folder.glob("*.JPEG")).rename(folder / name)
    escaped = ascii(f"train/n03/{name}")
    assert make_hkl.main(pictures.options(out)) == 0
    (line,) = (out / "misc" / "skipped.txt").read_text().splitlines()
    assert line == f"{escaped}\tits name is not printable in UTF-8"
    assert f"left out {escaped}: its name is not printable in UTF-8\n" in capsys.readouterr().err
    assert f"n03/{name}" not in read_manifest(out).splits["train"].pictures
    # The output is recognised as finished.
    assert make_hkl.main(pictures.options(out)) == 0
    assert capsys.readouterr().err == f"{out / 'manifest.json'}: everything is there already\n"


def test_a_class_whose_pictures_are_all_bad_stays_a_class(pictures: Pictures, out: Path) -> None:
    pictures.spoil(("train", "n10", 0), ("train", "n10", 1))
    assert make_hkl.main(pictures.options(out)) == 0
    manifest = read_manifest(out)
    assert manifest.wnids == ("n03", "n10", "n20")
    assert set(manifest.splits["train"].labels.tolist()) == {0, 2}


def test_too_many_bad_pictures_are_an_error(
    pictures: Pictures, out: Path, tmp_path: Path, refusal: Refusal
) -> None:
    pictures.spoil(("train", "n03", 1), ("train", "n20", 4), ("val", "n10", 0))
    error = refusal("--max-bad", "2")
    assert "found 3 pictures that cannot be decoded, expected at most 2 (max_bad)" in error
    assert "val/n10/000.JPEG" in error
    assert str(out / "misc" / "skipped.txt") in error
    assert len((out / "misc" / "skipped.txt").read_text().splitlines()) == 3
    assert not (out / "manifest.json").exists()
    # As many as are allowed are allowed, and what was done is not lost.
    assert make_hkl.main(pictures.options(out, "--max-bad", "3")) == 0
    assert make_hkl.main(pictures.options(tmp_path / "fresh", "--max-bad", "3")) == 0
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_split_without_a_good_picture_is_an_error(
    pictures: Pictures, out: Path, refusal: Refusal
) -> None:
    for path in (pictures.root / "val").glob("*/*"):
        path.write_bytes(GARBAGE)
    assert f"{pictures.root / 'val'}: none of its pictures can be decoded" in refusal()
    assert not (out / "manifest.json").exists()
    shutil.rmtree(pictures.root / "val")
    pictures.write("val", {"n03": 2})
    assert make_hkl.main(pictures.options(out)) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_loops_that_resize_many_pictures_change_no_bit(
    pictures: Pictures, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    options, plain, sizes = ("--image-size", "40", "--workers", workers), tmp_path / "plain", []
    assert make_hkl.main(pictures.options(plain, *options)) == 0
    resized = Resampler._resize
    monkeypatch.setattr(
        Resampler, "_resize", lambda *some: (sizes.append(some[2]), resized(*some))[1]
    )
    monkeypatch.setattr(pool, "_MANY", 1)
    assert make_hkl.main(pictures.options(out, *options)) == 0
    if workers == "1":
        assert set(sizes) == {40}
    assert contents(out) == contents(plain)


def test_a_refused_run_does_not_bind_the_corrected_one(
    pictures: Pictures, out: Path, refusal: Refusal
) -> None:
    pictures.spoil(("train", "n03", 1))
    assert "expected at most 0 (max_bad)" in refusal("--max-bad", "0")
    pictures.path("train", "n03", 1).unlink()
    assert make_hkl.main(pictures.options(out, "--max-bad", "0")) == 0


@pytest.mark.parametrize("kind", ["pipe", "device", "large", "endless"])
def test_what_could_be_read_for_ever_is_left_out(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = pictures.path("train", "n03", 1)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(MOST_PICTURE_BYTES + 1)
    else:
        path.write_bytes(b"\xff\xd8\xff" + bytes(1 << 20))
        monkeypatch.setattr("tandem.data.decode._MOST_SECONDS", 0.02)
    assert make_hkl.main(pictures.options(out)) == 0
    (line,) = (out / "misc" / "skipped.txt").read_text().splitlines()
    reasons = {"large": "expected at most", "endless": "decoding takes more than 0.02 s"}
    assert reasons.get(kind, "found something that is not a file, expected a file") in line


def test_a_picture_that_cannot_be_read_is_not_taken_for_a_bad_one(
    pictures: Pictures, out: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pictures.path("train", "n03", 1)
    opened = pool.open_file

    def fails(asked: Path) -> Any:
        if asked == path:
            raise OSError(errno.EIO, "Input/output error")
        return opened(asked)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "open_file", fails)
        assert f"error: {path}: the picture cannot be read: Input" in refusal("--workers", "1")
    path.unlink()
    path.symlink_to("nowhere")  # said before any work
    assert f"error: {path} (train_img_dir): the link leads nowhere" in refusal()
    path.unlink()
    write_exact(path, encoded("train", "n03", 1))
    assert make_hkl.main(pictures.options(out)) == 0
    check_arrival(out, pictures, set())


def test_more_pictures_than_the_shared_memory_holds(tmp_path: Path, out: Path) -> None:
    """Slots are used again and again, with holes that bad pictures leave."""
    pictures = Pictures(tmp_path / "many")
    pictures.write("train", {"n01": 150, "n02": 91})
    pictures.write("val", {"n01": 70})
    bad = [("train", "n01", number) for number in range(3, 150, 17)]
    pictures.spoil(*bad, ("val", "n01", 9))
    assert make_hkl.main(pictures.options(out, "--batch-size", "3", "--workers", "2")) == 0
    names = {str(pictures.path(*b).relative_to(pictures.root)) for b in bad}
    check_arrival(out, pictures, names | {"val/n01/009.JPEG"})


def test_validation_pictures_are_decoded_while_the_last_training_file_is_written(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, submit, write = threading.Event(), DecodePool.submit, batches.write_batch
    waited = []

    def submitted(pool: DecodePool, task: Task) -> object:
        if "/val/" in task.places[0].path:
            begun.set()
        return submit(pool, task)

    def written(path: Path, *about: Any) -> None:
        if path.parts[-2:] == ("train_hkl", "0003.hkl"):
            waited.append(begun.wait(30))
        write(path, *about)

    monkeypatch.setattr(DecodePool, "submit", submitted)
    monkeypatch.setattr(batches, "write_batch", written)
    assert make_hkl.main(pictures.options(out, "--workers", "2")) == 0
    assert waited == [True]
    check_arrival(out, pictures, set())


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
def test_the_covariance_of_colours_is_of_every_fourth_row_and_column(
    pictures: Pictures, out: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data set of an older version gets it, and nothing else, from its batch files."""
    pictures.spoil(("train", "n03", 1))
    options = pictures.options(out, "--layout", layout)
    assert make_hkl.main(options) == 0
    path, before = out / "misc" / "colour_covariance.npy", contents(out)
    pixels = np.stack(stored(out, "train", layout))[:, ::4, ::4].reshape(-1, 3)
    expected = np.cov(pixels.T.astype(float), bias=True)
    found = np.load(path)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    path.unlink()
    assert make_hkl.main(options) == 0
    assert contents(out) == before
    assert f"{path}: computing it from the batch files" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_proportions_may_stay(pictures: Pictures, out: Path, workers: str) -> None:
    wide = encoded("train", "n20", 0).repeat(3, axis=1)
    for split, counts in {"train": {"n20": 1}, "val": {"n20": 1}}.items():
        shutil.rmtree(pictures.root / split)
        pictures.write(split, counts)
    write_exact(pictures.path("train", "n20", 0), wide)
    options = ("--resize", "shorter_side", "--workers", workers)
    assert make_hkl.main(pictures.options(out, *options)) == 0
    assert read_manifest(out).resize == "shorter_side"
    np.testing.assert_array_equal(stored(out, "train"), [wide[:, SIDE : 2 * SIDE]])
    assert make_hkl.main(pictures.options(out, *options)) == 0
    assert make_hkl.main(pictures.options(out)) == 2


def test_a_finished_run_is_left_alone(pictures: Pictures, out: Path, capsys) -> None:
    pictures.spoil(("train", "n03", 1))
    make_hkl.main(pictures.options(out))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert make_hkl.main(pictures.options(out)) == 0
    assert "everything is there already" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image-size", "7"), "image_size 8, expected 7"),
        (("--batch-size", "5"), "batch_size 4, expected 5"),
        (("--layout", "c01b"), "layout b01c, expected c01b"),
        (("--seed", "2"), "seed 1, expected 2"),
        (("--resize", "shorter_side"), "resize squash, expected shorter_side"),
        (("--subset", "7"), "pictures"),
        ({"n03": 7}, "pictures"),
        ({"n77": 1}, "pictures"),
    ],
)
def test_outputs_of_another_run_are_not_overwritten(
    pictures: Pictures, out: Path, monkeypatch, refusal, options, message, finished
) -> None:
    with monkeypatch.context() as patch:
        if not finished:
            patch.setattr("tandem.preprocessing.prepare.write_manifest", raise_interrupt)
        assert make_hkl.main(pictures.options(out)) == (0 if finished else 130)
    before = contents(out)
    if isinstance(options, dict):
        pictures.write("train", options)
    error = refusal(*(() if isinstance(options, dict) else options))
    assert message in error
    assert "choose another tar_root_dir" in error
    assert contents(out) == before


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "path",
    [
        *("train_hkl/0000.hkl", "val_hkl/0000.hkl", "train_hkl/mine"),
        *("misc/img_mean.npy", "misc/colour_covariance.npy"),
    ],
)
def test_files_of_other_programs_are_not_overwritten(
    out: Path, refusal: Refusal, path: str
) -> None:
    (out / path).parent.mkdir(parents=True)
    (out / path).write_bytes(b"precious")
    assert f"error: {out / path}: found a file that no run recorded" in refusal()
    assert contents(out) == {path: b"precious"}


def test_damage_to_a_finished_run_is_found(pictures: Pictures, out: Path, refusal: Refusal) -> None:
    make_hkl.main(pictures.options(out))
    path = out / "train_hkl" / "0001.hkl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert str(path) in refusal()
    path.write_bytes(whole)
    (out / "misc" / "img_mean.npy").unlink()
    assert "there is no mean image" in refusal()


def test_one_run_at_a_time(out: Path, refusal: Refusal) -> None:
    out.mkdir()
    with locked(out):
        assert "another run is using this folder" in refusal()
    assert contents(out) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable(out: Path, refusal: Refusal) -> None:
    out.mkdir(mode=0o500)
    assert "not writable" in refusal()


def test_bad_input_leaves_nothing_behind(pictures: Pictures, out: Path, refusal: Refusal) -> None:
    pictures.write("val", {"n77": 1})
    assert "found class n77" in refusal()
    assert not out.exists()


def test_without_a_terminal_lines_report_progress(
    pictures: Pictures, out: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(report, "_SECONDS_BETWEEN_LINES", 0.0)
    make_hkl.main(pictures.options(out))
    shown = capsys.readouterr().err.splitlines()
    lines = [line for line in shown if " left" in line and "pictures/s" in line]
    assert lines[0].startswith("13 of 19 pictures, ")
    assert lines[-1].startswith("19 of 19 pictures, ")
    assert lines[-1].endswith("/s, 0 s left")
