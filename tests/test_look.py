"""The contact sheet shows what the network gets, and the counts what there is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tandem.cli import CommandLine
from tandem.data.augment import Augmentation, colour_offsets, windows
from tandem.data.class_names import short_names
from tandem.data.colour import COVARIANCE_NAME as NAME
from tandem.data.colour import read_basis
from tandem.data.dataset import open_split
from tandem.data.manifest import Manifest, Split, read_manifest
from tandem.data.order import epoch_order
from tandem.data.reader import PictureReader
from tandem.look import (
    LookOptions,
    count_classes,
    counts_as_json,
    describe_counts,
    displayed,
    network_input,
    read_pictures,
    run_look,
)
from tandem.memory import HostBuffer, Slot, SlotLayout
from tandem.preprocessing.arrays import write_pictures
from tests.support.tiny import prepare, settings


def options(data: Path, **changes: Any) -> LookOptions:
    line = CommandLine(settings(data, data / "run", **changes), None)
    return line.read(LookOptions)


def expected_crops(data: Path, split: str, chosen: np.ndarray, epoch: int) -> list[np.ndarray]:
    """What a network gets of these pictures, picture by picture, with the mean colour added."""
    mean = np.load(data / "misc" / "img_mean.npy")
    with PictureReader(open_split(read_manifest(data), data, split, data / "labels")) as reader:
        pictures = np.empty((len(chosen), *reader.picture_shape), np.uint8)
        reader.read(chosen, pictures)
    mode: Any = {"train": "train", "val": "validation"}[split]
    origins, mirrored = windows(Augmentation(67, True, True, False, 1), 70, mode, epoch, 0, chosen)
    crops = []
    for picture, (row, column), flag in zip(pictures, origins, mirrored, strict=True):
        image = picture.astype(float) - mean.transpose(1, 2, 0) + mean.mean(axis=(1, 2))
        crop = np.clip(np.rint(image[row : row + 67, column : column + 67]), 0, 255)
        crops.append(crop[:, ::-1] if flag else crop)
    return crops


@pytest.mark.parametrize(
    "batches",
    [{}, {"devices": ["cpu"] * 2}, {"batch_size": 4, "sum_rows": 2}, {"global_batch": 6}],
)
def test_pictures_are_those_of_the_first_minibatches(data: Path, batches: dict[str, Any]) -> None:
    changes = {"devices": ["cpu"], "epoch": 3, "count": 7, **batches}
    found = read_pictures(options(data, **changes), read_manifest(data))
    order = epoch_order((5, 5, 3), "files", 1, 2)[:7]
    assert found.indices == order.tolist()
    assert found.labels == read_manifest(data).splits["train"].labels[order].tolist()
    expected = expected_crops(data, "train", order, 2)
    # Halves may be rounded otherwise in float32.
    assert np.abs(found.crops - np.stack(expected)).max() <= 1


def test_names_of_classes_are_whole() -> None:
    names = ["n01440764", "apple, red", "apple, green"]
    assert short_names(names) == ["tench", *names[1:]]


def test_validation_has_centre_crops_and_no_more_pictures_than_there_are(data: Path) -> None:
    found = read_pictures(options(data, split="validation"), read_manifest(data))
    assert found.indices == [*range(7)]
    expected = expected_crops(data, "val", np.arange(7), 0)
    assert np.abs(found.crops - np.stack(expected)).max() <= 1


def test_colour_noise_is_shown(data: Path) -> None:
    """Strong enough to be seen above rounding; pixels that it takes beyond 0 or 255 are cut."""
    manifest, changes = read_manifest(data), {"epoch": 2, "count": 4}
    plain = read_pictures(options(data, **changes), manifest)
    found = read_pictures(options(data, **changes, rand_colour=0.1), manifest)
    settings = Augmentation(67, True, True, False, 1, read_basis(data / "misc" / NAME, 0.1))
    offsets = colour_offsets(settings, 1, np.array(plain.indices))
    assert np.abs(offsets).max() > 2
    expected = np.clip(plain.crops + offsets[:, None, None], 0, 255)
    inside = (plain.crops > 0) & (plain.crops < 255)
    assert np.abs(found.crops - expected)[inside].max() <= 1.01
    validation = options(data, split="validation", rand_colour=0.1)
    same = read_pictures(validation, manifest).crops
    assert (same == read_pictures(options(data, split="validation"), manifest).crops).all()


def test_rows_beyond_the_minibatch_are_not_shown() -> None:
    layout = SlotLayout.of_pictures(3, 4)
    slot = Slot.on(HostBuffer.create(layout.nbytes, "test"), layout)
    slot.valid[...] = 2
    mean = np.full((3, 5, 5), 9, np.float32)
    images = network_input(slot, mean)
    assert images.shape == (2, 4, 4, 3)
    assert (images == -9).all()
    assert (displayed(images, mean) == 0).all()


def counted(labels: list[int], validation: list[int], classes: int) -> Manifest:
    def split(found: list[int]) -> Split:
        names = tuple(f"{n}.JPEG" for n in range(len(found)))
        files = tuple(f"{n}.hkl" for n in range(len(found)))
        return Split(files, names, np.array(found))

    wnids = ("n01440764", *(f"n{number:08}" for number in range(90_000_000, 90_000_000 + classes)))
    splits = {"train": split(labels), "val": split(validation)}
    return Manifest(8, "b01c", 1, wnids[:classes], 1, {}, splits)


def test_all_of_a_few_classes_are_listed() -> None:
    counts = count_classes(counted([0] * 1200 + [2], [0, 0, 1], 3))
    assert describe_counts(counts).splitlines() == [
        "class  folder     name       training  validation",
        "    0  n01440764  tench         1,200           2",
        "    1  n90000000  n90000000         0           1",
        "    2  n90000001  n90000001         1           0",
        "  all             3 classes     1,201           3",
        "classes without training pictures (1): n90000000",
        "classes without validation pictures (1): n90000001",
    ]


def test_of_many_classes_the_smallest_and_the_largest_are_listed() -> None:
    labels = [number for number in range(1, 20) for _ in range(number)]
    lines = describe_counts(count_classes(counted(labels, [0], 20))).splitlines()
    first = [line.split()[0] for line in lines[:13]]
    assert first == ["class", *"01234", "...", "15", "16", "17", "18", "19", "all"]
    assert lines[13] == "classes without training pictures (1): tench"
    assert lines[14].startswith("classes without validation pictures (19): n90000000, ")
    everything = json.loads(counts_as_json(count_classes(counted(labels, [0], 20))))
    assert (everything["training"], everything["validation"]) == (190, 1)
    assert [line["training"] for line in everything["classes"]] == [*range(20)]
    assert everything["classes"][0]["name"] == "tench"


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (12, [*map(str, range(12))]),
        (13, ["12", "11", "10", "9", "8", "...", "4", "3", "2", "1", "0"]),
    ],
)
def test_more_than_twelve_classes_are_in_the_order_of_their_sizes(
    classes: int, expected: list[str]
) -> None:
    labels = [number for number in range(classes) for _ in range(1212 // (number + 1))]
    lines = describe_counts(count_classes(counted(labels, labels, classes))).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == expected
    (largest,) = (line.split() for line in lines if " tench " in line)
    assert largest[-2:] == ["1,212", "1,212"]


def test_the_program_writes_a_sheet_and_prints_counts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "sheet.png"
    arguments = settings(data, tmp_path / "run", count=10, output=output)
    assert run_look(arguments, None) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("class  folder")
    assert shown.err == f"wrote 10 pictures of train to {output}\n"
    with Image.open(output) as sheet:
        assert sheet.size == (8 * 188 - 4, 2 * (184 + 30 + 4 + 4) - 4)
    assert run_look([*arguments, "--json"], None) == 0
    assert json.loads(capsys.readouterr().out)["training"] == 13
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_shown_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(**changes: object) -> str:
        assert run_look(settings(data, tmp_path / "run", **changes), None) == 2
        return capsys.readouterr().err

    data = prepare(tmp_path / "data", train=5, validation=2)
    for changes, expected in (
        ({"output": "a.jpg"}, "--output: found a.jpg, expected a file whose name ends .png"),
        ({"output": tmp_path / "none" / "a.png"}, "cannot be written: No such file"),
        ({"count": 0}, "--count is 0; it must be a whole number from 1 to 1024"),
        ({"split": "val"}, '--split is "val"; it must be train or validation'),
        ({"crop_size": 71}, "crop_size is 71, but the pictures of"),
        ({"data_folder": tmp_path}, "there is no manifest"),
    ):
        assert expected in refusal(**changes)
    (data / "train_hkl" / "0000.hkl").unlink()
    assert "0000.hkl" in refusal()
    pair = np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, np.int64)
    write_pictures(tmp_path / "without", pair, None)
    message = refusal(data_folder=tmp_path / "without", split="validation", crop_size=8)
    assert "--split: found no validation pictures" in message
    changes = {"split": "validation", "output": tmp_path / "a.png"}
    assert run_look(settings(data, tmp_path / "run", **changes), None) == 0
