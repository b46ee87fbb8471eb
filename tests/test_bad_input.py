"""Each bad input of training gets one clear message and exit status 2, and nothing is written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import train
import validate
from tandem.data.batch_file import write_batch
from tests.support.picture_files import contents
from tests.support.tiny import prepare, run_program, settings


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def data(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "data"))


Refused = Callable[..., None]
Spoil = Callable[[Path], object]
Changes = dict[str, object]
RESUMED = {"resume_train": True, "n_epochs": 2}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Train, expect exit status 2, one line that says all that is expected, nothing written."""

    def check(data: Path, run: Path, *expected: str, **changes: object) -> None:
        before = contents(data), contents(run) if run.exists() else None
        status = train.main(settings(data, run, **changes))
        errors = capsys.readouterr().err
        assert status == 2, errors
        assert errors.splitlines()[-1].startswith("error: ")
        assert errors.count("error: ") == 1, errors
        assert "Traceback" not in errors
        for text in expected:
            assert text in errors, f"{text!r} not in {errors}"
        assert (contents(data), contents(run) if run.exists() else None) == before

    return check


def test_the_program_itself_exits_with_status_2(tmp_path: Path) -> None:
    result = run_program("train.py", settings(tmp_path, tmp_path / "run"))
    assert result.returncode == 2
    message = f"error: {tmp_path}/manifest.json: there is no manifest"
    assert result.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in result.stderr


def truncate(data: Path) -> None:
    path = data / "train_hkl" / "0001.hkl"
    path.write_bytes(path.read_bytes()[:-100])


def reshape(data: Path) -> None:
    write_batch(data / "train_hkl" / "0001.hkl", np.zeros((5, 64, 64, 3), np.uint8), "b01c")


def other_layout(data: Path) -> None:
    write_batch(data / "val_hkl" / "0000.hkl", np.zeros((5, 70, 70, 3), np.uint8), "c01b")


def other_dtype(data: Path) -> None:
    import hickle

    hickle.dump(np.zeros((5, 70, 70, 3), np.float32), data / "train_hkl" / "0000.hkl", mode="w")


def remove(name: str) -> Spoil:
    return lambda data: (shutil.rmtree if (data / name).is_dir() else os.unlink)(data / name)


def wrong_labels(data: Path) -> None:
    path = data / "labels" / "train_labels.npy"
    np.save(path, np.load(path)[::-1])


