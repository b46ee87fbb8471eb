"""Which pictures there are, of which class, in which order; and folders that cannot be used."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.philox import Purpose, permutation
from tandem.preprocessing.listed import Collector, Listed
from tandem.preprocessing.listing import Listing, list_pictures
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import SOURCES, Folder, Source
from tests.support.picture_files import WNID_OF_ID, Pictures, write_small, write_synsets


def listing_of(root: Path, **changes: object) -> Listing:
    settings = {"train_img_dir": root / "train", "val_img_dir": root / "val", "tar_root_dir": root}
    return list_pictures(Settings(**settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Pictures in class folders; only names count here."""
    return write_small(tmp_path).root


def test_classes_are_the_sorted_training_folders(root: Path) -> None:
    listing = listing_of(root)
    assert listing.wnids == ("n03", "n10", "n20")
    for split, total in (("train", 13), ("val", 6)):
        listed = listing.splits[split]
        assert listed.folder == root / split
        assert len(set(listed.pictures)) == len(listed.pictures) == total
        assert listed.labels.dtype == np.int64
        for name, label in zip(listed.pictures, listed.labels, strict=True):
            assert (root / split / name).is_file()
            assert listing.wnids[label] == name.split("/")[0]


def test_a_class_may_have_no_validation_picture(root: Path) -> None:
    shutil.rmtree(root / "val" / "n10")
    val = listing_of(root).splits["val"]
    assert sorted(zip(val.pictures, val.labels.tolist(), strict=True))[-1] == ("n20/001.JPEG", 2)


def test_both_lists_are_shuffled_once_from_sorted_order(root: Path) -> None:
    for split in ("train", "val"):
        names = [str(p.relative_to(root / split)) for p in (root / split).glob("*/*")]
        order = permutation(len(names), 1, 0, Purpose.LISTING)
        expected = tuple(sorted(names)[i] for i in order)
        assert listing_of(root).splits[split].pictures == expected
        assert listing_of(root, seed=2).splits[split].pictures != expected


def test_the_shuffle_is_the_same_for_ever() -> None:
    assert permutation(10, 1, 0, Purpose.LISTING).tolist() == [0, 8, 1, 4, 3, 9, 7, 6, 5, 2]


def test_a_subset_is_the_first_after_the_shuffle(root: Path) -> None:
    whole, part = listing_of(root), listing_of(root, subset=5)
    for split in ("train", "val"):
        assert part.splits[split].pictures == whole.splits[split].pictures[:5]
        np.testing.assert_array_equal(part.splits[split].labels, whole.splits[split].labels[:5])
    assert part.wnids == whole.wnids
    assert len(listing_of(root, subset=100).splits["train"].pictures) == 13


def test_files_that_are_no_pictures_are_ignored(root: Path, caplog) -> None:
    caplog.set_level("INFO")
    before = listing_of(root).splits["train"].pictures
    (root / "train" / "README.txt").touch()
    (root / "train" / "n03" / "Thumbs.db").touch()
    (root / "train" / "n03" / ".hidden.JPEG").touch()
    (root / "train" / ".cache").mkdir()
    assert listing_of(root).splits["train"].pictures == before
    assert f"{root / 'train'}: ignored 1 file that is no picture by its name" in caplog.messages
    (root / "train" / "notes.txt").touch()
    assert listing_of(root).splits["train"].pictures == before
    assert f"{root / 'train'}: ignored 2 files that are no pictures by name" in caplog.messages


TRUTH = [2, 1, 3, 1, 2, 2, 3, 1, 1, 3, 2]
CLASS_OF_ID = {1: 2, 2: 0, 3: 1}


@pytest.fixture
def flat(root: Path) -> Path:
    shutil.rmtree(root / "val")
    (root / "val").mkdir()
    for number in range(1, len(TRUTH) + 1):
        (root / "val" / f"ILSVRC2012_val_{number:08d}.JPEG").touch()
    (root / "truth.txt").write_text("".join(f"{number}\n" for number in TRUTH))
    write_synsets(root / "meta.mat", WNID_OF_ID)
    return root


