"""Sources that cannot be used: one message that names the fault, and nothing is written."""

import errno
import gzip
import io
import os
import random
import shutil
import sys
import tarfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import make_hkl
import pyarrow
import pyarrow.parquet
import pytest

from tandem.errors import InputError
from tandem.preprocessing import ground_truth, listing
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import parquet as parquet_source
from tests.support import layouts
from tests.support.layouts import LAYOUTS, members, of, tar, write

Spoil = Callable[[Path], object]

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
KIT = "ILSVRC2012_devkit_t12.tar.gz"
SHARD, LAST = "imagenet1k-train-0000.tar", "imagenet1k-validation-01.tar"
INFO = "_info.json"
CSV = "LOC_val_solution.csv"
PICTURE = "ILSVRC2012_val_00000004.JPEG"


def change(name: str, edit: Callable[[bytes], bytes]) -> Spoil:
    return lambda root: (root / name).write_bytes(edit((root / name).read_bytes()))


def delete(name: str) -> Spoil:
    return lambda root: (root / name).unlink()


def without_end(content: bytes) -> bytes:
    """Cut an archive exactly after its last member."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        last = archive.getmembers()[-1]
    return content[: last.offset_data + -(-last.size // 512) * 512]


def zeros_from_the_middle(content: bytes) -> bytes:
    """Keep the first picture: what a program that loads in parts leaves, when it is stopped."""
    return content[:1024] + bytes((1 << 20) + 1024)


def inner(edit: Callable[[bytes], bytes]) -> Spoil:
    """Change the archive of the second class."""

    def edited(content: bytes) -> bytes:
        files = members(content)
        files[1] = files[1][0], edit(files[1][1])
        return tar(files)

    return change(TRAIN, edited)


def special(kind: bytes, name: str = "n01440764_1.JPEG") -> bytes:
    """An archive whose only member is a link, a sparse file or the like."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def sample(name: str, files: dict[str, bytes]) -> Spoil:
    """Replace an archive of samples by one of these files."""
    return lambda root: write(root / name, tar(files.items()))


def lines(edit: Callable[[list[str]], list[str]]) -> Spoil:
    return change(CSV, lambda content: "\n".join(edit(content.decode().splitlines())).encode())


def columns(**values: list) -> Spoil:
    path = "data/train-00001-of-00002.parquet"
    return lambda root: pyarrow.parquet.write_table(pyarrow.table(values), root / path)


