"""Learning curves: what is drawn, and what is said when there is nothing to draw."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tandem.errors import InputError
from tandem.plot import _draw, _read_curve, draw_curves, main
from tandem.run.record import RecordFile, TrainRecord, ValidationRecord

STEPS = 10


def record_run(folder: Path, epochs: int = 3, **changes: object) -> Path:
    """Record a run whose loss at step n is 5 / n, as a program does."""
    folder.mkdir()
    with RecordFile(folder / "record.jsonl") as file:
        for step in range(2, STEPS * max(epochs, 1) + 1, 2):
            train = TrainRecord(
                (step - 1) // STEPS + 1, step, 5 / step, 0.5, 0.01, 100.0, 1.0, 0.25, 0.75
            )
            file.append(replace(train, **changes))
            if epochs and step % STEPS == 0:
                file.append(ValidationRecord(step // STEPS, step, 6 / step, 4 / step, 1 / step, 9))
    return folder


def drawn(*folders: Path) -> list[dict[str, tuple[list[float], list[float]]]]:
    """The points of each labelled line in each of the four panels."""
    figure = _draw([_read_curve(folder) for folder in folders])
    return [
        {
            str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
            for line in a.lines
        }
        for a in figure.axes
    ]


def test_the_lines_are_what_was_recorded(tmp_path: Path) -> None:
    loss, error, rate, times = drawn(record_run(tmp_path / "a"))
    assert loss["validation"] == ([1, 2, 3], [6 / 10, 6 / 20, 6 / 30])
    places, losses = loss["training"]
    assert places == pytest.approx([step / STEPS for step in range(2, 31, 2)])
    assert losses == pytest.approx([5 / step for step in range(2, 31, 2)])
    assert error["training top-1"][1] == [50] * 15
    assert error["validation top-1"] == ([1, 2, 3], pytest.approx([40, 20, 400 / 30]))
    assert error["validation top-5"] == ([1, 2, 3], pytest.approx([10, 5, 100 / 30]))
    assert [values for _, values in rate.values()] == [[0.01] * 15]
    assert times == {}  # areas, not lines


def test_the_time_is_drawn_as_shares(tmp_path: Path) -> None:
    figure = _draw([_read_curve(record_run(tmp_path / "a"))])
    areas = figure.axes[3].collections
    tops = [max(path.vertices[:, 1].max() for path in area.get_paths()) for area in areas]
    assert tops == pytest.approx([50, 62.5, 100])


def test_steps_are_the_axis_until_an_epoch_is_validated(tmp_path: Path) -> None:
    loss, *_ = drawn(record_run(tmp_path / "a", epochs=0))
    assert loss["training"][0] == [2, 4, 6, 8, 10]
    assert loss["validation"] == ([], [])


def test_runs_are_told_apart_by_colour_and_named_once(tmp_path: Path) -> None:
    folders = [record_run(tmp_path / name) for name in ("first", "second")]
    figure = _draw([_read_curve(folder) for folder in folders])
    colours = {line.get_color() for line in figure.axes[0].lines}
    assert len(colours) == 2
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second"]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["training", "validation"]
    assert len(figure.axes[3].lines) == 2


def test_the_axes_leave_room_for_every_run(tmp_path: Path) -> None:
    small, large = record_run(tmp_path / "small"), record_run(tmp_path / "large", loss=50.0)
    figure = _draw([_read_curve(small), _read_curve(large)])
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] >= 50


@pytest.mark.parametrize(
    "changes", [{"loss": math.nan}, {"top1_error": None}, {"learning_rate": 0.0}]
)
def test_what_is_not_a_number_leaves_a_gap(tmp_path: Path, changes: dict[str, object]) -> None:
    draw_curves(record_run(tmp_path / "a", **changes), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0
    _, error, *_ = drawn(tmp_path / "a")
    assert ("training top-1" in error) == ("top1_error" not in changes)


def test_the_picture_is_whole(tmp_path: Path) -> None:
    run = record_run(tmp_path / "a")
    draw_curves(run / "record.jsonl", tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert min(picture.size) > 800
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 20)
    assert len(colours) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "curves.png"]


def test_the_program_draws_into_the_folder_of_one_run(tmp_path: Path) -> None:
    run = record_run(tmp_path / "a")
    assert main([str(run)]) == 0
    assert (run / "curves.png").exists()
    assert main([str(run / "record.jsonl"), "--output", str(tmp_path / "b.svg")]) == 0
    assert "<svg" in (tmp_path / "b.svg").read_text()


def test_the_program_asks_where_to_draw_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(record_run(tmp_path / name)) for name in ("a", "b")]
    assert main(runs) == 2
    assert "--output" in capsys.readouterr().err
    assert main([*runs, "--output", str(tmp_path / "both.pdf")]) == 0
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"record\.jsonl: cannot be read"):
        draw_curves(empty, tmp_path / "curves.png")
    (empty / "record.jsonl").touch()
    with pytest.raises(InputError, match="nothing is recorded yet"):
        draw_curves(empty, tmp_path / "curves.png")
    run = record_run(tmp_path / "a")
    with pytest.raises(InputError, match=r"one of \.png"):
        draw_curves(run, tmp_path / "curves.bmp")
    with pytest.raises(InputError, match="cannot be written"):
        draw_curves(run, tmp_path / "missing" / "curves.png")
    with pytest.raises(InputError, match="at most 7"):
        draw_curves([run] * 8, tmp_path / "curves.png")


def test_the_module_is_a_program(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tandem.plot", str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {tmp_path}")
