"""What mattered to a classification, against a loop; and its drawing."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import classify
from tandem.classify import Classifier
from tandem.classify.explanation import importance
from tests.classify.test_classifier import CROP, SIZE, mean, noise, weights
from tests.classify.test_cli import folder

__all__ = ["folder", "mean", "weights"]  # fixtures


@pytest.mark.parametrize("ten_crops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_patches_are_covered_one_by_one(weights: Path, mean: Path, ten_crops: bool) -> None:
    classifier = Classifier.load(weights, mean, ten_crops)
    (picture,) = noise(1)
    lost = importance(classifier, picture, 1, at_once=50)
    assert lost.shape == (8, 8)
    cover = np.rint(np.load(mean)).astype(np.uint8).transpose(1, 2, 0)
    start, side = (0, SIZE) if ten_crops else ((SIZE - CROP) // 2, CROP)
    whole = classifier.probabilities(picture[np.newaxis])[0, 1]
    for row, column in ((0, 0), (3, 5), (7, 7)):
        covered = picture.copy()
        (top, bottom), (left, right) = (
            [start + round(side * (place + end) / 8) for end in (0, 1)] for place in (row, column)
        )
        covered[top:bottom, left:right] = cover[top:bottom, left:right]
        expected = whole - classifier.probabilities(covered[np.newaxis])[0, 1]
        assert lost[row, column] == pytest.approx(expected, abs=1e-6)
    assert np.abs(lost).max() > 0


def test_each_picture_has_a_drawing(folder: Path, tmp_path: Path, capsys) -> None:
    show = ["--show", str(tmp_path / "new" / "drawings")]
    common = ["--weights", str(folder / "w.safetensors"), "--mean", str(folder / "mean.npy")]
    picture = str(folder / "pictures" / "b.png")
    second = tmp_path / "b-2.png"
    second.write_bytes(Path(picture).read_bytes())
    pictures = [picture, picture, str(second), str(folder / "loose")]
    assert classify.main([*common, *show, *pictures]) == 0
    names = ["b-2-2.png", "b-2.png", "b.png", "loose.png"]
    assert sorted(path.name for path in (tmp_path / "new" / "drawings").iterdir()) == names
    for name in names:
        with Image.open(tmp_path / "new" / "drawings" / name) as image:
            assert image.size > (1000, 300)
            assert len(np.unique(np.asarray(image))) > 100
    assert capsys.readouterr().err.count("wrote ") == 4
