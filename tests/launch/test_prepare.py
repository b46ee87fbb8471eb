"""What a run of ranks resolves to, and is refused, by what has started them and their GPUs."""

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.artifacts.checkpoint import (
    Checkpoint,
    CheckpointHeader,
    RunState,
    read_checkpoint,
    read_header,
    save_checkpoint,
)
from tandem.config.command_line import load_config
from tandem.config.hardware import RankInfo
from tandem.config.schema import Config, make_config
from tandem.data.manifest import read_manifest, write_manifest
from tandem.distributed.group import Starter
from tandem.errors import InputError
from tandem.launch.prepare import changed_settings, check_continues, prepare_run
from tandem.layers.network import ALEXNET, KERAS_NETWORK, NetworkDescription
from tandem.training.run_spec import RunSpec
from tandem.training.setup import with_averages
from tandem.training.tracing import describe
from tests.support.tiny import save_weights, settings

NETWORK = "tests.support.norm_network:NormNetwork"
EPOCHS = "n_epochs was 1, now 2"


def spec(data: Path, starter: Starter, gpus: int = 2, **changes: Any) -> RunSpec:
    """Two ranks of a machine with so many GPUs."""
    ids = tuple(map(str, range(gpus)))
    rank = RankInfo(
        0, (0, 1), ("A GPU",) * gpus, ids, "a processor", (), starter, bfloat16=(True,) * gpus
    )
    arguments = settings(data, data.parent / "run", **{"devices": ["auto"], **changes})
    return prepare_run(load_config(arguments), ranks=[rank] * 2)


@pytest.mark.parametrize(
    ("starter", "changes", "expected", "condition"),
    [
        ("torchrun", {}, "nccl", "nccl"),
        ("mpirun", {}, "asa", None),
        ("torchrun", {"gpus": 0}, "asa", None),
        ("torchrun", {"devices": ["cuda:0", "cuda:0"]}, "asa", None),
        ("torchrun", {"bucket_mb": 4.0, "exchange": "gradients"}, "nccl", "nccl"),
        ("torchrun", {"collective": "ar"}, "ar", "ar by gloo"),
        ("mpirun", {"collective": "ar"}, "ar", "ar"),
    ],
)
def test_how_ranks_average(
    data: Path, starter: Starter, changes: dict[str, Any], expected: str, condition: str | None
) -> None:
    found = spec(data, starter, **changes)
    assert found.config.collective == expected
    assert found.conditions.get("collective") == condition


NCCL = {"collective": "nccl"}
TWICE = {"devices": ["cuda:0", "cuda:0"]}


