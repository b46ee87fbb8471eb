"""Table 1 of the original: its arithmetic, and the runs that it is made of."""

import math
from pathlib import Path

import pytest

from benchmarks.gpu import table
from benchmarks.original import (
    ORIGINAL,
    STOOKE_SPEEDUP,
    Run,
    exchange_table,
    fit_table,
    function_table,
    hidden_share,
    loading_table,
    main,
    model_table,
    predicted_loading,
    predicted_resnet,
    run_records,
    run_row,
    table_rows,
    table_runs,
)
from benchmarks.pictures import write_data_folder
from benchmarks.published import TIMED
from tandem.artifacts.metrics_log import TrainRecord
from tandem.errors import InputError

QUICK = [
    *("--crop_size", "67", "--width", "0.05", "--threads", "1", "--n_epochs", "1"),
    *("--snapshot_minutes", "0", "--tensorboard", "false"),
]
ONE, TWO = Run(True, ("cuda:0",)), Run(True, ("cuda:0", "cuda:0"))


def record(rate: float, waited: float) -> TrainRecord:
    return TrainRecord(1, 20, 6.9, None, 0.01, rate, 0.7, waited, 0.3 - waited)


def test_runs_are_one_and_two_trainers_with_and_without_loaders() -> None:
    assert [run.name for run in table_runs(1)] == [
        "one trainer, parallel loading on",
        "one trainer, parallel loading off",
        "2 trainers on 1 GPU, parallel loading on",
        "2 trainers on 1 GPU, parallel loading off",
        "one trainer, parallel loading on, pictures kept on the GPU",
    ]
    assert table_runs(4)[2].name == "2 trainers, parallel loading on"
    assert table_runs(4)[2].devices == ("cuda:0", "cuda:1")


def test_the_table_has_seconds_of_5120_images_beside_the_originals() -> None:
    one, two = table_rows(
        {
            ONE: 51_200.0,
            TWO: 40_000.0,
            Run(False, ONE.devices): 2_560.0,
            Run(True, ONE.devices, keeps=True): 99_000.0,
        }
    )
    assert (one["seconds, 2 trainers"], one["seconds, 1 trainer"]) == (0.128, 0.1)
    assert (two["seconds, 2 trainers"], two["seconds, 1 trainer"]) == (None, 2.0)
    assert list(one.values())[-2:] == [19.72, 32.76]
    assert list(two.values())[-2:] == [26.23, 43.52]
    lines = table([one, two]).splitlines()
    assert lines[0].split("  ")[0] == "parallel loading"
    assert lines[2].split() == ["no", "-", "2.0", "26.23", "43.52"]
    assert ORIGINAL[True, 1] == 32.76


def test_loading_is_hidden_where_the_trainer_does_not_wait() -> None:
    records = [record(1000.0, 0.0), record(500.0, 0.1), record(800.0, 0.02)]
    assert math.isclose(hidden_share(records), 1 - 0.12 / 3)
    row = run_row(ONE, records)
    assert row["images_per_second"] == 800
    assert row["loading hidden"] == 0.96


def test_predictions_of_the_originals_machines() -> None:
    assert predicted_loading(True, 1) == ORIGINAL[True, 1]
    # Each GPU receives half of weights and momenta twice, 488 MB in all, by 15.75 GB/s.
    assert math.isclose(predicted_loading(True, 2), 32.76 / 2 + 20 * 0.48772 / 15.75, rel_tol=1e-4)
    for loading in (True, False):
        assert 0.8 < predicted_loading(loading, 2) / ORIGINAL[loading, 2] < 1
    assert STOOKE_SPEEDUP < predicted_resnet() < 8
    assert predicted_resnet(1) == 1


def test_there_are_five_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--table", "6"])
    assert "invalid choice: 6 (choose from 1, 2, 3, 4, 5)" in capsys.readouterr().err


@pytest.mark.slow
def test_tables_are_made_at_a_small_size(tmp_path: Path) -> None:
    data = write_data_folder(tmp_path / "data", 8, side=70, classes=3, repeat=80, per_file=4)
    title, *rows = loading_table(data, 16, ["--crop_size", "67", "--width", "0.05"])
    assert [row[:2] for row in rows] == [("yes", "2"), ("yes", "1"), ("no", "2"), ("no", "1")]
    assert all(len(row) == len(title) and float(row[2]) > 0 for row in rows)
    width = ["--width", "0.05"]
    title, *rows = model_table(data, [one for one in TIMED if one.name == "AlexNet"], 67, width)
    assert [row[1] for row in rows] == ["1", "2", "4", "8"]
    assert [row[5] for row in rows] == ["1.00", "1.84", "3.62", "6.33"]  # of the README's seconds
    assert rows[0][4] == rows[0][6] == "1.00"
    title, *rows = fit_table(192, 0.1)
    assert [row[1:] for row in rows[2:]] == [("8", "", "0.50"), ("8", "", "0.85")]
    assert all(float(row[2]) > 0 for row in rows[:2])
    small = ("--batch", "2", "--steps", "3", "--side", "33", "--filters", "2", "--classes", "3")
    title, *rows = function_table(small)
    assert [row[0] for row in rows] == ["1", "2", "8"]
    assert float(rows[1][1]) > 0


@pytest.mark.slow
def test_all_reduces_are_timed_beside_the_originals() -> None:
    pytest.importorskip("mpi4py")
    title, *rows = exchange_table(1, 1e-4)
    assert [row[0] for row in rows][:2] == ["AlexNet, 128, ar", "AlexNet, 128, asa"]
    assert [row[2:4] for row in rows][:2] == [("2.01", "5.3"), ("0.75", "6.7")]
    assert all(len(row) == len(title) and float(row[1]) > 0 for row in rows)


@pytest.mark.slow
def test_runs_of_the_table_are_made_and_measured(tmp_path: Path) -> None:
    """On a CPU: 16 pictures a step, a report every 2 steps."""
    data = write_data_folder(tmp_path / "data", 8, side=70, classes=3, repeat=12, per_file=4)
    common = [*QUICK, "--print_freq", "2", "--learning_rate", "0.001"]
    rates = {}
    for run in (Run(True, ("cpu",)), Run(False, ("cpu", "cpu"))):
        found = run_records(data, common + run.settings(16), 3, seconds=100, skip=1)
        assert [one.step for one in found] == [4, 6]
        rates[run] = run_row(run, found)["images_per_second"]
        assert run_row(run, found)["loading hidden"] <= 1
    rows = table_rows(rates)
    assert rows[0]["seconds, 1 trainer"] > 0
    assert rows[1]["seconds, 2 trainers"] > 0
    settings = common + Run(True, ("cpu",)).settings(16)
    with pytest.raises(InputError, match="ended with 0 before it was done"):
        run_records(data, settings, 9, seconds=100)
    with pytest.raises(InputError, match="ran 0 s before it was done"):
        run_records(data, settings, 3, seconds=0)
    with pytest.raises(InputError, match="ended with 2 before it was done"):
        run_records(tmp_path, settings, 1, seconds=100)