FAULTS: dict[str, dict[str, tuple[Spoil, str]]] = {
    "official_archives": {
        "cut within a picture": (
            change(VAL, lambda content: content[:600]),
            f"{VAL} (source): found the member ILSVRC2012_val_00000025.JPEG of ",
        ),
        "cut within a header": (
            change(VAL, lambda content: content[:700]),
            f"{VAL} (source): found ",
        ),
        "cut between two pictures": (
            change(VAL, without_end),
            f"{VAL} (source): found its end after",
        ),
        "cut between two classes": (
            change(TRAIN, without_end),
            f"{TRAIN} (source): found its end after",
        ),
        "an inner archive that is cut between two pictures": (
            inner(without_end),
            f"{TRAIN} (source): n01860187.tar: found its end after",
        ),
        "an inner archive that is cut within a picture": (
            inner(lambda content: content[:700]),
            f"{TRAIN} (source): n01860187.tar: found the member n01860187_",
        ),
        "a class without a picture": (
            inner(lambda content: tar([("n01860187_1.txt", b"")])),
            f"{TRAIN} (source): n01860187.tar: found no picture, expected at least one",
        ),
        "zeros in place of pictures": (
            inner(zeros_from_the_middle),
            "n01860187.tar: found an end-of-archive block at byte 1024 of 1050624, expected one at",
        ),
        "zeros in place of classes": (
            change(TRAIN, lambda content: content + bytes(1 << 20)),
            f"{TRAIN} (source): found an end-of-archive block at byte ",
        ),
        "two archives in one file": (
            inner(lambda content: content + tar([("n01860187_1.JPEG", b"")])),
            "n01860187.tar: found an end-of-archive block at byte ",
        ),
        "an empty file": (
            change(TRAIN, lambda content: b""),
            "found its end after 0 bytes, expected an end-of-archive block; the archive is"
            " incomplete: copy or download it again",
        ),
        "something else": (
            change(TRAIN, lambda content: b"<html>" * 999),
            "found no header of a member at byte 0 (invalid header), expected an uncompressed tar",
        ),
        "compressed": (
            change(TRAIN, gzip.compress),
            "found an archive that is compressed by gzip, expected an uncompressed one; decompress",
        ),
        "a compressed inner archive": (
            inner(gzip.compress),
            "n01860187.tar: found an archive that is compressed by gzip",
        ),
        "a picture among the classes": (
            change(TRAIN, lambda content: tar([("a.JPEG", b"")])),
            "found a.JPEG, expected an archive for each class, such as n01440764.tar",
        ),
        "no picture": (change(TRAIN, lambda content: tar([])), "found no train picture"),
        **{
            f"a member of type {kind!r}": (
                inner(lambda content, kind=kind: special(kind)),  # type: ignore[misc]
                "n01860187.tar: found n01440764_1.JPEG, a link, a sparse file or a device",
            )
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.GNUTYPE_SPARSE, tarfile.CHRTYPE)
        },
        "a picture twice": (
            inner(lambda content: tar([*members(content), *members(content)[:1]])),
            "found two train pictures that are n01860187/n01860187_",
        ),
        "no training archive": (
            delete(TRAIN),
            f"in (source): found no {TRAIN}, expected it beside {VAL}",
        ),
        "no validation archive": (
            delete(VAL),
            f"in (source): found no {VAL}, expected it beside {TRAIN}",
        ),
        "a training archive that is compressed": (
            lambda root: (root / TRAIN).rename(root / f"{TRAIN}.gz"),
            f"in (source): found {TRAIN}.gz, a compressed archive, expected {TRAIN}; decompress it:"
            f" gunzip {TRAIN}.gz",
        ),
        "a validation archive that is compressed": (
            lambda root: (root / VAL).rename(root / f"{VAL}.xz"),
            f"found {VAL}.xz, a compressed archive, expected {VAL}; decompress it: unxz {VAL}.xz",
        ),
        "a training archive that is not whole": (
            lambda root: (root / TRAIN).rename(root / f"{TRAIN}.part"),
            f"found no {TRAIN}, expected it beside {VAL}",
        ),
        "no development kit": (delete(KIT), f"found no development kit, expected {KIT}"),
        "ground truth of another length": (
            lambda root: layouts.packed_kit(root, "1\n2\n"),
            "ILSVRC2012_validation_ground_truth.txt: found 2 lines, expected 25",
        ),
        "an unknown ID": (
            lambda root: layouts.packed_kit(root, "77\n" * 25),
            "ILSVRC2012_validation_ground_truth.txt: line 1: found ID 77, expected one of",
        ),
        "a kit that is cut": (
            change(KIT, lambda content: content[:-20]),
            f"{KIT} (source): cannot be read: ",
        ),
        "a kit without its files": (
            lambda root: write(root / KIT, gzip.compress(tar([("a", b"")]))),
            "found neither ILSVRC2012_validation_ground_truth.txt nor meta.mat",
        ),
        "a kit with another table": (
            lambda root: write(root / KIT, gzip.compress(tar(kit_with(root, b"no table").items()))),
            "meta.mat: cannot be read: ",
        ),
        "a kit that unpacks to more than memory": (
            lambda root: write(root / KIT, gzip.compress(bytes(ground_truth._MOST_BYTES + 2))),
            f"{KIT} (source): found more than 67108864 bytes in it",
        ),
    },
    "kaggle": {
        "no csv": (delete(CSV), f"found no {CSV} there or beside ILSVRC/"),
        "a csv that lacks a picture": (
            lines(lambda found: [line for line in found if PICTURE[:-5] not in line]),
            f"{CSV} (source): found no line of {PICTURE}, expected one for each picture of",
        ),
        "a picture that is missing": (
            delete(f"ILSVRC/Data/CLS-LOC/val/{PICTURE}"),
            f"found no picture {PICTURE[:-5]}, expected one for each line of",
        ),
        "a picture on two lines": (
            lines(lambda found: [*found, found[-1]]),
            "line 27: found",
        ),
        "a line without a class": (
            lines(lambda found: [*found[:5], "ILSVRC2012_val_00000001,", *found[6:]]),
            'line 6: found "ILSVRC2012_val_00000001,", expected a picture',
        ),
        "binary": (change(CSV, lambda content: b"\xff" * 9), f"{CSV} (source): cannot be read: "),
        "empty": (
            lambda root: write(root / CSV, b"\n"),
            f"{CSV} (source): found an empty file, expected a line for each validation picture",
        ),
        "too large": (
            lambda root: write(root / CSV, bytes((64 << 20) + 1)),
            "found 67108865 bytes, expected at most 67108864",
        ),
    },
    "webdataset": {
        "a missing shard": (
            lambda root: [(root / n).unlink() for n in ("imagenet1k-train-0001.tar", INFO)],
            "found 2 files of train pictures up to imagenet1k-train-0002.tar without number 1",
        ),
        "no validation shard": (
            lambda root: [path.unlink() for path in (*root.glob("*validation*"), root / INFO)],
            "found no file of val pictures, expected at least one",
        ),
        "the last shard is missing": (
            delete("imagenet1k-train-0002.tar"),
            "found no imagenet1k-train-0002.tar, expected the archives that _info.json names; move",
        ),
        "a list of other names": (
            lambda root: write(root / INFO, b'{"splits": {"validation": {"filenames": [1]}}}'),
            "found no 1, expected the archives",
        ),
        **{
            f"a list of shards that is {content!r}": (
                lambda root, content=content: write(root / INFO, content),  # type: ignore[misc]
                f"{INFO} (source): cannot be read: ",
            )
            for content in (b"{", b"[]", b'{"splits": {"train": {"filenames": 1}}}')
        },
        "two shards of one number": (
            lambda root: write(root / "other-train-00.tar", b""),
            "found imagenet1k-train-0000.tar and other-train-00.tar, expected one archive of each",
        ),
        "cut between two samples": (change(LAST, without_end), f"{LAST} (source): found its end"),
        "compressed": (change(SHARD, gzip.compress), "compressed by gzip"),
        "a sample without a picture": (
            sample(SHARD, {"a.cls": b"0", "a.json": b"{}"}),
            f"{SHARD} (source): a: found 0 pictures with this name, expected one, such as a.jpg",
        ),
        "a sample with two pictures": (
            sample(SHARD, {"a.jpg": b"", "a.png": b"", "a.cls": b"0"}),
            "a: found 2 pictures with this name",
        ),
        "a file twice": (
            lambda root: write(root / SHARD, tar([("a.jpg", b""), ("a.jpg", b"")])),
            "found a.jpg twice, expected it once",
        ),
        "a sample without a class": (
            sample(SHARD, {"a.jpg": b"", "a.json": b'{"label": null}'}),
            "a: found no class, expected its number in a.cls",
        ),
        "a class that is no number": (
            sample(SHARD, {"a.jpg": b"", "a.cls": b"tench"}),
            "a: found class b'tench', expected a number",
        ),
        "a label that is too large": (
            sample(SHARD, {"a.jpg": b"", "a.json": b'{"label": %d}' % 10**30}),
            "a: found class b'10000000000000000000', expected a number",
        ),
        "a class file that is too large": (
            sample(SHARD, {"a.jpg": b"", "a.cls": b"0" * 33}),
            "found a.cls of 33 bytes, expected at most 32",
        ),
        "a class of no name": (
            sample(SHARD, {"a.jpg": b"", "a.cls": b"1"}),
            "a.jpg: found class 1, expected one of 10 known classes",
        ),
        "two classes of one number": (
            sample(SHARD, {"n01440764_1.jpg": b"", "n01440764_1.cls": b"100"}),
            "found class 100 for n0",
        ),
        "JSON that is none": (
            sample(SHARD, {"a.jpg": b"", "a.json": b"{"}),
            "a.json: not JSON: ",
        ),
        "JSON of something else": (
            sample(SHARD, {"a.jpg": b"", "a.json": b"[]"}),
            "a.json: found [], expected keys and values",
        ),
    },
    "parquet": {
        "no image": (
            columns(label=[1], picture=[b""]),
            "train-00001-of-00002.parquet (source): found the columns label: int64, picture:"
            " binary, expected image (a struct of bytes and path) and label (an integer)",
        ),
        "no label": (
            columns(image=[{"bytes": b"", "path": ""}]),
            "found the columns image: struct<bytes: binary, path: string>, expected",
        ),
        "an image that is text": (
            columns(image=["a.jpg"], label=[1]),
            "found the columns image: string, label: int64, expected",
        ),
        "labels that are names": (
            columns(image=[{"bytes": b"", "path": ""}], label=["tench"]),
            "label: string, expected",
        ),
        "paths that are numbers": (
            columns(image=[{"bytes": b"", "path": 1}], label=[1]),
            "path: int64>, label: int64, expected",
        ),
        "something else": (
            lambda root: write(root / "data/train-00001-of-00002.parquet", b"<html>"),
            "train-00001-of-00002.parquet (source): cannot be read: ",
        ),
        "cut": (
            change("data/validation-00001-of-00002.parquet", lambda content: content[:-9]),
            "validation-00001-of-00002.parquet (source): cannot be read: ",
        ),
        "the last training file is missing": (
            delete("data/train-00001-of-00002.parquet"),
            "found 1 file of train pictures without number 1, expected 2 files as their names say",
        ),
        "the first validation file is missing": (
            delete("data/validation-00000-of-00002.parquet"),
            "found 1 file of val pictures without number 0, expected 2 files as their names say",
        ),
        "files of two versions": (
            lambda root: write(root / "data/train-00003-of-00004.parquet", b""),
            "expected train files of one number (-of-) of files",
        ),
    },
    "folders_with_packed_kit": {
        "no development kit": (
            delete(KIT),
            "the validation pictures lie side by side; found no development kit in",
        ),
    },
    "in_one_folder": {
        "a picture without a class": (
            lambda root: write(root / "cat.JPEG", b""),
            "found cat.JPEG, expected a name that ends in the class",
        ),
        "no validation picture": (
            lambda root: [path.unlink() for path in root.glob("ILSVRC2012_val*")],
            "found no val picture, expected at least one",
        ),
    },
    "folders_by_class": {
        "two names of one picture": (
            lambda root: write(
                root / "train" / of("train")[0].wnid / f"{of('train')[0].name}.jpg", b""
            ),
            "found two train pictures that are n0",
        ),
        "another layout beside it": (
            lambda root: layouts.official_archives(root),
            "found ImageNet's official archives and folders of pictures, expected one of them",
        ),
    },
}


def kit_with(root: Path, table: bytes) -> dict[str, bytes]:
    return {name: table if name.endswith(".mat") else c for name, c in layouts.kit(root).items()}


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
    "challenge.zip (a zip file), which is not read; unpack it first": (
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


def test_a_row_without_a_picture_is_refused(tmp_path: Path, capsys) -> None:
    layouts.parquet(tmp_path / "in")
    rows = [{"bytes": content, "path": "n01440764_10026.JPEG"} for content in (b"", None)]
    columns(image=rows, label=[0, 0])(tmp_path / "in")
    error = refused(tmp_path / "in", tmp_path / "out", capsys)
    assert "train-00001-of-00002.parquet (source): row 1: found no picture or no class" in error


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
