"""Event files, read back by TensorBoard's own reader."""

import io
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tandem.artifacts import tensorboard
from tandem.artifacts.checkpoint import Checkpoint, RunState
from tandem.artifacts.metrics_log import NotFiniteRecord, TrainRecord, ValidationRecord
from tandem.artifacts.tensorboard import EventLog
from tandem.artifacts.visualize import filter_grid
from tandem.layers.network import NetworkDescription
from tests.support.disks import mounted
from tests.support.lazily import Lazily

event_accumulator = Lazily("tensorboard.backend.event_processing.event_accumulator")
tensor_util = Lazily("tensorboard.util.tensor_util")

TRAIN = TrainRecord(1, 20, 2.5, 0.75, 0.01, 130.5, 18.0, 0.5, 1.5)
VALIDATION = ValidationRecord(1, 40, 2.25, 0.5, 0.125, 360)


def checkpoint(step: int, **weights: np.ndarray) -> Checkpoint:
    momentum = {name: (value / 100).astype(value.dtype) for name, value in weights.items()}
    network = NetworkDescription(67, 3, 1.0)
    return Checkpoint(weights, {"momentum": momentum}, network, RunState(step=step))


def read(folder: Path) -> Any:
    everything = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    found = event_accumulator.EventAccumulator(str(folder), size_guidance=everything)
    found.Reload()
    return found


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def write(folder: Path, step: int, *records: Any) -> EventLog:
    log = EventLog(folder, step)
    for record in records:
        log.add_checkpoint(record) if isinstance(record, Checkpoint) else log.add(record)
    log.close()
    return log


def test_what_is_recorded_becomes_curves(tmp_path: Path) -> None:
    odd = replace(TRAIN, step=60, top1_error=None, loss=math.nan, compute_seconds=0.0)
    write(tmp_path, 0, TRAIN, VALIDATION, NotFiniteRecord(1, 41, 1, "skip", ("a",)), odd)
    found = {tag: curve(tmp_path, tag) for tag in read(tmp_path).Tags()["scalars"]}
    expected = {
        "loss/training": [(20, 2.5), (60, math.nan)],
        "error/training_top1": [(20, 0.75)],
        "run/learning_rate": [(20, 0.01), (60, 0.01)],
        "run/images_per_second": [(20, 130.5), (60, 130.5)],
        "time/compute": [(20, 0.9), (60, 0)],
        "time/wait_for_loader": [(20, 0.025), (60, 0.25)],
        "time/exchange": [(20, 0.075), (60, 0.75)],
        "loss/validation": [(40, 2.25)],
        "error/validation_top1": [(40, 0.5)],
        "error/validation_top5": [(40, 0.125)],
    }
    assert found.keys() == expected.keys()
    for tag, points in expected.items():
        np.testing.assert_allclose(found[tag], points, rtol=1e-6, err_msg=tag)


def test_chosen_metrics_become_curves() -> None:
    train = replace(TRAIN, metrics={"f1": 0.5})
    validation = replace(VALIDATION, metrics={"f1": 0.25})
    assert ("metrics/training_f1", 0.5) in list(tensorboard.of_record(train))
    assert ("metrics/validation_f1", 0.25) in list(tensorboard.of_record(validation))


def test_a_checkpoint_shows_weights_updates_and_filters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    filters = rng.standard_normal((6, 3, 5, 5)).astype(np.float32)
    large = rng.normal(0.5, 2.0, (700, 512))
    made = checkpoint(7, **{"conv1.weight": filters, "fc.weight": large, "fc.bias": np.ones(4)})
    made.states["momentum"]["fc.weight"][...] = 3.0
    write(tmp_path, 0, made)
    found = read(tmp_path)
    ratio = 3.0 * math.sqrt(large.size) / math.sqrt((large**2).sum())
    assert found.Scalars("update_ratio/conv1.weight")[0].value == pytest.approx(0.01, rel=1e-4)
    assert found.Scalars("update_ratio/fc.weight")[0].value == pytest.approx(ratio, rel=1e-6)
    assert "update_ratio/fc.bias" not in found.Tags()["scalars"]
    histogram = found.Histograms("weights/conv1.weight")[0]
    counts, _ = np.histogram(filters.astype(float), 64)
    assert histogram.step == 7
    np.testing.assert_array_equal(histogram.histogram_value.bucket, counts)
    assert histogram.histogram_value.min == filters.min()
    # Of a large one a part is counted, which is like the whole.
    part = found.Histograms("weights/fc.weight")[0].histogram_value
    assert 100_000 < part.num < large.size
    assert part.sum / part.num == pytest.approx(0.5, abs=0.05)
    assert math.sqrt(part.sum_squares / part.num - 0.25) == pytest.approx(2.0, rel=0.02)
    encoded = found.Images("filters")[0].encoded_image_string
    with Image.open(io.BytesIO(encoded)) as picture:
        np.testing.assert_array_equal(picture, filter_grid(filters, 4, 4))


def test_updates_are_those_of_sgd(tmp_path: Path) -> None:
    """What other optimizers call momentum is a mean of gradients, or is subtracted."""
    write(tmp_path, 0, replace(checkpoint(1, a=np.ones((2, 2))), config={"optimizer": "lion"}))
    tags = read(tmp_path).Tags()
    assert tags["histograms"] == ["weights/a"]
    assert tags["scalars"] == []


