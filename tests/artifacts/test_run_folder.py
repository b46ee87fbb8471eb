"""The run folder: which checkpoint a run goes on from, which are kept, what is written when."""

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tandem.artifacts import run_folder as folder_module
from tandem.artifacts.checkpoint import Checkpoint, RunState, read_checkpoint, save_checkpoint
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records
from tandem.artifacts.run_folder import (
    RunFolder,
    best_of,
    checkpoint_name,
    chosen_checkpoint,
    find_checkpoint,
    list_checkpoints,
    neighbouring_runs,
    rescue,
    superseded,
)
from tandem.config.command_line import load_config
from tandem.config.schema import Config, make_config
from tandem.errors import InputError
from tandem.layers.network import NetworkDescription

TRAIN = TrainRecord(1, 20, 2.5, 0.75, 0.01, 130.5, 18.25, 0.5, 1.25)
VALIDATION = ValidationRecord(1, 40, 2.25, 0.5, 0.125, 360)


def make(state: RunState, value: float = 1.0) -> Checkpoint:
    weights = {"fc8.weight": np.full((300, 100), value, np.float32), "fc8.bias": np.ones(3, "f4")}
    momentum = {name: 2 * array for name, array in weights.items()}
    return Checkpoint(weights, {"momentum": momentum}, NetworkDescription(67, 3, 1.0), state)


def write(folder: Path, *states: RunState) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / checkpoint_name(state) for state in states]
    for path, state in zip(paths, states, strict=True):
        save_checkpoint(path, make(state))
    return paths


