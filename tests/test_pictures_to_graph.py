"""Pictures that say who they are, followed from the JPEG folder to the graph's input."""

import contextlib
from pathlib import Path

import h5py
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from PIL import Image

from tandem.artifacts.checkpoint import RunState
from tandem.backend import device_mode, device_shared
from tandem.config.schema import Config
from tandem.data.colour import colour_basis, read_covariance
from tandem.data.mean_image import read_mean
from tandem.launch.prepare import prepare_run
from tandem.memory import HostBuffer, Slot, SlotLayout
from tandem.ops import crop_mirror
from tandem.philox import Purpose, normals
from tandem.training.graphs import minibatch_inputs
from tandem.training.input_pipeline import minibatch_requests
from tandem.training.memory import make_slots
from tests.support.tiny import ROOT, run_program

SIZE, CROP, BATCH = 70, 67, 2
WNIDS = ("n01", "n05", "n07")


def write_pictures(folder: Path) -> None:
    """Five pictures of each class. Red is the class, green the number; blue is left over right.

    They are PNGs named .JPEG, as some of ImageNet's are, so that no pixel changes on the way.
    """
    for split in ("train", "val"):
        for label, wnid in enumerate(WNIDS):
            (folder / split / wnid).mkdir(parents=True)
            for number in range(5 if split == "train" else 2):
                pixels = np.empty((SIZE, SIZE, 3), np.uint8)
                pixels[..., 0], pixels[..., 1] = 40 * label + 7, 20 * number + 3
                pixels[..., 2] = np.arange(SIZE)
                name = f"{wnid}_{number}.JPEG"
                Image.fromarray(pixels).save(folder / split / wnid / name, "PNG")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder)
    options = [
        *("--train-img-dir", str(folder / "train"), "--val-img-dir", str(folder / "val")),
        *("--tar-root-dir", str(folder / "out"), "--image-size", str(SIZE)),
        *("--batch-size", "4", "--workers", "2"),
    ]
    for program in ("make_hkl.py", "make_train_val_txt.py", "make_labels.py"):
        result = run_program(f"preprocessing/{program}", options)
        assert result.returncode == 0, result.stderr
    return folder / "out"


def config_of(data: Path, epochs: int, **changes: object) -> Config:
    folders = {"data_folder": str(data), "weights_dir": str(data / "run")}
    return Config(**folders, crop_size=CROP, batch_size=BATCH, n_epochs=epochs, **changes)


@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize("device_crops", [True, False])
@pytest.mark.parametrize("shuffle", ["files", "images"])
def test_each_picture_and_its_label_reach_the_graph_once_an_epoch(
    data: Path, monkeypatch: pytest.MonkeyPatch, trainers: int, device_crops: bool, shuffle: str
) -> None:
    monkeypatch.chdir(ROOT)
    devices = ("cpu",) * trainers
    config = config_of(data, 2, devices=devices, use_data_layer=device_crops, shuffle=shuffle)
    spec = prepare_run(config)
    mean = read_mean(config.mean_path, SIZE)
    images_of = graph_input(spec.picture_size, mean, cropped=not device_crops)
    layout = SlotLayout.of_pictures(BATCH, spec.picture_size)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    builder = spec.minibatch_builder()
    arrived: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for rank in range(trainers):
        for request in minibatch_requests(spec, rank, RunState()):
            builder.fill(slot, request)
            images = images_of(slot.pictures, slot.origins, slot.mirrored)
            for i in range(int(slot.valid)):
                seen = (*decode(images[i], mean, slot, i), int(slot.labels[i]))
                arrived.setdefault((request.mode, request.epoch), []).append(seen)
    for epoch in range(2):
        for mode, count in (("train", 5), ("validation", 2)):
            expected = [(label, n, label) for label in range(3) for n in range(count)]
            assert sorted(arrived[mode, epoch]) == expected


