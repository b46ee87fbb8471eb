"""validate.py --ten_crops against the classifier's probabilities, however it is run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.classify import Classifier
from tandem.data.dataset import open_split
from tandem.data.manifest import read_manifest
from tandem.data.reader import PictureReader
from tests.support.ranks import need_ranks, run_ranks
from tests.support.tiny import prepare, run_program, save_weights, settings

slow = pytest.mark.slow
CLASSES = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that are large enough for crops to differ."""
    folder = tmp_path_factory.mktemp("data")
    return prepare(folder, train=3, validation=23, classes=CLASSES, image_size=78)


@pytest.fixture(scope="module")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    return save_weights(path, read_manifest(data).wnids)


@pytest.fixture(scope="module")
def expected(data: Path, weights: Path) -> dict[str, float]:
    """Loss and errors by the classifier's averages, by loops."""
    split = open_split(read_manifest(data), data, "val", data / "labels")
    pictures = np.empty((split.size, 78, 78, 3), np.uint8)
    with PictureReader(split) as reader:
        reader.read(np.arange(split.size), pictures)
        labels = reader.labels(np.arange(split.size))
    classifier = Classifier.load(weights, data / "misc" / "img_mean.npy", ten_crops=True)
    rows = classifier.probabilities(pictures)
    ranks = [(row > row[label]).sum() for row, label in zip(rows, labels, strict=True)]
    return {
        "loss": np.mean([-np.log(row[label]) for row, label in zip(rows, labels, strict=True)]),
        "top1_error": np.mean([rank >= 1 for rank in ranks]),
        "top5_error": np.mean([rank >= 5 for rank in ranks]),
        "images": 23,
        "crops": 10,
    }


def check(output: str, expected: dict[str, float]) -> None:
    found = json.loads(output)
    assert list(found)[-1] == "crops"
    assert type(found["crops"]) is int
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert {key: found[key] for key in expected if key != "loss"} == pytest.approx(
        {key: value for key, value in expected.items() if key != "loss"}
    )


@slow
@pytest.mark.parametrize(
    "changes",
    [
        # The last minibatch has three pictures: the second trainer has none.
        pytest.param(
            {
                "devices": ["cpu", "cpu"],
                "batch_size": 5,
                "use_data_layer": True,
                "para_load": False,
            },
            marks=slow,
        ),
        {"batch_size": 7, "rand_mirror": False},
        pytest.param({"batch_size": 64, "precision": "float64"}, marks=slow),
        pytest.param({"batch_size": 5, "layout": "c01b"}, marks=slow),
        pytest.param({"batch_size": 5, "compile": True}, marks=slow),
    ],
)
def test_every_picture_counts_once_by_the_average_of_its_crops(
    data: Path,
    weights: Path,
    expected: dict[str, float],
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    if layout := changes.pop("layout", None):
        data = prepare(tmp_path, 3, 23, CLASSES, image_size=78, layout=layout)
    arguments = ["--weights", str(weights), "--ten_crops", *settings(data, tmp_path, **changes)]
    result = run_program("validate.py", arguments)
    assert result.returncode == 0, result.stderr
    assert "averaged over 10 crops of each" in result.stderr
    assert ("five of the ten crops are mirrored" in result.stderr) == ("rand_mirror" in changes)
    check(result.stdout, expected)


@slow
def test_ranks_share_the_pictures(
    data: Path, weights: Path, expected: dict[str, float], tmp_path: Path
) -> None:
    need_ranks()
    arguments = settings(data, tmp_path, batch_size=5, devices=["cpu", "cpu"])
    result = run_ranks(2, "validate.py", ["--weights", str(weights), "--ten_crops", *arguments])
    assert result.returncode == 0, result.stderr
    check(result.stdout, expected)


@slow
def test_one_crop_says_nothing_of_crops(data: Path, weights: Path, tmp_path: Path) -> None:
    result = run_program("validate.py", ["--weights", str(weights), *settings(data, tmp_path)])
    assert result.returncode == 0, result.stderr
    assert "crops" not in json.loads(result.stdout)
