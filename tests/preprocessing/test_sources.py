"""ImageNet in every layout: the same manifest, order and pixels, whichever it is."""

import errno
import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_hkl
import numpy as np
import pytest

from tandem.data.manifest import read_manifest, write_manifest
from tandem.errors import InputError
from tandem.preprocessing import batches, prepare
from tandem.preprocessing.index import load_index, save_index
from tandem.preprocessing.listing import Listing, list_pictures
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import parquet as parquet_source
from tandem.preprocessing.tars import Archive
from tests.support import layouts
from tests.support.layouts import LAYOUTS, SIDE, of, write
from tests.support.picture_files import contents

_NOT_COMPARED = ("index.npz", "parquet_copy/")


def options(out: Path, *more: str) -> list[str]:
    sizes = ("--image-size", str(SIDE), "--batch-size", "7", "--workers", "1")
    return ["--tar-root-dir", str(out), *sizes, *more]


def output(out: Path) -> dict[str, bytes]:
    """What is the same from every layout."""
    return {k: v for k, v in contents(out).items() if not k.startswith(_NOT_COMPARED)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Class folders of training pictures and flat validation pictures, named one by one."""
    root = tmp_path_factory.mktemp("named")
    layouts.folders_with_kit(root / "in")
    data = root / "in" / "ILSVRC2012_devkit_t12" / "data"
    named = {
        "train-img-dir": root / "in" / "train",
        "val-img-dir": root / "in" / "val",
        "val-label-file": data / "ILSVRC2012_validation_ground_truth.txt",
        "meta-clsloc-mat": data / "meta.mat",
    }
    arguments = [word for key, path in named.items() for word in (f"--{key}", str(path))]
    assert make_hkl.main(options(root / "out", *arguments)) == 0
    return output(root / "out")


def test_names_are_those_that_imagenet_has(expected: dict[str, bytes]) -> None:
    splits = json.loads(expected["manifest.json"])["splits"]
    train, val = (splits[split]["pictures"] for split in ("train", "val"))
    assert all(re.fullmatch(r"(n\d{8})/\1_\d+\.JPEG", name) for name in train)
    assert train != sorted(train)
    assert val == [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, layouts.VAL + 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_bytes(
    tmp_path: Path, expected: dict[str, bytes], layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    write, what = LAYOUTS[layout]
    write(source)
    arguments = options(out, "--source", str(source))
    assert make_hkl.main(arguments) == 0
    assert output(out) == expected
    found = (
        f"{source}: found {what}: {layouts.TRAIN} training and {layouts.VAL} validation pictures"
        " of 10 classes"
    )
    assert capsys.readouterr().err.splitlines().count(found) == 1
    # A finished run is recognised, and nothing is written.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert make_hkl.main(arguments) == 0
    assert "everything is there already" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


ARCHIVED = ("official_archives", "webdataset", "parquet")


@pytest.mark.parametrize("layout", ARCHIVED)
def test_archives_are_read_once(
    tmp_path: Path, expected: dict[str, bytes], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run is stopped, and where the output is finished."""
    source, out = tmp_path / "in", tmp_path / "out"
    LAYOUTS[layout][0](source)
    read: list[Path] = []
    opened = Archive.open
    monkeypatch.setattr(Archive, "open", lambda path: (read.append(path), opened(path))[1])
    arguments = options(out, "--source", str(source))
    with monkeypatch.context() as patch:
        patch.setattr(batches, "write_batch", stop)
        assert make_hkl.main(arguments) == 130
    assert len(read) == len(set(read)) > 1
    read.clear()
    assert make_hkl.main(arguments) == 0
    assert output(out) == expected
    assert make_hkl.main(arguments) == 0
    assert not read


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_archives_that_changed_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.webdataset(source)
    arguments = options(out, "--source", str(source))
    assert make_hkl.main(arguments) == 0
    path = source / "imagenet1k-train-0002.tar"
    path.write_bytes(layouts.tar([("n01440764_9.jpg", b""), ("n01440764_9.cls", b"0")]))
    assert make_hkl.main(arguments) == 2
    assert "found a finished run of 40 other train pictures" in capsys.readouterr().err


def test_a_development_kit_that_changed_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kit of the archives is unpacked."""
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.official_archives(source)
    for name, content in layouts.kit(source).items():
        write(source / name, content)
    arguments = options(out, "--source", str(source))
    assert make_hkl.main(arguments) == 0
    (truth,) = source.glob("*/data/*ground_truth.txt")
    truth.write_text("".join(truth.read_text().splitlines(keepends=True)[::-1]))
    assert make_hkl.main(arguments) == 2
    assert "found a finished run of 25 other val pictures" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: b"nothing of the kind",
        lambda index: index[: len(index) // 2],
        lambda index: index.replace(b"imagenet1k-train-0000.tar", b"../../../../../etc/passwd"),
    ],
)
def test_a_damaged_index_is_made_anew(
    tmp_path: Path,
    expected: dict[str, bytes],
    damage: Callable[[bytes], bytes],
    monkeypatch,
    capsys,
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.webdataset(source)
    arguments = options(out, "--source", str(source))
    with monkeypatch.context() as patch:
        patch.setattr(batches, "write_batch", stop)
        assert make_hkl.main(arguments) == 130
    whole = (out / "index.npz").read_bytes()
    (out / "index.npz").write_bytes(damage(whole))
    assert make_hkl.main(arguments) == 0
    assert f"{out / 'index.npz'}: is damaged (" in capsys.readouterr().err
    assert output(out) == expected


@pytest.mark.parametrize("change", [{"file": 3}, {"labels": 10}, {"spans": -1}, {"spans": None}])
def test_an_index_of_impossible_numbers_is_not_used(
    tmp_path: Path, change: dict[str, int | None], caplog: pytest.LogCaptureFixture
) -> None:
    layouts.webdataset(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    found = list_pictures(Settings(source=tmp_path / "in", tar_root_dir=out))
    save_index(out, found.index, found.splits)
    with np.load(out / "index.npz") as arrays:
        columns = dict(arrays)
    for name, value in change.items():
        column = columns[f"train_{name}"]
        columns[f"train_{name}"] = column[:-1] if value is None else np.full_like(column, value)
    np.savez(out / "index.npz", **columns)  # type: ignore[arg-type]
    assert load_index(out, found.index, tmp_path / "in") is None
    assert "is damaged" in caplog.text


def test_a_stopped_copy_continues(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.parquet(source)
    arguments = options(out, "--source", str(source))
    call = parquet_source._Reader.call

    def stopping(reader: object, function: Any, path: Path, *rest: object) -> Any:
        if function is parquet_source._copy and path.name.startswith("train-00001"):
            (out / "parquet_copy" / ".train-00001.abc.partial.tar").write_bytes(b"half")
            raise KeyboardInterrupt
        return call(reader, function, path, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(parquet_source._Reader, "call", stopping)
        assert make_hkl.main(arguments) == 130
    copied = out / "parquet_copy" / "train-00000-of-00002.tar"
    before = copied.stat().st_ino
    assert make_hkl.main(arguments) == 0
    shown = capsys.readouterr().err
    assert f"{source}: 4 of 4 files are copied to {out / 'parquet_copy'} once, which needs" in shown
    assert f"{source}: 3 of 4 files are copied" in shown
    assert f"{out / 'parquet_copy'}: these copies of the pictures may be deleted now" in shown
    assert output(out) == expected
    assert copied.stat().st_ino == before
    assert len([*(out / "parquet_copy").iterdir()]) == 5
    # The finished output is recognised without the copies.
    shutil.rmtree(out / "parquet_copy")
    assert make_hkl.main(arguments) == 0
    assert "everything is there already" in capsys.readouterr().err
    assert not (out / "parquet_copy").exists()


def test_a_copy_that_was_killed_at_once_continues(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    layouts.parquet(tmp_path / "in")
    write(tmp_path / "out/parquet_copy/.copied.abc.partial.json", b"{")
    assert make_hkl.main(options(tmp_path / "out", "--source", str(tmp_path / "in"))) == 0
    assert output(tmp_path / "out") == expected


def test_a_full_disk_while_copying_is_one_message(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.parquet(source)
    arguments = options(out, "--source", str(source))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(parquet_source, "_rows", full)
        assert make_hkl.main(arguments) == 2
    path = out / "parquet_copy" / "train-00000-of-00002.tar"
    assert f"error: {path}: No space left on device\n" in capsys.readouterr().err
    assert [path.name for path in (out / "parquet_copy").iterdir()] == ["copied.json"]
    assert make_hkl.main(arguments) == 0
    assert output(out) == expected


def test_nothing_is_copied_into_the_folder_of_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts.parquet(tmp_path / "in")
    layouts.folders_by_class(tmp_path / "other")
    out = tmp_path / "out"
    assert make_hkl.main(options(out, "--source", str(tmp_path / "other"))) == 0
    before = contents(out)
    arguments = options(out, "--source", str(tmp_path / "in"))
    assert make_hkl.main(arguments) == 2
    expected = f"{out / 'manifest.json'}: found a run whose copies of pictures are not in"
    assert expected in capsys.readouterr().err
    assert contents(out) == before
    (out / "manifest.json").unlink()
    assert make_hkl.main(arguments) == 2
    assert "found a file that no run recorded" in capsys.readouterr().err
    assert not (out / "parquet_copy").exists()


def test_copies_of_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts.parquet(tmp_path / "in")
    write(tmp_path / "out/parquet_copy/copied.json", b"{}")
    arguments = options(tmp_path / "out", "--source", str(tmp_path / "in"))
    assert make_hkl.main(arguments) == 2
    assert "found copies of other files than those of" in capsys.readouterr().err
    (tmp_path / "out/parquet_copy/copied.json").rename(tmp_path / "out/parquet_copy/mine.tar")
    assert make_hkl.main(arguments) == 2
    assert "parquet_copy: found a folder that no run recorded" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_archive_that_is_gone_or_shorter_does_not_make_bad_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, workers: str
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.official_archives(source)
    path = source / "ILSVRC2012_img_train.tar"
    whole = path.read_bytes()
    list_all = prepare.list_pictures

    def cut(settings: Settings) -> Listing:
        found = list_all(settings)
        path.write_bytes(whole[:2000])
        return found

    monkeypatch.setattr(prepare, "list_pictures", cut)
    assert make_hkl.main(options(out, "--source", str(source), "--workers", workers)) == 2
    assert f"error: {path}: found " in (shown := capsys.readouterr().err)
    assert "expected a picture of" in shown
    assert "the file has changed" in shown


def test_bad_and_unprintable_pictures_in_archives_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.official_archives(source)
    train = [("n01440764_1.JPEG", b"this is not a picture"), ("a\nb.JPEG", of("train")[0].content)]
    more = [(f"n01440764_{i}.JPEG", of("train")[0].content) for i in (2, 3)]
    classes = [(f"{wnid}.tar", layouts.tar(more)) for wnid in layouts.CLASSES[1:]]
    inner = ("n01440764.tar", layouts.tar([*train, *more]))
    write(source / "ILSVRC2012_img_train.tar", layouts.tar([inner, *classes]))
    assert make_hkl.main(options(out, "--source", str(source))) == 0
    lines = (out / "misc" / "skipped.txt").read_text().splitlines()
    assert {line.partition("\t")[0] for line in lines} == {
        "train/n01440764/n01440764_1.JPEG",
        r"'train/n01440764/a\nb.JPEG'",
    }
    assert len(read_manifest(out).splits["train"].pictures) == 2 * len(layouts.CLASSES)


def test_hidden_files_in_archives_are_no_pictures(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """As macOS writes them, one beside each file."""
    source = tmp_path / "in"
    layouts.official_archives(source)
    hidden = (f"./._{of('val')[0].name}.JPEG", b"about it")
    for name in ("train", "val"):
        path = source / f"ILSVRC2012_img_{name}.tar"
        files = layouts.members(path.read_bytes())
        if name == "val":
            files.insert(0, hidden)
        else:
            files[0] = files[0][0], layouts.tar([hidden, *layouts.members(files[0][1])])
        write(path, layouts.tar(files))
    assert make_hkl.main(options(tmp_path / "out", "--source", str(source))) == 0
    assert output(tmp_path / "out") == expected


def test_parquet_of_large_columns_is_read(tmp_path: Path) -> None:
    """As Polars writes text and bytes."""
    import pyarrow
    import pyarrow.parquet

    layouts.parquet(tmp_path / "in")
    for path in (tmp_path / "in/data").glob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        inner = [("bytes", pyarrow.large_binary()), ("path", pyarrow.large_string())]
        kind = pyarrow.schema([("image", pyarrow.struct(inner)), ("label", pyarrow.int32())])
        pyarrow.parquet.write_table(table.cast(kind), path)
    found = list_pictures(Settings(source=tmp_path / "in", tar_root_dir=tmp_path / "out"))
    assert {k: len(v.pictures) for k, v in found.splits.items()} == {"train": 40, "val": 25}


def numbered(root: Path, classes: int) -> Settings:
    """Samples without ImageNet's names: one of each class in training, and three in validation."""
    for split, numbers in (("train", range(classes)[::-1]), ("val", (7, 0, classes - 1))):
        samples = [
            (f"{i:08d}.{suffix}", content)
            for i, number in enumerate(numbers)
            for suffix, content in (("png", b""), ("cls", b"%d\n" % number))
        ]
        write(root / f"{split}-0.tar", layouts.tar(samples))
    return Settings(source=root, tar_root_dir=root / "out")


def test_classes_of_numbers_alone_are_the_sorted_wnids(tmp_path: Path) -> None:
    found = list_pictures(numbered(tmp_path, 1000))
    assert found.wnids == layouts.WNIDS
    train, val = (found.splits[split] for split in ("train", "val"))
    expected = {f"{wnid}/{999 - i:08d}.png" for i, wnid in enumerate(layouts.WNIDS)}
    assert set(train.pictures) == expected
    assert sorted(val.labels) == [0, 7, 999]
    for listed in (train, val):
        for name, label in zip(listed.pictures, listed.labels, strict=True):
            assert name.startswith(found.wnids[label])


@pytest.mark.parametrize("classes", [200, 1001])
def test_numbers_of_other_classes_than_imagenet_s_are_refused(tmp_path: Path, classes: int) -> None:
    """Their pictures would be named as ImageNet's first classes."""
    expected = f"found classes by number alone, {classes} from 0 to {classes - 1}, expected"
    with pytest.raises(InputError, match=expected):
        list_pictures(numbered(tmp_path, classes))


def test_long_and_extended_names_are_read(tmp_path: Path) -> None:
    """As webdataset writes: each header with an extended one, of the time in fractions."""
    digits = {split: of(split) for split in ("train", "val")}
    for split, kind in (("train", tarfile.PAX_FORMAT), ("val", tarfile.GNU_FORMAT)):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
            for digit in digits[split]:
                folder = "folder-" * 40
                for name, content in layouts.sample_of(0, digit)[:2]:
                    member = tarfile.TarInfo(f"{folder}/{name}")
                    member.size, member.mtime = len(content), 1.5  # type: ignore[assignment]
                    archive.addfile(member, io.BytesIO(content))
        write(tmp_path / f"imagenet1k-{split}-0.tar", buffer.getvalue())
    found = list_pictures(Settings(source=tmp_path, tar_root_dir=tmp_path / "out"))
    for split in ("train", "val"):
        listed = found.splits[split]
        for i, name in enumerate(listed.pictures):
            (digit,) = (d for d in digits[split] if d.name in name)
            place = listed.place(i)
            content = Path(place.path).read_bytes()[place.offset :][: place.size]
            assert content == digit.content


def test_kaggles_table_may_lie_in_its_folder_as_other_programs_write_it(tmp_path: Path) -> None:
    layouts.kaggle(tmp_path)
    table = tmp_path / "LOC_val_solution.csv"
    lines = table.read_text().splitlines()
    (tmp_path / "ILSVRC" / table.name).write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    table.unlink()
    found = list_pictures(Settings(source=tmp_path, tar_root_dir=tmp_path / "out"))
    val = found.splits["val"]
    expected = [found.wnids.index(digit.wnid) for digit in of("val")]
    assert val.labels.tolist() == expected


def test_validation_pictures_among_others_keep_their_folders(tmp_path: Path) -> None:
    """As in subsets of ImageNet that divide all pictures anew."""
    layouts.class_folders(tmp_path, "train")
    layouts.class_folders(tmp_path, "val")
    moved = tmp_path / "val" / of("val")[0].wnid
    name = f"{of('val')[0].name}.JPEG"
    (moved / name).rename(tmp_path / "train" / moved.name / name)
    write(moved / f"{moved.name}_7.JPEG", of("val")[0].content)
    found = list_pictures(Settings(source=tmp_path, tar_root_dir=tmp_path / "out"))
    for split, listed in found.splits.items():
        there = {str(p.relative_to(tmp_path / split)) for p in (tmp_path / split).glob("*/*")}
        assert set(listed.pictures) == there
        assert list(listed.pictures) != sorted(listed.pictures)


@pytest.mark.parametrize("inner", ["ILSVRC", "ILSVRC/Data", "ILSVRC/Data/CLS-LOC"])
def test_any_folder_of_kaggle_may_be_named(
    tmp_path: Path, expected: dict[str, bytes], inner: str
) -> None:
    layouts.kaggle(tmp_path / "in")
    assert make_hkl.main(options(tmp_path / "out", "--source", str(tmp_path / "in" / inner))) == 0
    assert output(tmp_path / "out") == expected


def test_an_older_order_of_validation_pictures_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those in class folders were shuffled until 0.3, with the folders in their names."""
    source, out = tmp_path / "in", tmp_path / "out"
    layouts.class_folders(source, "train")
    layouts.class_folders(source, "val")
    arguments = options(out, "--source", str(source))
    assert make_hkl.main(arguments) == 0
    manifest = read_manifest(out)
    val = manifest.splits["val"]
    order = np.random.default_rng(1).permutation(len(val.pictures))
    names = tuple(f"{manifest.wnids[val.labels[i]]}/{val.pictures[i]}" for i in order)
    older = replace(val, pictures=names, labels=val.labels[order])
    splits = manifest.splits | {"val": older}
    write_manifest(out / "manifest.json", replace(manifest, splits=splits))
    (out / "misc" / "colour_covariance.npy").unlink()
    capsys.readouterr()
    assert make_hkl.main(arguments) == 0
    assert "everything is there already" in capsys.readouterr().err
    assert (out / "misc" / "colour_covariance.npy").exists()
    # Other labels are other pictures.
    others = replace(older, labels=np.roll(older.labels, 1))
    splits = manifest.splits | {"val": others}
    write_manifest(out / "manifest.json", replace(manifest, splits=splits))
    assert make_hkl.main(arguments) == 2
    assert "other val pictures" in capsys.readouterr().err
