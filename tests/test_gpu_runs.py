"""Whole runs with trainers and loaders on simulated GPUs; see `simulated_gpu`."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.command_line import load_config
from tandem.data.manifest import read_manifest
from tandem.launch.prepare import prepare_run
from tandem.launch.train import run_training
from tandem.launch.validate import run_validation
from tandem.memory import HostSlots
from tandem.memory.cuda import CudaSlots
from tandem.training.memory import make_slots
from tests.support import simulated_gpu as simulated_gpu
from tests.support.runs import assert_close, assert_same_bits, assert_same_weights, train, weights
from tests.support.tiny import read_record, save_weights, settings, without_times

COMMON = {"precision": "float64", "batch_size": 2, "n_epochs": 2, "check_every": 1}


@pytest.fixture(scope="module")
def on_host(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("host") / "run", **COMMON, devices=["cpu"] * 2)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.config.resolve.resolve_devices", lambda names, _: tuple(names))
    monkeypatch.setattr("tandem.artifacts.reproducibility.device_names", lambda devices: [*devices])
    monkeypatch.setattr("tandem.launch.local.make_slots", simulated_gpu.make_slots)


@pytest.fixture(scope="module")
def loaded(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainers on one GPU, whose loaders copy every minibatch to it."""
    run = tmp_path_factory.mktemp("loaded") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulate(monkeypatch)
        assert train_simulated(data, run, devices=["cuda:0", "cuda:0"], data_on_gpu=False) == 0
    return run


def train_simulated(data: Path, run: Path, **changes: Any) -> int:
    arguments = settings(data, run, **{**COMMON, "compile": False, **changes})
    return run_training(arguments, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "single"])
@pytest.mark.parametrize("keeps", [False, True])
def test_trainers_on_gpus_divide_fully_connected_layers(
    data: Path, on_host: Path, tmp_path: Path, simulated: None, kind: str, keeps: bool
) -> None:
    changes = {"fully_connected": kind, "data_on_gpu": keeps}
    run = tmp_path / "run"
    assert train_simulated(data, run, devices=["cuda:0", "cuda:1"], **changes) == 0
    assert_close(run, on_host, 1e-9)