def damage(path: Path) -> None:
    """Change one byte of the tensors."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def open_folder(
    folder: Path, state: RunState | None = None, resumed: Path | None = None, **options: Any
) -> RunFolder:
    return RunFolder(Config(weights_dir=str(folder), **options), state or RunState(), resumed)


# Names


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """Checkpoints by name only, and other files."""
    for name in (
        "epoch-0001.safetensors",
        "epoch-0002.safetensors",
        "epoch-0009-step-000120.safetensors",
        "epoch-0009-step-000020.safetensors",
        "epoch-0009.safetensors",
        ".epoch-0010.abc.partial.safetensors",
        "epoch-0011.safetensors.bak",
        "epoch-11.safetensors",
        "record.jsonl",
    ):
        (tmp_path / name).touch()
    return tmp_path


def test_checkpoints_in_the_order_of_training(names: Path) -> None:
    assert [path.name for path in list_checkpoints(names)] == [
        "epoch-0001.safetensors",
        "epoch-0002.safetensors",
        "epoch-0009.safetensors",
        "epoch-0009-step-000020.safetensors",
        "epoch-0009-step-000120.safetensors",
    ]
    (names / "epoch-10000.safetensors").touch()
    assert list_checkpoints(names)[-1] == names / "epoch-10000.safetensors"


def test_find_checkpoint(names: Path) -> None:
    (latest,) = write(names, RunState(epoch=9, step_in_epoch=120))
    assert latest.name == "epoch-0009-step-000120.safetensors"
    assert find_checkpoint(names, "latest") == latest
    assert find_checkpoint(names, 9) == names / "epoch-0009.safetensors"
    assert find_checkpoint(names, 2) == names / "epoch-0002.safetensors"


def test_a_checkpoint_that_is_not_there(names: Path) -> None:
    listed = "epoch-0001.safetensors, epoch-0002.safetensors, epoch-0009.safetensors"
    message = rf"{names}: no checkpoint epoch-0004.* \(load_epoch 4\); there are: {listed}"
    with pytest.raises(InputError, match=message):
        find_checkpoint(names, 4)


def test_a_long_list_of_checkpoints_is_cut(tmp_path: Path) -> None:
    for epoch in range(1, 61):
        (tmp_path / f"epoch-{epoch:04d}.safetensors").touch()
    with pytest.raises(InputError, match=r"epoch-0001.* 52 more.*epoch-0060"):
        find_checkpoint(tmp_path, 61)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    """A script may always ask for the latest: a run that ended before its first begins again."""
    for folder in (tmp_path, tmp_path / "missing"):
        assert find_checkpoint(folder, "latest") is None
        with pytest.raises(InputError, match="no checkpoint to resume from"):
            find_checkpoint(folder, 1)


def test_a_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    paths = write(tmp_path / "a", *EPOCHS)
    damage(paths[2])
    assert chosen_checkpoint(tmp_path / "a") == paths[1]
    assert chosen_checkpoint(paths[2]) == paths[2]  # which is then refused by its reader
    assert chosen_checkpoint(tmp_path / "nowhere" / "x") == tmp_path / "nowhere" / "x"
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match=f"b: found a folder without.* runs are in {tmp_path}/a$"):
        chosen_checkpoint(tmp_path / "b")
    with pytest.raises(InputError, match=r"epoch-0009\S*: does not exist.* has epoch-0001"):
        chosen_checkpoint(tmp_path / "a" / "epoch-0009.safetensors")


def test_runs_beside_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / name, *EPOCHS[:1])
    (tmp_path / "empty").mkdir()
    assert neighbouring_runs(tmp_path / "a") == [str(tmp_path / "b")]
    assert neighbouring_runs(tmp_path / "new") == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert neighbouring_runs(tmp_path / "no" / "where") == []


# Which one to go on from


EPOCHS = tuple(RunState(epoch=e, step=4 * e, validation_errors=(0.5,) * e) for e in (1, 2, 3))


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write(tmp_path, *EPOCHS)
    damage(paths[2])
    assert find_checkpoint(tmp_path, "latest") == paths[1]
    assert "epoch-0003.safetensors: the checkpoint is damaged" in caplog.text
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    assert find_checkpoint(tmp_path, "latest") == paths[0]


def test_when_all_are_damaged_nothing_is_begun_afresh(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for path in write(tmp_path, *EPOCHS):
        damage(path)
    with pytest.raises(InputError, match=r"every checkpoint is damaged; the newest: .*epoch-0003"):
        find_checkpoint(tmp_path, "latest")


def test_what_is_not_damaged_is_not_passed_over(tmp_path: Path) -> None:
    """A checkpoint of a newer program, or one that can't be read just now, is no damage."""
    _, path = write(tmp_path, *EPOCHS[:2])
    path.write_bytes(path.read_bytes().replace(b'{\\"format\\": 1', b'{\\"format\\": 2'))
    with pytest.raises(InputError, match="this program reads format 1"):
        find_checkpoint(tmp_path, "latest")
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="is not a file"):
        find_checkpoint(tmp_path, "latest")


def test_a_damaged_checkpoint_is_set_aside_and_supersedes_nothing(tmp_path: Path) -> None:
    sound, *damaged = write(tmp_path, *EPOCHS)
    for path in damaged:
        damage(path)
    run = open_folder(tmp_path, EPOCHS[0], resumed=sound, keep_snapshots=1)
    assert list_checkpoints(tmp_path) == [sound]
    renamed = {path.with_name(f"{path.name}.damaged") for path in damaged}
    assert set(tmp_path.glob("*.damaged")) == renamed
    run.save(make(replace(EPOCHS[0], step_in_epoch=2)))
    run.close()
    # The first is the best, the other the last.
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "epoch-0001.safetensors",
        "epoch-0001-step-000002.safetensors",
    ]


# Which to keep


def names_of(*positions: tuple[int, int]) -> list[Path]:
    return [Path(checkpoint_name(RunState(epoch=e, step_in_epoch=s))) for e, s in positions]