def flat_listing(root: Path, **changes: object) -> Listing:
    given = {"val_label_file": root / "truth.txt", "meta_clsloc_mat": root / "meta.mat"}
    return listing_of(root, **given | changes)


def test_the_flat_folder_of_ilsvrc_keeps_its_order(flat: Path) -> None:
    val = flat_listing(flat).splits["val"]
    assert val.pictures[9] == "ILSVRC2012_val_00000010.JPEG"
    assert list(val.pictures) == sorted(val.pictures)
    assert val.labels.dtype == np.int64
    assert val.labels.tolist() == [CLASS_OF_ID[number] for number in TRUTH]


def test_numbers_need_no_zeros_before_them(flat: Path) -> None:
    for path in (flat / "val").iterdir():
        path.rename(path.with_name(f"v{int(path.stem[-8:])}.JPEG"))
    val = flat_listing(flat).splits["val"]
    assert val.pictures == tuple(f"v{number}.JPEG" for number in range(1, 12))
    assert val.labels.tolist() == [CLASS_OF_ID[number] for number in TRUTH]


def refused(root: Path, **changes: object) -> str:
    with pytest.raises(InputError) as caught:
        flat_listing(root, **changes)
    return str(caught.value)


def truth(text: str) -> Callable[[Path], object]:
    return lambda root: (root / "truth.txt").write_text(text)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truth of another length": (
        truth("1\n2\n3\n"),
        "{}/truth.txt (val_label_file): found 3 lines",
    ),
    "an unknown ID": (truth("9\n" * 11), "line 1: found ID 9, expected one of"),
    "a class that train lacks": (
        truth("1\n" * 10 + "4\n"),
        "found class n99, for example ILSVRC2012_val_00000011.JPEG, which {}/train lacks",
    ),
    # A picture that is missing must not shift the labels of those after it.
    "a missing picture": (
        lambda root: (root / "val" / "ILSVRC2012_val_00000004.JPEG").unlink(),
        "without number 4, expected every number from 1",
    ),
    "two pictures of one number": (
        lambda root: (root / "val" / "again_00000004.JPEG").touch(),
        "expected one picture of number 4",
    ),
    "a picture without a number": (
        lambda root: (root / "val" / "cat.JPEG").touch(),
        "found cat.JPEG, expected a name that ends in the picture's number",
    ),
    "both layouts": (
        lambda root: Pictures(root).write("val", {"n03": 1}),
        "found class folders (n03, ...) and pictures side by side",
    ),
    **{
        f"an ID that is {line!r}": (
            truth(f"1\n{line}\n" + "1\n" * 9),
            f"line 2: found {line!r}, expected an ILSVRC ID",
        )
        for line in ("n01", "", "1 2", "-1", "1.0")
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_flat_folder_that_cannot_be_used(flat: Path, fault: str) -> None:
    spoil, message = FAULTS[fault]
    spoil(flat)
    assert message.replace("{}", str(flat)) in refused(flat)


@pytest.mark.parametrize("key", ["val_label_file", "meta_clsloc_mat"])
def test_a_missing_table(flat: Path, key: str) -> None:
    assert f"{key} is needed" in refused(flat, **{key: None})
    assert f"{flat / 'nothing'} ({key}): cannot be read" in refused(flat, **{key: flat / "nothing"})


@pytest.mark.parametrize("content", [b"", b"not MATLAB's", b"MATLAB 5.0 MAT-file" + b"\0" * 109])
def test_a_table_of_something_else(flat: Path, content: bytes) -> None:
    (flat / "meta.mat").write_bytes(content)
    assert "(meta_clsloc_mat): " in refused(flat)
    import scipy.io

    scipy.io.savemat(flat / "meta.mat", {"other": np.zeros(3)})
    assert "expected a MATLAB file with the table synsets" in refused(flat)


def test_neither_layout(root: Path) -> None:
    shutil.rmtree(root / "val")
    assert f"{root / 'val'} (val_img_dir): the folder cannot be read: No such file" in refused(root)
    (root / "val").touch()
    assert "the folder cannot be read: Not a directory" in refused(root)
    (root / "val").unlink()
    (root / "val").mkdir()
    assert "found neither pictures nor class folders" in refused(root)


def test_a_class_in_val_that_train_lacks(root: Path) -> None:
    Pictures(root).write("val", {"n77": 1})
    expected = f"found class n77, for example n77/000.JPEG, which {root / 'train'} lacks"
    assert expected in refused(root)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_folder(root: Path, split: str) -> None:
    for path in (root / split / "n10").iterdir():
        path.unlink()
    assert f"{root / split / 'n10'} ({split}_img_dir): found no picture" in refused(root)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_linked_class_folder_that_is_gone(root: Path, split: str) -> None:
    """Without it, classes after it would have other numbers."""
    (root / split / "n15").symlink_to(root / "gone")
    expected = f"{root / split / 'n15'} ({split}_img_dir): the link leads nowhere"
    assert expected in refused(root)


def test_training_folders_that_cannot_be_used(root: Path) -> None:
    Pictures(root / "train").write("", {"": 0})
    (root / "train" / "loose.JPEG").touch()
    assert "found the picture loose.JPEG beside the class folders" in refused(root)
    for wnid in ("n03", "n10", "n20"):
        shutil.rmtree(root / "train" / wnid)
    assert "found pictures side by side (loose.JPEG, ...), expected one folder" in refused(root)
    (root / "train" / "loose.JPEG").unlink()
    assert "found neither pictures nor class folders, expected one folder" in refused(root)
    (root / "train").rmdir()
    assert "(train_img_dir): the folder cannot be read: No such file" in refused(root)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\u200db", "a\udcff"])
def test_a_class_whose_name_does_not_fit_a_line(root: Path, name: str) -> None:
    (root / "train" / name).mkdir()
    assert f"found the class folder {name!a}, expected printable" in refused(root)


def test_names_may_have_spaces_of_any_kind(root: Path) -> None:
    name = "at 1.00\u202fPM"  # as macOS names pictures of the screen
    (root / "train" / name).mkdir()
    (root / "train" / name / f"{name}.jfif").touch()
    assert f"{name}/{name}.jfif" in listing_of(root).splits["train"].pictures


def test_what_is_left_out_of_a_class_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "train" / "n03" / "more").mkdir()
    (root / "val" / "n10" / "a.tif").touch()
    listing_of(root)
    found = [record.getMessage() for record in caplog.records]
    for text in (f"{root / 'train'}: ignored in class folders", ": n03/more", ": n10/a.tif"):
        assert any(text in message for message in found)