@pytest.mark.slow
def test_trainers_on_one_gpu_compute_what_they_do_on_the_host(on_host: Path, loaded: Path) -> None:
    check_close(loaded, on_host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ["cuda:0", "cuda:0"], "exchange": "gradients", "para_load": False},
        # These two can't reach each other.
        {"devices": ["cuda:0", "cuda:1"], "use_data_layer": False},
    ],
)
def test_trainers_on_gpus_compute_what_they_do_on_the_host(
    data: Path,
    tmp_path: Path,
    on_host: Path,
    simulated: None,
    changes: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    assert train_simulated(data, run, **changes) == 0
    apart = "cuda:0 and cuda:1 can't reach each other's memory" in capfd.readouterr().err
    assert apart == (changes["devices"][1] == "cuda:1")
    check_close(run, on_host)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:2"]])
def test_an_optimizer_that_counts_updates_computes_the_same_on_gpus(
    data: Path, tmp_path: Path, simulated: None, devices: list[str]
) -> None:
    """A trainer alone waits for each step: whether it was an update decides on the next."""
    changes = {"optimizer": "adam", "learning_rate": 0.001, "batch_size": 4 // len(devices)}
    assert train_simulated(data, tmp_path / "run", **changes, devices=devices) == 0
    common = {**COMMON, **changes, "devices": ["cpu"] * len(devices)}
    check_close(tmp_path / "run", train(data, tmp_path / "host", **common))


def check_close(run: Path, on_host: Path) -> None:
    assert_close(run, on_host, 1e-9)
    for line, expected in zip(read_record(run), read_record(on_host), strict=True):
        assert without_times(line).keys() == without_times(expected).keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"data_on_gpu": True},
        {"para_load": False, "loader_threads": 3},
        {"devices": ["cuda:0", "cuda:2"]},
    ],
)
@pytest.mark.slow
def test_pictures_that_stay_on_the_gpu_give_the_same_bits(
    data: Path, tmp_path: Path, simulated: None, loaded: Path, changes: dict[str, Any]
) -> None:
    """The last minibatches of an epoch are short, and one trainer has no picture in them."""
    run = tmp_path / "run"
    assert train_simulated(data, run, **{"devices": ["cuda:0", "cuda:0"], **changes}) == 0
    assert_same_bits(run, loaded)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_ten_crops_on_gpus_are_those_on_the_host(
    data: Path, tmp_path: Path, simulated: None, kept: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = save_weights(tmp_path / "w.safetensors", read_manifest(data).wnids)
    found = []
    gpus = {"devices": ["cuda:0", "cuda:0"], "data_on_gpu": kept, "compile": False}
    for changes in ({"devices": ["cpu"]}, gpus):
        arguments = settings(data, tmp_path / "run", precision="float64", **changes)
        assert run_validation(["--weights", str(weights), "--ten_crops", *arguments], None) == 0
        record = json.loads(capfd.readouterr().out)
        assert (record.pop("event"), record["crops"]) == ("validation", 10)
        found.append(record)
    assert found[1] == pytest.approx(found[0], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_colour_noise_on_gpus_is_that_on_the_host(
    data: Path, tmp_path: Path, simulated: None, kept: bool
) -> None:
    coloured = {"rand_colour": 5.0, "exchange": "gradients"}
    on_host = train(data, tmp_path / "host", **COMMON, **coloured, devices=["cpu"] * 2)
    run, gpus = tmp_path / "run", ["cuda:0", "cuda:0"]
    assert train_simulated(data, run, **coloured, devices=gpus, data_on_gpu=kept) == 0
    check_close(run, on_host)


def make_small_slots(*arguments: Any) -> Any:
    """Stands for `make_slots`, for GPUs on which the pictures fit and leave too little."""
    return replace(simulated_gpu.make_slots(*arguments), free=2 * 20 * 70**2 * 3 - 1)


@pytest.mark.slow
def test_pictures_that_do_not_fit_are_loaded(
    data: Path, tmp_path: Path, simulated: None, loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.launch.local.make_slots", make_small_slots)
    run = tmp_path / "run"
    assert train_simulated(data, run, devices=["cuda:0", "cuda:0"]) == 0
    assert_same_bits(run, loaded)


@pytest.mark.slow
def test_pictures_that_have_to_fit_and_do_not_end_the_run(
    data: Path,
    tmp_path: Path,
    simulated: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tandem.launch.local.make_slots", make_small_slots)
    changes = {"devices": ["cuda:0", "cuda:0"], "data_on_gpu": True}
    assert train_simulated(data, tmp_path / "run", **changes) == 2
    assert "2 copies of the pictures take 1 MiB of cuda:0, of which" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("on_nan", ["skip", "stop", "rollback"])
def test_a_trainer_alone_on_a_gpu_leaves_out_the_minibatch_that_one_on_the_host_does(
    data: Path,
    tmp_path: Path,
    simulated: None,
    on_nan: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It learns only in the next step that a step was not finite, which reports must not show."""
    # Seven steps an epoch; reports are rare, so that most steps are settled by the next.
    alone = {"devices": ["cuda:0"], "n_epochs": 3, "print_freq": 5, "on_nan": on_nan}
    alone["check_every"] = 0
    alone |= {"network": "tests.support.broken_network:NanAlexNet", "snapshot_freq": 1}
    status = int(on_nan == "stop")
    assert train_simulated(data, tmp_path / "gpu", **alone) == status
    errors = capfd.readouterr().err
    assert train_simulated(data, tmp_path / "host", **alone | {"devices": ["cpu"]}) == status
    expected = capfd.readouterr().err
    gpu, host = (read_record(tmp_path / run) for run in ("gpu", "host"))
    assert [_facts(line) for line in gpu] == [_facts(line) for line in host]
    assert [line["action"] for line in gpu if line["event"] == "not_finite"] == [on_nan]
    if on_nan == "stop":
        assert "not finite in step" in errors
        last, other = (text.splitlines()[-1] for text in (errors, expected))
        assert last.replace(str(tmp_path / "gpu"), str(tmp_path / "host")) == other
    assert len(list_checkpoints(tmp_path / "gpu")) == len(list_checkpoints(tmp_path / "host"))
    ours, theirs = weights(tmp_path / "gpu"), weights(tmp_path / "host")
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, 1e-7, 1e-12, err_msg=name)


def _facts(line: dict[str, Any]) -> dict[str, Any]:
    """What a record holds beside times, rounded as trainers on different devices may differ."""
    found = without_times(line)
    return {k: pytest.approx(v, rel=1e-7) if type(v) is float else v for k, v in found.items()}


@pytest.mark.slow
def test_what_is_frozen_keeps_every_bit_on_gpus(
    data: Path, tmp_path: Path, on_host: Path, simulated: None
) -> None:
    run, weights = tmp_path / "run", list_checkpoints(on_host)[-1]
    frozen = ["conv1", "conv3", "fc6"]
    changes = {"init_weights": weights, "freeze": frozen, "devices": ["cuda:0", "cuda:0"]}
    assert train_simulated(data, run, **changes) == 0
    ours, theirs = load_file(list_checkpoints(run)[-1]), load_file(weights)
    for name in (name for name in ours if not name.startswith("momentum/")):
        same = (ours[name] == theirs[name]).all()
        assert same == (name.partition(".")[0] in frozen), name


@pytest.mark.slow
def test_a_run_on_gpus_is_resumed_exactly(data: Path, tmp_path: Path, simulated: None) -> None:
    gpus = {"devices": ["cuda:0", "cuda:0"]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_simulated(data, whole, **gpus) == 0
    assert train_simulated(data, parts, **gpus, n_epochs=1) == 0
    assert train_simulated(data, parts, **gpus, resume_train=True) == 0
    assert_same_weights(parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize("para_load", [False, True])
def test_one_trainer_without_a_loader_needs_no_sharing(
    data: Path,
    tmp_path: Path,
    simulated: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    para_load: bool,
) -> None:
    make = partial(simulated_gpu.make_slots, permits_sharing=False)
    monkeypatch.setattr("tandem.launch.local.make_slots", make)
    changes = {"devices": ["cuda:0"], "para_load": para_load, "n_epochs": 1}
    assert train_simulated(data, tmp_path / "run", **changes) == (2 if para_load else 0)
    said = capfd.readouterr().err
    assert ("can't be shared between processes" in said) == para_load
    assert ("para_load: false needs none" in said) == para_load


def test_gpus_have_no_memory_that_all_share(
    data: Path, tmp_path: Path, simulated: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train_simulated(data, run, devices=["cuda:0", "cuda:0"], exchange="shared") == 2
    assert "on GPUs use average or gradients" in capsys.readouterr().err
    assert not run.exists()


def test_the_device_decides_where_memory_lies(data: Path, tmp_path: Path) -> None:
    spec = prepare_run(load_config(settings(data, tmp_path / "run", devices=["cpu"] * 2)))
    assert [type(make_slots(spec, rank)) for rank in range(2)] == [HostSlots] * 2
    gpus = spec.config.model_copy(update={"devices": ("cuda:3", "cuda:1"), "para_load": False})
    spec = replace(spec, config=gpus)
    found = [make_slots(spec, rank) for rank in range(2)]
    assert not any(slots.has_loader for slots in found)
    assert [type(slots) for slots in found] == [CudaSlots] * 2
    assert [slots.device for slots in found] == [3, 1]
