"""Pictures of runs: what is drawn, and what is said when there is nothing to draw."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tandem.artifacts.checkpoint import Checkpoint, RunState, save_checkpoint
from tandem.artifacts.metrics_log import MetricsLog, TrainRecord, ValidationRecord
from tandem.artifacts.visualize import filter_grid
from tandem.errors import InputError
from tandem.layers.network import NetworkDescription
from tandem.plot import STYLES, Run, binned, draw, draw_runs, main, read_run

STEPS = 10


def record_run(folder: Path, epochs: int = 3, **changes: object) -> Path:
    """Record a run whose loss at step n is 5 / n, as a program does."""
    folder.mkdir()
    with MetricsLog(folder / "record.jsonl") as file:
        for step in range(2, STEPS * max(epochs, 1) + 1, 2):
            train = TrainRecord(
                (step - 1) // STEPS + 1, step, 5 / step, 0.5, 0.01, 100.0, 1.0, 0.25, 0.75
            )
            file.append(replace(train, **changes))
            if epochs and step % STEPS == 0:
                file.append(ValidationRecord(step // STEPS, step, 6 / step, 4 / step, 1 / step, 9))
    return folder


def read(*folders: Path) -> list[Run]:
    return [read_run(folder, folder.name) for folder in folders]


def save_filters(folder: Path, seed: int = 0) -> np.ndarray:
    """Write a checkpoint of a network whose first layer has 6 filters; give them."""
    rng = np.random.default_rng(seed)
    filters = rng.standard_normal((6, 3, 5, 5)).astype(np.float32)
    weights = {"conv1.weight": filters, "fc8.weight": np.ones((4, 2), np.float32)}
    checkpoint = Checkpoint(weights, {}, NetworkDescription(67, 2, 1.0), RunState(epoch=3))
    save_checkpoint(folder / "epoch-0003.safetensors", checkpoint)
    return filters


def drawn(*folders: Path) -> list[dict[str, tuple[list[float], list[float]]]]:
    """The points of each labelled line in each panel."""
    figure = draw(read(*folders))
    return [
        {str(line.get_label()): tuple(map(list, line.get_data())) for line in axis.lines}
        for axis in figure.axes
    ]


def test_the_lines_are_what_was_recorded(tmp_path: Path) -> None:
    loss, error, rate, speed, times = drawn(record_run(tmp_path / "a"))
    assert loss["validation"] == ([1, 2, 3], [6 / 10, 6 / 20, 6 / 30])
    places, losses = loss["training"]
    assert places == pytest.approx([step / STEPS for step in range(2, 31, 2)])
    assert losses == pytest.approx([5 / step for step in range(2, 31, 2)])
    assert error["training top-1"][1] == [50] * 15
    assert error["validation top-1"] == ([1, 2, 3], pytest.approx([40, 20, 400 / 30]))
    assert error["validation top-5"] == ([1, 2, 3], pytest.approx([10, 5, 100 / 30]))
    assert [values for _, values in rate.values()] == [[0.01] * 15]
    assert [values for _, values in speed.values()] == [[100] * 15]
    assert times == {}  # areas, not lines


def test_the_time_is_drawn_as_shares(tmp_path: Path) -> None:
    figure = draw(read(record_run(tmp_path / "a")))
    areas = figure.axes[4].collections
    tops = [max(path.vertices[:, 1].max() for path in area.get_paths()) for area in areas]
    assert tops == pytest.approx([50, 62.5, 100])


def test_steps_are_the_axis_until_an_epoch_is_validated(tmp_path: Path) -> None:
    loss, *_ = drawn(record_run(tmp_path / "a", epochs=0))
    assert loss["training"][0] == [2, 4, 6, 8, 10]
    assert loss["validation"] == ([], [])


def test_a_second_fit_begins_where_the_first_has_ended(tmp_path: Path) -> None:
    """Its epochs go on, and its steps begin anew."""
    (run,) = read(record_run(tmp_path / "run"))
    later = replace(
        run,
        train=tuple(replace(r, epoch=r.epoch + 6) for r in run.train),
        validation=tuple(replace(r, epoch=r.epoch + 6) for r in run.validation),
    )
    for each, first in ((run, 0), (later, 6)):
        line = next(x for x in draw([each]).axes[0].lines if x.get_label() == "validation")
        np.testing.assert_allclose(line.get_xdata(), first + np.array([1, 2, 3]))


def test_epochs_of_other_lengths_have_equal_widths(tmp_path: Path) -> None:
    """As after a resume with half the batch size."""
    (run,) = read(record_run(tmp_path / "run"))
    ends = zip(run.validation, (10, 30, 50), strict=True)
    run = replace(run, validation=tuple(replace(r, step=step) for r, step in ends))
    axis = draw([run]).axes[0]
    by_name = {line.get_label(): line.get_xdata() for line in axis.lines}
    np.testing.assert_allclose(by_name["validation"], [1, 2, 3])
    steps = np.arange(2, 31, 2)
    np.testing.assert_allclose(
        by_name["training"], np.where(steps > 10, steps / 20 + 0.5, steps / 10)
    )


def test_epochs_without_validation_and_losses_below_zero(tmp_path: Path) -> None:
    (run,) = read(record_run(tmp_path / "run"))
    nan = math.nan
    skipped = replace(run.validation[1], images=0, loss=nan, top1_error=nan, top5_error=nan)
    validation = (replace(run.validation[0], loss=-2.0), skipped, run.validation[2])
    axis = draw([replace(run, validation=validation)]).axes[0]
    line = next(x for x in axis.lines if x.get_label() == "validation")
    np.testing.assert_allclose(line.get_xdata(), [1, 3])
    assert axis.get_ylim()[0] <= -2


def test_runs_are_told_apart_by_colour_and_marker_and_named_once(tmp_path: Path) -> None:
    assert len({style.colour for style in STYLES}) == len({style.marker for style in STYLES}) == 7
    folders = [record_run(tmp_path / name) for name in ("first", "second")]
    figure = draw(read(*folders))
    for panel in figure.axes[:4]:
        looks = {(line.get_color(), line.get_marker()) for line in panel.lines}
        assert looks == {(style.colour, style.marker) for style in STYLES[:2]}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second"]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["training", "validation"]


def test_several_runs_have_a_bar_each_of_where_the_time_went(tmp_path: Path) -> None:
    even = {"compute_seconds": 1.0, "load_wait_seconds": 1.0, "exchange_seconds": 2.0}
    folders = [record_run(tmp_path / "a"), record_run(tmp_path / "b", **even)]
    axis = draw(read(*folders)).axes[4]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    widths = [[bar.get_width() for bar in part] for part in axis.containers]
    assert widths == [[50, 25], [12.5, 25], [37.5, 50]]
    assert [text.get_text() for text in axis.texts] == ["50", "25", "12", "25", "38", "50"]


def test_the_filters_of_the_newest_checkpoint_are_drawn(tmp_path: Path) -> None:
    folders = [record_run(tmp_path / name) for name in ("a", "b", "c")]
    filters = [save_filters(folder, seed) for seed, folder in enumerate(folders[:2])]
    *_, first, second = draw(read(*folders)).axes
    for axis, name, expected in ((first, "a", filters[0]), (second, "b", filters[1])):
        assert axis.get_title(loc="left") == f"Filters of {name}"
        np.testing.assert_array_equal(axis.images[0].get_array(), filter_grid(expected))


def test_the_axes_leave_room_for_every_run(tmp_path: Path) -> None:
    small, large = record_run(tmp_path / "small"), record_run(tmp_path / "large", loss=50.0)
    figure = draw(read(small, large))
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] >= 50


@given(
    st.lists(st.one_of(st.floats(-100, 100), st.just(math.nan)), max_size=40),
    st.integers(1, 12),
)
def test_bins_are_means_within_the_band_of_their_points(values: list[float], most: int) -> None:
    x, mean, least, largest = binned(np.arange(len(values), dtype=float), np.array(values), most)
    size = max(1, math.ceil(len(values) / most))
    bins = [values[i : i + size] for i in range(0, len(values), size)]
    assert len(x) == len(bins) <= most
    for number, members in enumerate(bins):
        there = [value for value in members if not math.isnan(value)]
        assert x[number] == pytest.approx(number * size + (len(members) - 1) / 2)
        expected = (sum(there) / len(there), min(there), max(there)) if there else (math.nan,) * 3
        found = (mean[number], least[number], largest[number])
        assert found == pytest.approx(expected, nan_ok=True, abs=1e-9)


def test_a_long_run_is_drawn_with_few_points_and_a_band(tmp_path: Path) -> None:
    figure = draw(read(record_run(tmp_path / "a", epochs=100)))
    line = figure.axes[0].lines[0]
    assert len(line.get_xdata()) < 200
    (band,) = figure.axes[0].collections
    assert band.get_paths()[0].vertices[:, 1].max() == 2.5  # 5 / 2, the largest loss


@pytest.mark.parametrize(
    "changes", [{"loss": math.nan}, {"top1_error": None}, {"learning_rate": 0.0}]
)
def test_what_is_not_a_number_leaves_a_gap(tmp_path: Path, changes: dict[str, object]) -> None:
    draw_runs(record_run(tmp_path / "a", **changes), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0
    _, error, *_ = drawn(tmp_path / "a")
    assert ("training top-1" in error) == ("top1_error" not in changes)


def test_the_picture_is_whole(tmp_path: Path) -> None:
    run = record_run(tmp_path / "a")
    draw_runs(run / "record.jsonl", tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert min(picture.size) > 800
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 20)
    assert len(colours) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "curves.png"]


@pytest.mark.slow
def test_the_program_draws_one_run_into_its_folder_and_several_beside(tmp_path: Path) -> None:
    runs = [str(record_run(tmp_path / name)) for name in ("a", "b")]
    assert main(runs[:1]) == 0
    assert (tmp_path / "a" / "curves.png").exists()
    assert main([f"{runs[0]}/record.jsonl", "--output", str(tmp_path / "b.svg")]) == 0
    assert "<svg" in (tmp_path / "b.svg").read_text()
    assert main(runs) == 0
    assert (tmp_path / "comparison.png").exists()
    assert main([*runs, "--output", str(tmp_path / "both.pdf")]) == 0
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")


def test_runs_whose_folders_have_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
    runs = [record_run(tmp_path / parent / "run") for parent in ("x", "y")]
    draw_runs([*runs, record_run(tmp_path / "other")], tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text()
    assert all(f">{name}<" in text for name in (*runs, "other"))


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "record.jsonl").touch()
    run = record_run(tmp_path / "a")
    for runs, output, message in (
        (tmp_path / "none", "curves.png", r"record\.jsonl: cannot be read"),
        (tmp_path / "empty", "curves.png", "nothing is recorded yet"),
        (run, "curves.bmp", r"one of \.png"),
        (run, "missing/curves.png", "cannot be written"),
        ([run] * 8, "curves.png", "at most 7"),
    ):
        with pytest.raises(InputError, match=message):
            draw_runs(runs, tmp_path / output)


def test_the_module_is_a_program(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tandem.plot", str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {tmp_path}")