def test_weights_that_are_not_finite_have_no_histogram(tmp_path: Path) -> None:
    broken = checkpoint(1, a=np.array([1.0, np.inf]), b=np.ones((2, 2)), c=np.zeros((2, 2)))
    write(tmp_path, 0, broken)
    tags = read(tmp_path).Tags()
    assert tags["histograms"] == ["weights/b", "updates/b", "weights/c", "updates/c"]
    assert tags["scalars"] == ["update_ratio/b"]


def test_a_resumed_run_continues_its_curves_without_doubling(tmp_path: Path) -> None:
    losses = [replace(TRAIN, step=step, loss=float(step)) for step in range(1, 21)]
    errors = [replace(VALIDATION, step=step) for step in (5, 10, 15, 20)]
    write(tmp_path, 0, *losses, *errors)
    # What a killed process leaves: half an event.
    first = tmp_path / "events.out.tfevents.00001"
    first.write_bytes(first.read_bytes()[:-5])
    write(tmp_path, 12, *(replace(record, loss=-record.loss) for record in losses[12:]))
    assert curve(tmp_path, "loss/training") == [
        (step, step if step <= 12 else -step) for step in range(1, 21)
    ]
    assert [step for step, _ in curve(tmp_path, "loss/validation")] == [5, 10]
    # Begun once more at the very beginning.
    write(tmp_path, 0, losses[0])
    assert curve(tmp_path, "loss/training") == [(1, 1.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"events.out.tfevents.0000{number}" for number in (1, 2, 3)
    ]


def test_it_is_there_while_the_run_goes_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.add(TRAIN)
    seen = threading.Event()
    log.add_picture("x", 1, lambda: seen.set() or Image.new("RGB", (2, 2)))  # type: ignore[func-returns-value]
    assert seen.wait(30)
    assert curve(tmp_path, "loss/training") == [(20, 2.5)]
    log.close()


def test_nobody_waits_for_a_picture_that_takes_long(tmp_path: Path) -> None:
    log, go_on = EventLog(tmp_path, 0), threading.Event()

    def draw() -> Image.Image:
        assert go_on.wait(30)
        return Image.new("RGB", (4, 3), "red")

    log.add_picture("slow", 5, draw)
    weights = np.ones((2, 2))
    for step in (6, 7, 8):  # of which the later ones are left out
        log.add_checkpoint(checkpoint(step, w=weights * step))
    go_on.set()
    log.close()
    found = read(tmp_path)
    assert [event.step for event in found.Histograms("weights/w")] == [6]
    (picture,) = found.Images("slow")
    assert (picture.step, picture.width, picture.height) == (5, 4, 3)


def test_a_fault_is_told_once_and_ends_nothing_else(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.add(TRAIN)
    log.add_picture("x", 1, lambda: 1 / 0)  # type: ignore[return-value, arg-type]
    log.add(VALIDATION)
    log.close()
    expected = "nothing more is written for TensorBoard: ZeroDivisionError: division by zero"
    assert [log.take_trouble(), log.take_trouble()] == [expected, None]
    assert curve(tmp_path, "loss/training") == [(20, 2.5)]
    assert "loss/validation" not in read(tmp_path).Tags()["scalars"]
    gone = write(tmp_path / "missing", 0, TRAIN)
    assert "No such file or directory" in str(gone.take_trouble())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "64k") as folder:
        yield folder


def test_a_full_disk_is_told_once_and_what_was_written_can_be_read(small_disk: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3)).astype(np.uint8)
    log = EventLog(small_disk, 0)
    log.add(TRAIN)
    log.add_picture("large", 21, lambda: Image.fromarray(noise).resize((600, 600)))
    log.add(VALIDATION)
    log.close()
    assert "No space left on device" in str(log.take_trouble())
    assert log.take_trouble() is None
    assert curve(small_disk, "loss/training") == [(20, 2.5)]


def test_the_numbers_of_a_histogram_are_what_tensorboard_shows() -> None:
    from tensorboard.data_compat import migrate_value

    values = np.random.default_rng(1).standard_normal(5000)
    value = tensorboard._to_summary("x", values)
    buckets = tensor_util.make_ndarray(migrate_value(value).tensor)
    counts, edges = np.histogram(values, 64)
    np.testing.assert_allclose(buckets[:, 2], counts)
    np.testing.assert_allclose(buckets[:, 0], edges[:-1], atol=1e-6)
    np.testing.assert_allclose(buckets[:, 1], edges[1:], atol=1e-6)


def test_averages_have_histograms_and_no_updates(tmp_path: Path) -> None:
    """They have no step whose size would say something."""
    trained = checkpoint(3, w=np.arange(1, 9, dtype=np.float32).reshape(2, 4))
    mean = np.arange(4, dtype=np.float32)
    write(
        tmp_path,
        0,
        replace(trained, weights={**trained.weights, "bn.mean": mean}, untrained=("bn.mean",)),
    )
    tags = read(tmp_path).Tags()
    assert tags["histograms"] == ["weights/w", "updates/w", "averages/bn.mean"]
    assert tags["scalars"] == ["update_ratio/w"]