@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize("device_crops", [True, False])
def test_colour_noise_reaches_the_graph_alike_wherever_pictures_are_cropped(
    data: Path, monkeypatch: pytest.MonkeyPatch, trainers: int, device_crops: bool
) -> None:
    """Every pixel is the picture's, minus the mean, plus the picture's own colour, by loops."""
    monkeypatch.chdir(ROOT)
    devices, shuffle = ("cpu",) * trainers, "files" if trainers == 1 else "images"
    config = config_of(
        data, 2, devices=devices, use_data_layer=device_crops, shuffle=shuffle, rand_colour=0.3
    )
    spec = prepare_run(config)
    mean = read_mean(config.mean_path, SIZE)
    slot = make_slots(spec, 0).arrays[0]
    shared = device_shared(mean)
    minibatch, images = minibatch_inputs(spec.config, shared, coloured=True)
    images_of = pytensor.function(
        [*minibatch.values()], images, mode=device_mode(), on_unused_input="ignore"
    )
    whole = stored_pictures(data)
    basis = np.array(colour_basis(read_covariance(config.covariance_path), 0.3))
    builder, seen = spec.minibatch_builder(), 0
    for rank in range(trainers):
        for request in minibatch_requests(spec, rank, RunState()):
            slot.colours[...] = np.nan
            builder.fill(slot, request)
            if request.mode == "validation":
                assert np.isnan(slot.colours).all()
                continue
            found = images_of(*(getattr(slot, name) for name in minibatch))
            for i, index in enumerate(request.indices):
                drawn = normals(1, request.epoch, np.array([index]), Purpose.COLOUR, 3)[0]
                colour = (drawn[0] * basis[0] + drawn[1] * basis[1]) + drawn[2] * basis[2]
                (row, column), step = slot.origins[i], -1 if slot.mirrored[i] else 1
                window = np.s_[row : row + CROP, column : column + CROP]
                pixels = whole[index][window].astype(np.float32)
                crop = (pixels - mean.transpose(1, 2, 0)[window])[:, ::step]
                expected = crop + colour.astype(np.float32)
                np.testing.assert_array_equal(found[i], expected.transpose(2, 0, 1))
                seen += 1
    assert seen == 2 * 15


def stored_pictures(data: Path) -> np.ndarray:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(h5py.File(p)) for p in sorted((data / "train_hkl").iterdir())]
        return np.concatenate([file["data"][...] for file in files])


def test_a_resumed_epoch_goes_on_with_the_next_minibatch(data: Path) -> None:
    spec = prepare_run(config_of(data, 3))
    whole = list(minibatch_requests(spec, 0, RunState()))
    rest = list(minibatch_requests(spec, 0, RunState(epoch=1, step_in_epoch=3)))
    per_epoch = len(whole) // 3
    for ours, theirs in zip(rest, whole[per_epoch + 3 :], strict=True):
        for name in ("mode", "epoch", "minibatch", "indices"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    slots = [request.slot for request in rest]
    assert slots == [i % 2 for i in range(len(rest))]


def graph_input(side: int, mean: np.ndarray, cropped: bool) -> pytensor.compile.executor.Function:
    """What stands at the beginning of the graph, as a function of a slot's arrays."""
    pictures = pt.tensor("pictures", dtype="uint8", shape=(BATCH, side, side, 3))
    origins = pt.tensor("origins", dtype="int64", shape=(BATCH, 2))
    mirrored = pt.tensor("mirrored", dtype="uint8", shape=(BATCH,))
    images = crop_mirror(
        pictures, mean, origins, mirrored, crop_size=CROP, cropped=cropped, dtype="float32"
    )
    return pytensor.function([pictures, origins, mirrored], images, mode=device_mode())


def decode(image: np.ndarray, mean: np.ndarray, slot: Slot, i: int) -> tuple[int, int]:
    """(class, number) that the pixels of an image tell; and its window must be where it is said."""
    row, column = slot.origins[i]
    window = mean[:, row : row + CROP, column : column + CROP]
    if slot.mirrored[i]:
        window = window[:, :, ::-1]
    red, green, blue = np.rint(image + window)
    assert (red == red[0, 0]).all()
    assert (green == green[0, 0]).all()
    columns = np.arange(column, column + CROP)
    assert (blue == (columns[::-1] if slot.mirrored[i] else columns)).all()
    return int(red[0, 0] - 7) // 40, int(green[0, 0] - 3) // 20
