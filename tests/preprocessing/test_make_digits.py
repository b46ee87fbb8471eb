"""The digits: real pictures, in ImageNet's layout, written whole or not at all."""

import sys
from pathlib import Path

import make_digits
import numpy as np
import pytest
from PIL import Image

from tandem import demo
from tests.support.lazily import Lazily
from tests.support.picture_files import contents

datasets = Lazily("sklearn.datasets")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "deep" / "pictures"
    assert make_digits.main(["--out", str(folder), "--size", "64"]) == 0
    return folder


def test_every_digit_is_there_once(folder: Path) -> None:
    paths = {split: sorted((folder / split).glob("*/*.JPEG")) for split in ("train", "val")}
    assert {split: len(found) for split, found in paths.items()} == {"train": 1437, "val": 360}
    numbers = sorted(int(path.stem) for found in paths.values() for path in found)
    assert numbers == list(range(1797))
    target = datasets.load_digits().target
    for found in paths.values():
        assert {path.parent.name for path in found} == {f"digit_{d}" for d in range(10)}
        for path in found:
            assert path.parent.name == f"digit_{target[int(path.stem)]}"


def test_a_picture_shows_its_digit(folder: Path) -> None:
    """Averaged back to 8 x 8, it is nearer to its own digit than to any other of the 1,797."""
    digits = datasets.load_digits().images * (255 / 16)
    for number in (0, 1, 500, 1796):
        (path,) = folder.glob(f"*/*/{number:04d}.JPEG")
        with Image.open(path) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "L", (64, 64))
            blocks = np.asarray(image, float).reshape(8, 8, 8, 8).mean((1, 3))
        distances = np.abs(blocks - digits).mean((1, 2))
        assert np.argmin(distances) == number
        assert distances[number] < 16


def test_the_folder_has_the_permissions_of_any_other(folder: Path) -> None:
    assert folder.stat().st_mode == folder.parent.stat().st_mode


def test_a_second_run_leaves_them_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(demo, "_write_pictures", None)
    assert make_digits.main(["--out", str(folder), "--size", "64"]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_another_folder_is_not_overwritten(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "precious").touch()
    assert make_digits.main(["--out", str(tmp_path)]) == 2
    assert f"error: {tmp_path}: found other files" in capsys.readouterr().err
    assert contents(tmp_path) == {"precious": b""}
    assert make_digits.main(["--out", str(folder), "--size", "72"]) == 2
    assert "'size': 64" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(folder: Path, size: int) -> None:
        (folder / "train").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_write_pictures", write_some)
    assert make_digits.main(["--out", str(tmp_path / "digits")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert make_digits.main(["--out", str(tmp_path / "digits"), "--size", "3"]) == 2
    assert "--size is 3; it must be a whole number from 8 to 4096" in capsys.readouterr().err


def test_without_scikit_learn_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.chdir(tmp_path)
    assert demo.run_demo([], None) == 2
    assert "expected scikit-learn, which has the pictures: pip install" in capsys.readouterr().err
    assert not any((tmp_path / "data" / "demo").iterdir())
