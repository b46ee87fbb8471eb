"""Table 1 of the original: its arithmetic, and the runs that it is made of."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import table
from benchmarks.original import (
    ORIGINAL,
    Run,
    hidden_share,
    noise_for_runs,
    run_records,
    run_row,
    table_rows,
    table_runs,
)
from benchmarks.pictures import write_data_folder
from tandem.artifacts.metrics_log import TrainRecord
from tandem.data.manifest import read_manifest
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


def test_trainers_share_the_global_batch() -> None:
    words = " ".join(ONE.settings())
    assert words == "--devices cuda:0 --para_load true --batch_size 256 --data_on_gpu false"
    assert "--batch_size 128" in " ".join(TWO.settings())
    assert table_runs(1)[4].settings()[-2:] == ["--data_on_gpu", "true"]
    assert "--data_on_gpu" not in Run(True, ("cpu",)).settings()


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


def test_files_of_noise_have_many_names(tmp_path: Path) -> None:
    folder = write_data_folder(tmp_path / "data", 4, side=8, classes=3, repeat=3, per_file=2)
    split = read_manifest(folder).splits["train"]
    assert len(split.files) == 6
    assert len(split.labels) == 12
    assert len({(folder / file).stat().st_ino for file in split.files}) == 2
    saved = np.load(folder / "labels" / "train_labels.npy", allow_pickle=False)
    np.testing.assert_array_equal(saved, split.labels)


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
    with pytest.raises(InputError, match="ended with 0 after 3 of 9 reports"):
        run_records(data, settings, 9, seconds=100)
    with pytest.raises(InputError, match="reports in time"):
        run_records(data, settings, 3, seconds=0)
    with pytest.raises(InputError, match="ended with 2 after 0 of 1 reports"):
        run_records(tmp_path, settings, 1, seconds=100)


@pytest.mark.slow
def test_noise_for_runs_is_an_epoch_of_many_steps(tmp_path: Path) -> None:
    manifest = read_manifest(noise_for_runs(tmp_path / "data", side=8))
    assert len(manifest.splits["train"].pictures) == 102_400
    assert set(manifest.counts("train")) == {256}
