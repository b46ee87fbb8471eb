"""`tandem datasets`: what it writes is what it read, and a network is trained on it."""

import logging
from pathlib import Path

import numpy as np
import pytest

from tandem import datasets
from tandem.__main__ import main
from tandem.config.schema import make_config
from tandem.data.dataset import open_split
from tandem.data.manifest import Manifest, read_any_manifest
from tandem.data.reader import PictureReader
from tandem.launch.prepare import prepare_run
from tests.support.data_set_files import random_pictures, write_cifar, write_mnist


def written(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows and labels of a split of a prepared folder."""
    found = open_split(
        read_any_manifest(folder / "manifest.json"), folder, split, folder / "labels"
    )
    rows = np.empty((found.size, *found.row.shape), found.row.dtype)
    with PictureReader(found, threads=1) as reader:
        reader.read(np.arange(found.size), rows)
        return rows, reader.labels(np.arange(found.size))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["datasets", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("pad", [0, 4])
def test_pictures_are_prepared_for_training(tmp_path: Path, pad: int) -> None:
    data = random_pictures(20, 4, (32, 32, 3))
    write_cifar(tmp_path / "source", "cifar10", data)
    out = tmp_path / "out"
    options = ["--source", str(tmp_path / "source"), "--out", str(out)]
    assert main(["datasets", "cifar10", *options, *(["--pad", str(pad)] if pad else [])]) == 0
    manifest = read_any_manifest(out / "manifest.json")
    assert isinstance(manifest, Manifest)
    assert manifest.wnids == datasets.class_names("cifar10")
    assert (manifest.image_size, manifest.pad) == (32 + 2 * pad, pad)
    colour = np.rint(data[0][0].mean(axis=(0, 1, 2)))
    for (x, y), split in zip(data, ("train", "val"), strict=True):
        rows, labels = written(out, split)
        np.testing.assert_array_equal(rows[:, pad : pad + 32, pad : pad + 32], x)
        np.testing.assert_array_equal(labels, y)
        assert pad == 0 or (rows[:, 0] == colour).all()
    settings = {"data_folder": str(out), "weights_dir": str(tmp_path / "run"), "crop_size": 32}
    network = {"network": "examples.le_net:LeNet", "batch_size": 4, "shuffle": "images"}
    config = make_config({**settings, **network})
    assert prepare_run(config).train.size == 20


def test_grey_pictures_get_three_colours(tmp_path: Path) -> None:
    data = random_pictures(5, 2, (28, 28))
    (tmp_path / "idx").mkdir()
    write_mnist(tmp_path / "idx", data, packed=True)
    arguments = ["--source", str(tmp_path / "idx"), "--out", str(tmp_path / "out")]
    assert main(["datasets", "fashion_mnist", *arguments]) == 0
    rows, labels = written(tmp_path / "out", "train")
    np.testing.assert_array_equal(rows, np.repeat(data[0][0][..., np.newaxis], 3, axis=3))
    np.testing.assert_array_equal(labels, data[0][1])
    assert read_any_manifest(tmp_path / "out" / "manifest.json").wnids[9] == "Ankle boot"


def test_other_arrays_are_written_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 3, 2)), rng.normal(size=(10, 4))
    np.savez(tmp_path / "a.npz", x=x, y=y)
    arguments = ["--source", str(tmp_path / "a.npz"), "--out", str(tmp_path / "out")]
    assert main(["datasets", "arrays", *arguments, "--validation_split", ".3"]) == 0
    for split, part in (("train", slice(7)), ("val", slice(7, None))):
        rows, targets = written(tmp_path / "out", split)
        np.testing.assert_array_equal(rows, x[part].astype(np.float32))
        np.testing.assert_array_equal(targets, y[part].astype(np.float32))


def test_synthetic_pictures_are_those_of_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--train", "6", "--test", "2", "--size", "8", "--classes", "3", "--seed", "5"]
    with caplog.at_level(logging.INFO):
        assert main(["datasets", "synthetic", "--out", str(tmp_path / "out"), *options]) == 0
    (x, y), _ = datasets.load("synthetic", train=6, test=2, size=8, classes=3, seed=5)
    rows, labels = written(tmp_path / "out", "train")
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_array_equal(labels, y)
    assert read_any_manifest(tmp_path / "out" / "manifest.json").wnids == ("0", "1", "2")


def test_bad_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3)), y=np.zeros(4, int))
    arrays = ("arrays", "--source", tmp_path / "a.npz", "--out", tmp_path / "out")
    expected = {
        ("cifar", "--out", "x"): "did you mean cifar10?",
        ("cifar10",): "--out is missing; it must be a folder",
        ("mnist", "--out", "x", "--train", 5): "found the option --train, which synthetic has",
        ("arrays", "--out", "x"): "found no source, expected an .npz file: --source FILE.npz",
        ("synthetic", "--out", "x", "--source", "y"): "found the source y, expected none",
        ("mnist", "--out", "x", "--source", tmp_path / "no"): "no: found nothing of that name",
        (*arrays, "--pad", 2): "--pad: found 2 with arrays (4, 3) in float64, expected 0",
        (*arrays, "--validation_split", 0.9): "found 0.9 of 4 rows, expected at least one row",
        ("mnist", "--out", "x", "--validation_split", 0.1): "with mnist, which has validation",
    }
    for arguments, message in expected.items():
        found = refusal(capsys, *arguments)
        assert message in found
        assert found.count("\n") == 1
    assert main(["datasets", *map(str, arrays)]) == 0
    assert "found manifest.json of a data set already" in refusal(capsys, *arrays)