@pytest.mark.parametrize(
    ("starter", "gpus", "changes", "message"),
    [
        ("mpirun", 2, NCCL, "nccl is for trainers that torchrun starts: torchrun --nproc"),
        ("torchrun", 0, NCCL, "nccl needs a GPU for each rank, and devices are cpu, cpu"),
        ("torchrun", 2, {**NCCL, **TWICE}, "devices are cuda:0, cuda:0: start as"),
        ("torchrun", 0, {"rule": "easgd"}, "rule: easgd is for trainers that are joined by MPI"),
        ("torchrun", 0, {"restarts": 2}, "use torchrun --max-restarts 2, with --resume_train true"),
        ("mpirun", 0, {"restarts": 2}, "restarts: 2 is not possible under mpirun"),
    ],
)
def test_what_nccl_or_a_starter_cannot_do_is_refused(
    data: Path, starter: Starter, gpus: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        spec(data, starter, gpus, **changes)


def test_files_beside_the_run_folder_must_be_writable(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("csv_file", "tensorboard_dir"):
        path = tmp_path / "file" / "log" / "a"
        with pytest.raises(InputError, match=f"{name} .* is a file, not a folder"):
            spec(data, "torchrun", 0, **{name: path})
    assert not (data.parent / "run").exists()


@pytest.mark.parametrize(
    ("machines", "condition"),
    [
        ((0, 0, 0, 0), None),
        ((0, 0, 2, 2), "hierarchical 0+0+1+1"),
        ((0, 1, 0, 1), "hierarchical 0+1+0+1"),
    ],
)
def test_who_shares_a_machine_is_a_condition_of_the_same_bits(
    data: Path, machines: tuple[int, ...], condition: str | None
) -> None:
    """Their terms are added first."""
    ranks = [RankInfo(m, (0,), (), (), "a processor", (), "mpirun") for m in machines]
    config = load_config(settings(data, data.parent / "run", collective="hierarchical"))
    assert prepare_run(config, ranks=ranks).conditions.get("collective") == condition


def test_buckets_are_for_ranks(data: Path) -> None:
    changes = {"exchange": "gradients", "bucket_mb": 4.0, "devices": ["cpu", "cpu"]}
    config = load_config(settings(data, data.parent / "run", **changes))
    with pytest.raises(InputError, match="bucket_mb: 4 is for trainers that are ranks"):
        prepare_run(config)


def test_without_a_checkpoint_nothing_can_be_frozen(data: Path, tmp_path: Path) -> None:
    """`resume_train` promises the weights of a checkpoint; without one they would be random."""
    changes = {"freeze": "conv1", "resume_train": True}
    config = load_config(settings(data, tmp_path / "run", **changes))
    with pytest.raises(InputError, match=r"run: .* the layers of freeze would keep random weights"):
        prepare_run(config)
    weights = save_weights(tmp_path / "w.safetensors", None, 3)
    prepare_run(config.model_copy(update={"init_weights": str(weights)}))
    save_weights(tmp_path / "epoch-0001.safetensors", None, 3)
    prepare_run(config.model_copy(update={"weights_dir": str(tmp_path), "exact": False}))


def test_pictures_resized_otherwise_than_those_of_training(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their errors say less of the weights, which the user is told; nothing is wrong with it."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    manifest = read_manifest(copy)
    write_manifest(copy / "manifest.json", replace(manifest, resize="shorter_side"))
    weights = save_weights(tmp_path / "w.safetensors", manifest.wnids, resize="shorter_side")
    header = read_header(weights)
    assert header.network.resize == "shorter_side"
    for folder, expected in ((copy, []), (data, ["shorter_side, those of", "resize: squash"])):
        for job, changes in (("validate", {}), ("train", {"init_weights": str(weights)})):
            config = load_config(settings(folder, tmp_path / "run", **changes))
            caplog.clear()
            spec = prepare_run(config, job, weights)
            warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert len(warnings) == bool(expected)
            assert all(part in warnings[0] for part in expected)
            assert spec.description.resize == read_manifest(folder).resize


def test_another_optimizer_has_no_use_for_the_states(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    wnids = read_manifest(data).wnids
    for before, now in (("sgd", "adam"), ("adam", "nadam"), ("rmsprop", "sgd")):
        saved = make_config({"optimizer": before, "crop_size": 67}).model_dump(mode="json")
        save_weights(
            run / "epoch-0001.safetensors", wnids, state=RunState(1, updates=5), config=saved
        )
        changes = {"resume_train": True, "optimizer": now, "n_epochs": 2}
        with pytest.raises(InputError) as caught:
            prepare_run(load_config(settings(data, run, **changes)))
        assert str(caught.value) == (
            f"{run}/epoch-0001.safetensors: this checkpoint has the states of optimizer {before}, "
            f"which mean nothing to {now}: use --optimizer {before}, or set exact: false (--exact "
            "false) to continue with states of zero"
        )
        assert [path.name for path in run.iterdir()] == ["epoch-0001.safetensors"]
        spec = prepare_run(load_config(settings(data, run, **changes, exact=False)))
        assert not spec.continues_optimizer
        changes["optimizer"] = before
        assert prepare_run(
            load_config(settings(data, run, **changes, exact=False))
        ).continues_optimizer


def test_other_states_of_the_same_optimizer_are_refused(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    path, wnids = run / "epoch-0001.safetensors", read_manifest(data).wnids
    saved = make_config({"optimizer": "adam", "crop_size": 67}).model_dump(mode="json")
    save_weights(path, wnids, state=RunState(1, updates=5), config=saved)
    made = read_checkpoint(path)
    states = dict.fromkeys(("first_moment", "second_moment"), made.weights)
    save_checkpoint(path, replace(made, states=states))
    changes = {"resume_train": True, "optimizer": "adam", "n_epochs": 2}
    same = load_config(settings(data, run, **changes, exact=False))
    assert prepare_run(same).continues_optimizer
    for other in ({"adam_amsgrad": True}, {"average_weights": 0.9}):
        with pytest.raises(InputError, match="found the states first_moment, second_moment of ad"):
            prepare_run(load_config(settings(data, run, **changes, **other)))


def test_pictures_with_another_border_than_those_of_training(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    manifest = read_manifest(copy)
    write_manifest(copy / "manifest.json", replace(manifest, pad=1))
    weights = save_weights(tmp_path / "w.safetensors", manifest.wnids, pad=1)
    assert read_header(weights).network.pad == 1
    for folder, expected in ((copy, []), (data, ["with pad: 1, those of", "have pad: 0"])):
        config = load_config(settings(folder, tmp_path / "run", init_weights=str(weights)))
        caplog.clear()
        spec = prepare_run(config)
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == bool(expected)
        assert all(part in warnings[0] for part in expected)
        assert spec.description.pad == read_manifest(folder).pad
    config = load_config(settings(copy, tmp_path / "run", crop_size=71))
    with pytest.raises(InputError, match=r"at most that; without their border of 1 that is 68"):
        prepare_run(config)


def continued(data: Path, state: RunState, **changes: Any) -> RunSpec:
    """A run of 2 images per step that continues a checkpoint of that state."""
    plain = {"batch_size": 2, "devices": ["cpu"]}
    before = make_config(plain).model_dump(mode="json")
    arguments = settings(data, data.parent / "run", **{**plain, **changes})
    spec = prepare_run(load_config(arguments))
    header = CheckpointHeader(spec.description, state, before)
    return replace(spec, resumed=Path("epoch-0003.safetensors"), header=header)


def test_between_epochs_settings_may_change(data: Path) -> None:
    check_continues(continued(data, RunState(3, 0, 9, (), 64, 1000), seed=5, shuffle="images"))


def test_inside_an_epoch_they_may_not(data: Path) -> None:
    pictures = continued(data, RunState()).train.size
    state = RunState(3, 4, 9, (), 2, pictures)
    check_continues(continued(data, state, learning_rate=0.5, n_epochs=90))
    batch = "pictures per step over all trainers: 2 in the checkpoint, now 1"
    for spec, expected in (
        (continued(data, state, batch_size=1), batch),
        (continued(data, replace(state, train_pictures=7)), "training pictures: 7 in the"),
        (continued(data, state, seed=5), "seed: 1 in the checkpoint, now 5"),
        (continued(data, state, shuffle="none"), "shuffle: files in the checkpoint, now none"),
    ):
        with pytest.raises(InputError, match=f"inside epoch 4.*{expected}"):
            check_continues(spec)
    check_continues(continued(data, replace(state, global_batch=None), batch_size=1))


def resumed(data: Path, folder: Path, rows: str | None, **changes: Any) -> RunSpec:
    """A run that continues one of a network with averages, normalised by groups of `rows`."""
    plain = {"network": NETWORK, "crop_size": 12, "batch_size": 12}
    begun = prepare_run(load_config(settings(data, folder, **plain)))
    found = begun.conditions if rows is None else {**begun.conditions, "norm_rows": rows}
    header = begun.config.model_dump(mode="json") | ({} if rows is None else {"norm_rows": 2})
    folder.mkdir()
    save_checkpoint(
        folder / "epoch-0001.safetensors",
        Checkpoint(
            {"fc1.bias": np.zeros(3, np.float32)},
            {},
            begun.description,
            RunState(1),
            header,
            found,
        ),
    )
    changes = {**plain, "resume_train": True, "n_epochs": 2, **changes}
    return prepare_run(load_config(settings(data, folder, **changes)))


def test_a_resumed_run_normalises_groups_of_as_many_rows(data: Path, tmp_path: Path) -> None:
    spec = resumed(data, tmp_path / "run", "2")
    assert (spec.config.norm_rows, spec.conditions["norm_rows"]) == (2, "2")
    assert spec.header is not None
    assert changed_settings(spec.header.config, spec.config) == [EPOCHS]


def test_a_resumed_run_of_other_rows_is_not_exact(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"same bits: norm_rows 2 in the checkpoint, now 4\. Rest"):
        resumed(data, tmp_path / "run", "2", norm_rows=4)
    spec = resumed(data, tmp_path / "other", "2", norm_rows=4, exact=False)
    assert spec.config.norm_rows == 4
    assert spec.header is not None
    assert changed_settings(spec.header.config, spec.config) == [EPOCHS, "norm_rows was 2, now 4"]


def test_rows_beyond_the_minibatch_do_not_enlarge_it(data: Path) -> None:
    arguments = settings(data, data.parent / "run", batch_size=2, norm_rows=4, network=NETWORK)
    own = prepare_run(load_config(arguments)).of_rank(0)
    assert own.config.batch_size == 2
    with pytest.raises(InputError, match="norm_rows: found 4, expected a divisor of batch_size 2"):
        with_averages(own)


def test_trainers_of_uneven_shares_are_traced_as_one_run(data: Path) -> None:
    changes = {"global_batch": 6, "norm_rows": 2, "devices": ["cpu"] * 2}
    run = prepare_run(load_config(settings(data, data.parent / "run", **changes)))
    assert [run.of_rank(rank).config.batch_size for rank in (0, 1)] == [4, 2]
    assert describe(run) == describe(run.of_rank(0)) == describe(run.of_rank(1))


def test_a_validation_is_not_refused_for_what_is_of_training(data: Path, tmp_path: Path) -> None:
    weights = save_weights(tmp_path / "a.safetensors", read_manifest(data).wnids)
    changes = {"keep_monitor": "balanced", "stop_monitor": "balanced", "stop_patience": 3}
    changes |= {"lr_policy": "plateau", "lr_monitor": "balanced"}
    changes |= {"freeze": ["conv1"], "init_weights_skip": ["fc8"], "lr_multipliers": "{conv1: 2}"}
    changes |= {"min_trainers": 2}
    config = load_config(settings(data, tmp_path / "run", **changes))
    assert prepare_run(config, "validate", weights).weights == weights
    with pytest.raises(InputError, match="lr_monitor: there is no value 'balanced'"):
        prepare_run(config)


GRAPH = {"layers": [{"name": "conv2d", "filters": 32}, {"name": "dense", "units": 3}]}


def save_graph(path: Path, wnids: tuple[str, ...], **options: Any) -> Path:
    network = NetworkDescription(
        67, 3, 1.0, wnids, network=KERAS_NETWORK, options={"model": GRAPH, **options}
    )
    values = {"dense.bias": np.zeros(3, np.float32)}
    save_checkpoint(path, Checkpoint(values, {}, network, RunState(1)))
    return path


def test_a_graph_is_taken_from_the_checkpoint(data: Path, tmp_path: Path) -> None:
    """Where the settings name no other network, in a validation and in a resumed run."""
    folder = tmp_path / "run"
    folder.mkdir()
    weights = save_graph(folder / "epoch-0001.safetensors", read_manifest(data).wnids)
    for job in ("validate", "train"):
        changes = {"crop_size": 60, "resume_train": True, "exact": False}
        found = prepare_run(load_config(settings(data, folder, **changes)), job, weights)
        assert found.config.network == KERAS_NETWORK
        assert found.config.network_options == {"model": GRAPH}
        assert (found.config.crop_size, found.config.width) == (67, 1.0)
    changes["network"] = "examples.le_net:LeNet"
    with pytest.raises(InputError, match=r"not examples.le_net:LeNet; a file does not decide"):
        prepare_run(load_config(settings(data, folder, **changes)))


def test_code_of_a_graph_is_that_of_the_settings(data: Path, tmp_path: Path) -> None:
    own = {"layers": ["mine:swish", "mine:gate"]}
    weights = save_graph(tmp_path / "w.safetensors", read_manifest(data).wnids, **own)
    plain = {"network": KERAS_NETWORK, "width": 1.0}
    for changes in ({}, plain, {**plain, "network_options": json.dumps({"model": GRAPH})}):
        config = load_config(settings(data, tmp_path / "run", **changes))
        with pytest.raises(InputError) as caught:
            prepare_run(config, "validate", weights)
        assert str(caught.value) == (
            f"{weights}: found mine:swish, mine:gate in the graph of this checkpoint, expected "
            "only what you name (nothing); a file does not decide what code is run, so name them "
            f"in network_options, as --config {tmp_path}/config.yaml does, if you mean it"
        )
    options = json.dumps({"model": GRAPH, **own})
    config = load_config(settings(data, tmp_path / "run", **plain, network_options=options))
    assert prepare_run(config, "validate", weights).description.options["layers"] == own["layers"]


def test_of_a_graph_only_the_difference_is_shown(data: Path, tmp_path: Path) -> None:
    weights = save_graph(tmp_path / "w.safetensors", read_manifest(data).wnids)
    graph = {"layers": [{"name": "conv2d", "filters": 64}, *GRAPH["layers"][1:]]}
    changes = {"network": KERAS_NETWORK, "network_options": json.dumps({"model": graph})}
    config = load_config(settings(data, tmp_path / "run", **changes, width=1.0))
    with pytest.raises(
        InputError,
        match=r"model\.layers\.conv2d\.filters 32, .*conv2d\.filters 64$",
    ):
        prepare_run(config, "validate", weights)
    before = {**config.model_dump(mode="json"), "network_options": {"model": GRAPH}}
    (change,) = changed_settings(before, config)
    assert change == "network_options.model.layers.conv2d.filters was 32, now 64"


def test_initial_weights_may_be_of_another_graph(data: Path, tmp_path: Path) -> None:
    """Such as one with another last layer, which `init_weights_skip` leaves at random."""
    weights = save_graph(tmp_path / "w.safetensors", read_manifest(data).wnids, layers=["m:own"])
    graph = {"layers": [GRAPH["layers"][0], {"name": "dense", "units": 10}]}
    changes = {"network": KERAS_NETWORK, "network_options": json.dumps({"model": graph})}
    config = load_config(settings(data, tmp_path / "run", **changes, init_weights=str(weights)))
    assert prepare_run(config).weights == weights
    config = config.model_copy(update={"network": ALEXNET, "network_options": {}})
    with pytest.raises(InputError, match=r"with layers .*, the configuration .* at its default"):
        prepare_run(config)


@pytest.mark.parametrize("rows", ["auto", 4])
def test_networks_without_averages_do_not_depend_on_rows(
    data: Path, tmp_path: Path, rows: object
) -> None:
    """So checkpoints of before the setting are continued exactly."""
    spec = resumed(data, tmp_path / "run", None, norm_rows=rows)
    assert "norm_rows" not in spec.conditions
    assert spec.config.norm_rows == rows


@pytest.mark.parametrize("rows", ["", "0", "-2", "2.0", "9" * 5000, "²"])
def test_rows_of_a_damaged_checkpoint_are_refused(data: Path, tmp_path: Path, rows: str) -> None:
    with pytest.raises(InputError, match=r"safetensors \(norm_rows\): found '.*', expected a whol"):
        resumed(data, tmp_path / "run", rows)


LIMITS = {
    "files": ({resource.RLIMIT_NOFILE: (24, 24)}, "at most 24 files .* at least 32 for 2 trainers"),
    "addresses": ({resource.RLIMIT_AS: (10**9, 10**9)}, "at most 1.00 GB of virtual memory"),
    "soft": ({resource.RLIMIT_NOFILE: (24, 4096)}, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_the_system_are_looked_at(
    data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found, message = LIMITS[name]
    raised: list[Any] = []
    none = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr("resource.getrlimit", lambda which: found.get(which, none))
    monkeypatch.setattr("resource.setrlimit", lambda *given: raised.append(given))
    config = Config(data_folder=str(data), batch_size=2, crop_size=67, devices=("cpu", "cpu"))
    if message is None:
        prepare_run(config, "train")
        assert raised == [(resource.RLIMIT_NOFILE, (32, 4096))]
    else:
        with pytest.raises(InputError, match=message):
            prepare_run(config, "train")