def test_pictures_whose_names_are_not_printable_are_listed_and_shown_escaped(root: Path) -> None:
    (root / "train" / "n03" / "a\nb.JPEG").touch()
    listed = listing_of(root).splits["train"]
    assert "n03/a\nb.JPEG" in listed.pictures
    (root / "train" / "a\x1b[2Jb.JPEG").touch()
    assert r"found the picture 'a\x1b[2Jb.JPEG' beside" in refused(root)


def test_a_new_source_is_one_registered_class(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Drawers(Source):
        layout, expected = "drawers", "drawers/"
        source: Path
        seed: int

        @staticmethod
        def recognises(folder: Folder) -> bool:
            return folder.folders == ("drawers",)

        def find(self) -> dict[str, Listed]:
            found = {}
            for split in ("train", "val"):
                collector = Collector(self.source, split)
                collector.add_file("drawers/all")
                collector.add(f"picture-{self.seed}", "n10", (7, 70))
                found[split] = collector.listed()
            return found

    monkeypatch.setattr(SOURCES, "_choices", {**SOURCES._choices, "drawers": Drawers})
    (root / "other" / "drawers").mkdir(parents=True)
    listed = listing_of(root, source=root / "other", seed=7).splits["val"]
    assert (listed.pictures, listed.labels.tolist()) == (("picture-7",), [0])
    assert listed.place(0) == (str(root / "other" / "drawers" / "all"), 7, 70)