@pytest.mark.parametrize(
    ("keep", "errors", "kept"),
    [
        ("all", (0.9, 0.8, 0.7), [0, 1, 2, 3, 4]),
        (9, (0.9, 0.8, 0.7), [0, 1, 2, 3, 4]),
        (1, (0.9, 0.8, 0.7), [3, 4]),
        (1, (0.5, 0.8, 0.7), [0, 4]),
        (2, (0.5, 0.8, 0.7), [0, 3, 4]),
        (1, (0.7, 0.5, 0.5), [2, 4]),
        (1, (float("nan"), 0.5, float("nan")), [2, 4]),
        (1, (float("nan"),) * 3, [4]),
        (1, (), [4]),
    ],
)
def test_the_last_and_the_best_are_kept(
    keep: int | Literal["all"], errors: tuple[float, ...], kept: list[int]
) -> None:
    paths = names_of((1, 0), (1, 50), (2, 0), (3, 0), (3, 50))
    history = [{"top1_error": error} for error in errors]
    gone = superseded(paths, keep, best_of(paths, Config(), history))
    assert [path for path in paths if path not in gone] == [paths[place] for place in kept]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_monitor": "validation_loss"}, 3),
        ({"keep_monitor": "f1", "metrics": ["f1"]}, 1),
        ({"keep_monitor": "top5_error"}, None),  # never a number
        ({}, 2),
        # What a patience is counted from: 0.7 to 0.69 is too little.
        ({"stop_patience": 3, "stop_monitor": "top1_error", "stop_delta": 0.25}, 1),
        ({"stop_patience": 3, "stop_delta": 0.25}, 2),  # of another value
        ({"stop_patience": 3, "stop_monitor": "top1_error", "stop_from_epoch": 2}, 3),
        ({"stop_monitor": "top1_error", "stop_from_epoch": 2}, 2),  # without a patience
    ],
)
def test_the_best_is_that_of_the_value_that_is_monitored(
    tmp_path: Path, settings: dict[str, Any], kept: int | None
) -> None:
    nan = float("nan")
    rows = [(3.0, 0.7, 0.9), (2.0, 0.6, 0.5), (1.0, 0.65, nan)]
    history = tuple(
        {"validation_loss": loss, "top1_error": error, "f1": f1, "top5_error": nan}
        for loss, error, f1 in rows
    )
    state = RunState(3, validation_errors=tuple(row[1] for row in rows), history=history)
    write(tmp_path, RunState(1), RunState(2), RunState(2, 7), state)
    best = best_of(list_checkpoints(tmp_path), make_config(settings), history)
    assert best == (kept and tmp_path / f"epoch-000{kept}.safetensors")
    without_classes = [{**epoch, "top1_error": nan} for epoch in history]
    if not settings:
        best = best_of(list_checkpoints(tmp_path), Config(), without_classes)
        assert best == tmp_path / "epoch-0003.safetensors"


def test_what_is_superseded_goes_when_the_next_is_there(tmp_path: Path) -> None:
    run = open_folder(tmp_path, keep_snapshots=2)
    errors = (0.3, 0.5, 0.4, 0.6)
    for epoch in (1, 2, 3, 4):
        run.save(make(RunState(epoch=epoch, validation_errors=errors[:epoch])))
        run.written(wait=True)
    run.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "epoch-0001.safetensors",
        "epoch-0003.safetensors",
        "epoch-0004.safetensors",
    ]


# Writing


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permitted = threading.Event()

    def slowly(path: Path, checkpoint: Checkpoint) -> None:
        assert permitted.wait(30)
        save_checkpoint(path, checkpoint)

    monkeypatch.setattr(folder_module, "save_checkpoint", slowly)
    run = open_folder(tmp_path)
    checkpoint = make(RunState(epoch=1), 7.0)
    run.save(checkpoint)
    # What the trainers do with the parameters meanwhile is not in it.
    checkpoint.weights["fc8.weight"][:] = 8.0
    assert run.busy
    assert run.written() is None
    permitted.set()
    path = run.written(wait=True)
    assert path == tmp_path / "epoch-0001.safetensors"
    assert (read_checkpoint(path).weights["fc8.weight"] == 7.0).all()
    assert run.written() is None
    run.close()