def small_mean(data: Path) -> None:
    np.save(data / "misc" / "img_mean.npy", np.zeros((3, 60, 60), np.float32))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (truncate, ["0001.hkl", "truncated"]),
        (reshape, ["0001.hkl", "(5, 64, 64, 3)", "(5, 70, 70, 3)"]),
        (other_layout, ["val_hkl/0000.hkl", "(3, 70, 70, 5)", "b01c"]),
        (other_dtype, ["0000.hkl", "float32", "uint8"]),
        (remove("train_hkl/0002.hkl"), ["train_hkl/0002.hkl", "no such"]),
        (remove("val_hkl"), ["val_hkl", "no such"]),
        (remove("manifest.json"), ["manifest.json", "no manifest"]),
        (remove("misc/img_mean.npy"), ["img_mean.npy", "no mean image"]),
        (remove("labels"), ["val_labels.npy", "no labels"]),
        (wrong_labels, ["train_labels.npy", "manifest"]),
        (lambda data: (data / "manifest.json").write_text("{"), ["manifest.json", "JSON"]),
        (small_mean, ["img_mean.npy", "(3, 60, 60)", "(3, 70, 70)"]),
    ],
)
def test_damaged_data(
    data: Path, tmp_path: Path, spoil: Spoil, expected: list[str], refused: Refused
) -> None:
    spoil(data)
    refused(data, tmp_path / "run", *expected)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lerning_rate": 0.1}, ["lerning_rate", "learning_rate"]),
        ({"batch_size": "many"}, ["batch_size", "many"]),
        ({"lr_policy": "stairs"}, ["lr_policy", "stairs", "cosine"]),
        ({"crop_size": 71}, ["crop_size", "71", "70"]),
        ({"batch_size": 10**6}, ["found 1000000, more than the 13 training rows", "at most 13"]),
        (
            {"batch_size": 7, "devices": ["cpu"] * 2},
            ["found 7 for each of 2 trainers", "at most 6"],
        ),
        ({"global_batch": 14}, ["global_batch: found 14, more than the 13 training rows"]),
        ({"devices": ["cuda:7"]}, ["cuda:7", "does not exist"]),
        ({"lib_conv": "cudnn"}, ["lib_conv"]),
        ({"shuffle": True}, ["shuffle", "files"]),
        ({"resume_train": True, "load_epoch": 1}, ["no checkpoint to resume from"]),
        ({"init_weights": "nowhere.safetensors"}, ["nowhere.safetensors"]),
    ],
)
def test_bad_settings(
    pristine: Path, tmp_path: Path, changes: Changes, expected: list[str], refused: Refused
) -> None:
    refused(pristine, tmp_path / "run", *expected, **changes)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def finished(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    result = run_program("train.py", settings(pristine, run, batch_size=8))
    assert result.returncode == 0, result.stderr
    return run


def test_a_folder_without_the_right_to_write(
    pristine: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    refused(pristine, blocker / "run", str(blocker), "not a folder")
    # Whoever runs the tests may be allowed to write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(pristine, tmp_path / "run", str(tmp_path), "not writable")


@pytest.mark.slow
def test_later_checkpoints_are_not_mixed_with_a_run_that_begins_before_them(
    pristine: Path, run: Path, refused: Refused
) -> None:
    shutil.copy(run / "epoch-0001.safetensors", run / "epoch-0002.safetensors")
    changes = {"resume_train": True, "load_epoch": 1, "n_epochs": 3}
    refused(pristine, run, "epoch-0002.safetensors", "epoch-0001.safetensors", **changes)


@pytest.mark.slow
def test_a_checkpoint_of_other_classes(run: Path, tmp_path: Path, refused: Refused) -> None:
    other = prepare(tmp_path / "other")
    path = other / "manifest.json"
    path.write_text(path.read_text().replace('"n00000001"', '"n00000001b"'))
    refused(other, run, "n00000001", "n00000001b", **RESUMED)


def test_a_folder_with_a_run_in_it_is_not_overwritten(
    pristine: Path, finished: Path, tmp_path: Path, refused: Refused
) -> None:
    refused(pristine, finished, "holds a run already", "resume_train")
    (tmp_path / "config.yaml").write_text("learning_rate: 1\n")
    refused(pristine, tmp_path, "config.yaml", "a run that left no checkpoint")


def test_a_checkpoint_of_another_network(pristine: Path, run: Path, refused: Refused) -> None:
    refused(pristine, run, "crop_size", "67", "70", **RESUMED, crop_size=70)
    refused(pristine, run, "width", **RESUMED, width=0.1)
    refused(pristine, run, "norm_before_pool false", "true", **RESUMED, norm_before_pool=True)
    refused(pristine, run, "no checkpoint", "load_epoch 4", "epoch-0001", load_epoch=4, **RESUMED)


def test_a_checkpoint_of_another_optimizer(pristine: Path, run: Path, refused: Refused) -> None:
    refused(pristine, run, "states of optimizer sgd", "adam", **RESUMED, optimizer="adam")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": "adam", "exchange": "average"}, "adam's results is not adam; use gradients"),
        ({"optimizer": "ftrl"}, "it must be sgd, adadelta, adagrad, adam, adamw, adamax, lion"),
        ({"lr_policy": "plateau", "lr_monitor": "f1"}, "f1 is not measured: add it to metrics"),
        ({"stop_at": 0.5, "stop_monitor": "loss"}, "stop_monitor: there is no value 'loss'"),
        ({"metrics": ["f1", "auc"]}, "there is no metric 'auc'"),
        ({"loss": "hinge"}, "it must be cross_entropy, "),
        (
            {"lr_policy": "table", "lr_table": "{0: -1}"},
            "whole numbers of epochs and rates above 0",
        ),
    ],
)
def test_optimizers_losses_and_rates_that_cannot_be_used(
    pristine: Path, tmp_path: Path, refused: Refused, changes: Changes, expected: str
) -> None:
    refused(pristine, tmp_path / "run", expected, **changes)


