"""Faults of sources, by layout and name: how each is made, and what its message says."""

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

from tandem.preprocessing import ground_truth
from tests.support import layouts
from tests.support.layouts import members, of, tar, write
from tests.support.lazily import Lazily

pyarrow = Lazily("pyarrow")
parquet = Lazily("pyarrow.parquet")

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
    return lambda root: parquet.write_table(pyarrow.table(values), root / path)


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
        "ground truth of more pictures": (
            lambda root: layouts.packed_kit(root, "1\n" * 26),
            "ILSVRC2012_validation_ground_truth.txt: found 26 lines, expected 25",
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