@pytest.mark.parametrize("nbytes", [None, 4096, 1 << 20])
def test_the_copy_is_the_checkpoint_bit_for_bit(tmp_path: Path, nbytes: int | None) -> None:
    written = make(EPOCHS[1])
    run = open_folder(tmp_path)
    while nbytes is not None and not run.prepare(nbytes):
        time.sleep(0.01)
    run.save(written)
    run.close()
    found = read_checkpoint(tmp_path / "epoch-0002.safetensors")
    for name, array in written.weights.items():
        momentum, expected = (made.states["momentum"][name] for made in (found, written))
        assert found.weights[name].tobytes() == array.tobytes()
        assert momentum.tobytes() == expected.tobytes()


def test_the_record_is_on_the_disk_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could leave a checkpoint with no lines before it."""
    flushed: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    run = open_folder(tmp_path)
    run.append(TRAIN)
    monkeypatch.setattr(os, "fsync", noted)
    run.save(make(RunState(epoch=1)))
    run.close()
    assert flushed[0] == "record.jsonl"
    assert flushed[1].startswith(".epoch-0001.")


def test_a_full_disk_is_told_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tandem.artifacts.checkpoint.save_file", full)
    run = open_folder(tmp_path)
    run.save(make(RunState(epoch=1)))
    while run.busy:
        time.sleep(0.01)
    with pytest.raises(InputError, match=r"epoch-0001\.safetensors.*No space left"):
        run.written()
    run.close()
    assert list_checkpoints(tmp_path) == []


def test_the_configuration_is_saved_and_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".epoch-0001.abc.partial.safetensors"
    left.touch()
    open_folder(tmp_path, devices=("cpu", "cpu"), threads=1, seed=5).close()
    saved = load_config(["--config", str(tmp_path / "config.yaml")])
    assert (saved.devices, saved.threads, saved.seed) == (("cpu", "cpu"), 1, 5)
    assert not left.exists()


def test_a_record_goes_on_where_the_checkpoint_stands(tmp_path: Path) -> None:
    run = open_folder(tmp_path)
    later = replace(TRAIN, step=40)
    for record in (TRAIN, later, VALIDATION):
        run.append(record)
    run.close()
    # In the middle of the validation: its line will come once more, those of training will not.
    run = open_folder(tmp_path, RunState(epoch=0, step_in_epoch=40, step=40))
    run.append(VALIDATION)
    run.close()
    for state, expected in ((RunState(epoch=1, step=40), [TRAIN, later, VALIDATION]), (None, [])):
        open_folder(tmp_path, state).close()
        assert read_records(tmp_path / "record.jsonl") == expected


@pytest.mark.parametrize("written", [0, 1])
def test_a_survivor_saves_once_and_completes_the_record(tmp_path: Path, written: int) -> None:
    """Trainer 0 ended before or after it had written the last line, or within it."""
    folder = open_folder(tmp_path)
    folder.append(replace(TRAIN, step=10))
    if written:
        folder.append(TRAIN)
    folder.close()
    with (tmp_path / "record.jsonl").open("a") as record:
        record.write('{"event": "tr')
    state = RunState(0, 20, 20)
    path = rescue(tmp_path, make(state), lambda: [replace(TRAIN, exchange_seconds=9.0)])
    assert path == tmp_path / checkpoint_name(state)
    assert read_checkpoint(path).state == state
    assert rescue(tmp_path, make(state, 2.0), list) is None
    assert [record.step for record in read_records(tmp_path / "record.jsonl")] == [10, 20]


def test_a_line_that_two_trainers_wrote_is_there_once(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for record in (TRAIN, replace(TRAIN, exchange_seconds=9.0), VALIDATION):
        folder.append(record)
    folder.close()
    open_folder(tmp_path, RunState(1, 0, 40)).close()
    assert read_records(tmp_path / "record.jsonl") == [TRAIN, VALIDATION]