@pytest.mark.slow
def test_a_loss_for_a_network_with_its_own(
    pristine: Path, tmp_path: Path, refused: Refused
) -> None:
    own = "tests.training.test_compiled_network:OwnCost"
    refused(pristine, tmp_path / "run", "OwnCost has a cost of its own", network=own, loss="mse")


def test_a_step_that_needs_more_memory_than_there_is(
    pristine: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.launch.local.available_memory", lambda: 4e8)
    expected = "batch_size: 4 takes about 4", "of which 400.00 MB is available; choose a smaller"
    refused(pristine, tmp_path / "run", *expected, batch_size=4, para_load=False)


@pytest.mark.slow
def test_ten_crops_have_no_outputs_to_measure(finished: Path, pristine: Path) -> None:
    weights = ["--weights", str(finished / "epoch-0001.safetensors"), "--ten_crops"]
    arguments = [*weights, *settings(pristine, finished, metrics=["f1", "mse"])]
    result = run_program("validate.py", arguments)
    assert result.returncode == 2, result.stderr
    assert "metrics: mse is of the network's outputs" in result.stderr


def test_a_checkpoint_of_another_number_of_classes(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = prepare(tmp_path / "four", classes=4)
    weights = finished / "epoch-0001.safetensors"
    assert validate.main(["--weights", str(weights), *settings(other, tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "classes 3" in error
    assert "classes 4" in error


@pytest.mark.parametrize("name", ["record.jsonl", "epoch-0001.safetensors"])
def test_a_damaged_file_of_the_run(pristine: Path, run: Path, name: str, refused: Refused) -> None:
    (run / name).write_bytes((run / name).read_bytes()[:1000].replace(b'"event"', b'"what"'))
    refused(pristine, run, f"{name}, line 1" if "record" in name else name, **RESUMED)


@pytest.mark.slow
def test_weights_of_another_class_count(finished: Path, tmp_path: Path, refused: Refused) -> None:
    other = prepare(tmp_path / "four", classes=4)
    weights = finished / "epoch-0001.safetensors"
    refused(other, tmp_path / "run", "fc8.weight", "init_weights_skip", init_weights=weights)
    changes = {"init_weights": weights, "norm_before_pool": True}
    refused(other, tmp_path / "run", "norm_before_pool false", **changes)


@pytest.mark.parametrize(("program", "option"), [(train, "init_weights"), (validate, "weights")])
def test_missing_weights_are_told_before_missing_data(
    tmp_path: Path, program: Any, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--{option}", "nowhere.safetensors", *settings(tmp_path, tmp_path / "run")]
    assert program.main(arguments) == 2
    expected = "nowhere.safetensors: does not exist; expected a checkpoint (.safetensors)"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {expected}"


def test_a_damaged_checkpoint_is_told_before_missing_data(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "epoch-0001.safetensors").write_bytes(b"")
    refused(tmp_path, tmp_path / "run", "every checkpoint is damaged", resume_train=True)


def test_a_safetensors_file_that_is_no_checkpoint(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": np.zeros(3)}, path, metadata={"note": "{}"})
    assert validate.main(["--weights", str(path), *settings(pristine, tmp_path / "r")]) == 2
    assert "other.safetensors" in capsys.readouterr().err


def test_a_misspelt_network_is_refused_before_processes_start(
    data: Path, tmp_path: Path, refused: Refused
) -> None:
    meant = "has no class 'AlexNe'; did you mean alex_net:AlexNet?"
    refused(data, tmp_path / "run", meant, network="alex_net:AlexNe")


def test_a_resume_without_a_checkpoint_names_the_runs_beside_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "epoch-0001.safetensors").touch()
    changes = {**RESUMED, "network": "alex_net:AlexNe"}
    assert train.main(settings(data, tmp_path / "runs" / "new", **changes)) == 2
    runs = tmp_path / "runs"
    assert f"from the beginning; runs beside it are {runs}/other" in capsys.readouterr().err
