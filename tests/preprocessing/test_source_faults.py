"""Sources that cannot be used: one message that names the fault, and nothing is written."""

import errno
import os
import random
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import make_hkl
import pytest

from tandem.errors import InputError
from tandem.preprocessing import listing
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import parquet as parquet_source
from tests.support import layouts
from tests.support.layouts import LAYOUTS, write
from tests.support.source_faults import FAULTS, KIT, TRAIN


def refused(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert make_hkl.main(["--source", str(source), "--tar-root-dir", str(out)]) == 2
    shown = capsys.readouterr().err.splitlines()
    (error,) = (line for line in shown if line.startswith("error: "))
    assert shown[-1] == error
    return error


CASES = [(layout, fault) for layout, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_a_source_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, fault: str
) -> None:
    LAYOUTS[layout][0](tmp_path / "in")
    spoil, message = FAULTS[layout][fault]
    spoil(tmp_path / "in")
    assert message in refused(tmp_path / "in", tmp_path / "out", capsys)
    assert not (tmp_path / "out").exists()


UNSUPPORTED = {
    "records of TensorFlow Datasets": ("imagenet2012-train.tfrecord-00000-of-01024",),
    "downloads/manual": ("5.1.0/dataset_info.json",),
    "FFCV's .beton files": ("train.beton", "val.beton"),
    "MosaicML's streaming (MDS)": ("train/index.json", "train/shard.00000.mds"),
    "unpickling a file runs what it holds": ("data_batch_1", "test_batch"),
    "pickled CIFAR": ("cifar-10-batches-py/data_batch_1",),
    "write them by to_parquet": ("train/data-00000-of-00010.arrow",),
    "tar -C train -xzf $f": ("data/train_images_0.tar.gz", "data/val_images.tar.gz"),
    "unpack the archive of each class into its own": ("train/n01440764.tar", "val/a.JPEG"),
    "train/ILSVRC2012_img_train.tar (archives in": (
        "train/ILSVRC2012_img_train.tar",
        "train/n01440764/n01440764_1.JPEG",
        "val/a.JPEG",
    ),
    "name the folder of one version": ("snapshots/abc/data/train-00000-of-00001.parquet",),
    "train.tar.gz (a compressed archive), which is not read; decompress": ("train.tar.gz",),
    "challenge.zip (a zip file), which is not read; name the file itself": (
        "imagenet-object-localization-challenge.zip",
    ),
    f"found {TRAIN}.gz, a compressed archive, expected {TRAIN}; decompress it: gunzip": (
        f"{TRAIN}.gz",
        KIT,
    ),
}


@pytest.mark.parametrize("hint", UNSUPPORTED)
def test_other_forms_are_refused_with_a_hint(tmp_path: Path, capsys, hint: str) -> None:
    for name in UNSUPPORTED[hint]:
        write(tmp_path / "in" / name, b"")
    assert hint in refused(tmp_path / "in", tmp_path / "out", capsys)
    assert not (tmp_path / "out").exists()


def test_an_unknown_folder_is_refused_with_what_is_there_and_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    error = refused(source, tmp_path / "out", capsys)
    assert f"{source} (source): the folder cannot be read: No such file" in error
    for name in ("cats/1.jpg", "dogs/1.jpg", KIT, *(f"{n}.txt" for n in range(10, 16))):
        write(source / name, b"")
    assert make_hkl.main(["--source", str(source), "--tar-root-dir", str(tmp_path / "out")]) == 2
    first, *known, last = capsys.readouterr().err.splitlines()
    assert first == (
        f"error: {source} (source): found cats, dogs, 10.txt, 11.txt, 12.txt, 13.txt, 14.txt,"
        " 15.txt and 1 more, expected one of the layouts of docs/data-sources.md:"
    )
    for expected in ("(Kaggle)", "train/<wnid>/", "ILSVRC2012_img_val.tar", "(webdataset)"):
        assert sum(expected in line for line in known) == 1
    assert max(map(len, known)) < 100
    assert last == "or name the folders by --train-img-dir and --val-img-dir"


@pytest.mark.parametrize("name", ["train/n01440764/a.JPEG", "photos/n01440764/a.JPEG"])
def test_the_folder_of_one_split_is_known_as_such(tmp_path: Path, capsys, name: str) -> None:
    write(tmp_path / name, b"")
    source = tmp_path / name.partition("/")[0]
    assert refused(source, tmp_path / "out", capsys) == (
        f"error: {source} (source): found class folders (n01440764, ...), expected train/ and val/;"
        " these look like the class folders of a split: name the folder above"
    )


@pytest.mark.parametrize(
    ("layout", "folder"), [("kaggle", "ILSVRC"), ("official_archives", "data")]
)
def test_a_folder_inside_that_cannot_be_read_is_named(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, layout: str, folder: str
) -> None:
    LAYOUTS[layout][0](tmp_path / "in")
    (tmp_path / "beside").mkdir()
    stat = Path.stat

    def denied(path: Path, **options: bool) -> os.stat_result:
        if folder in path.parent.parts[-4:]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    # Newer versions of Python ask the system without Path.stat, and have no exception here.
    monkeypatch.setattr(Path, "is_dir", lambda path: S_ISDIR(mode_of(path)))
    monkeypatch.setattr(Path, "is_file", lambda path: S_ISREG(mode_of(path)))
    error = refused(tmp_path / "beside" / ".." / "in", tmp_path / "out", capsys)
    assert error.startswith(f"error: {tmp_path / 'in' / folder}/")
    assert error.endswith(" (source): cannot be read: Permission denied")


def mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0


def test_folders_of_which_none_is_there_name_the_option(tmp_path: Path, capsys) -> None:
    folders = f"train_img_dir: {tmp_path}/a\nval_img_dir: {tmp_path}/b\n"
    write(tmp_path / "mine.yaml", folders.encode())
    assert make_hkl.main(["--config", str(tmp_path / "mine.yaml")]) == 2
    error = capsys.readouterr().err
    assert f"source: found neither {tmp_path}/a nor {tmp_path}/b, expected" in error
    assert "--source DIR" in error


def test_without_pictures_the_option_is_named(tmp_path: Path, capsys) -> None:
    write(tmp_path / "mine.yaml", b"tar_root_dir: out\n")
    assert make_hkl.main(["--config", str(tmp_path / "mine.yaml")]) == 2
    expected = "error: source: found null, expected a folder that holds ImageNet: --source DIR"
    assert capsys.readouterr().err.startswith(expected)


def test_without_pyarrow_its_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts.parquet(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = refused(tmp_path / "in", tmp_path / "out", capsys)
    assert "pyarrow, which is not installed; expected it: pip install pyarrow" in error


def test_parquet_that_ends_its_reader_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some damage does: pyarrow's C++ throws what nobody catches."""
    layouts.parquet(tmp_path / "in")
    monkeypatch.setattr(parquet_source, "_open", lambda path: os._exit(9))
    error = refused(tmp_path / "in", tmp_path / "out", capsys)
    assert "train-00000-of-00002.parquet (source): cannot be read: the process that read" in error
    assert "perhaps for lack of memory" in error
    assert not (tmp_path / "out").exists()


def test_copies_that_do_not_fit_are_refused_before_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts.parquet(tmp_path / "in")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(parquet_source._Shape, "copied", 25_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000_000))
    error = refused(tmp_path / "in", tmp_path / "out", capsys)
    # The copies of four files, and 65 pictures of 256 x 256 pixels.
    expected = "found 10.0 MB free, expected 112.8 MB for the copies of the pictures and the batch"
    assert f"{tmp_path / 'out'} (tar_root_dir): {expected}" in error
    assert not (tmp_path / "out").exists()


def headers_renewed(content: bytearray) -> bytes:
    """Make the sums of all headers right again, so that what is changed in them counts."""
    for start in range(0, len(content) - 511, 512):
        if content[start + 257 : start + 262] == b"ustar":
            content[start + 148 : start + 156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
    return bytes(content)


FUZZED = {
    "official_archives": "*.tar*",
    "webdataset_named_in_json": "*.tar",
    "kaggle": "*.csv",
    "parquet": "data/*.parquet",
}


@pytest.mark.parametrize("layout", FUZZED)
def test_random_damage_is_at_most_one_message(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout][0](tmp_path / "in")
    paths, rng = sorted((tmp_path / "in").glob(FUZZED[layout])), random.Random(1)
    settings = Settings(source=tmp_path / "in", tar_root_dir=tmp_path / "out")
    refusals = 0
    for _ in range(60 if layout != "parquet" else 8):
        path = rng.choice(paths)
        whole = path.read_bytes()
        content = bytearray(whole)
        for _ in range(rng.choice((1, 3, 30))):
            place = rng.randrange(len(content))
            if path.suffix == ".tar":  # most of an archive is pictures
                place = place // 512 * 512 + rng.choice((0, 5, 124, 130, 148, 156, 257))
            elif path.suffix == ".parquet":
                place = rng.randrange(len(content) - 1500, len(content))
            content[min(place, len(content) - 1)] = rng.choice(b"\0\xff0179LSxgK5")
        path.write_bytes(headers_renewed(content) if rng.random() < 0.7 else content)
        try:
            listing.list_pictures(settings)
        except InputError:
            refusals += 1
        path.write_bytes(whole)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert refusals
