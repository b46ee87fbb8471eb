"""Checkpoints: what goes in comes out, and nothing but a whole checkpoint is taken for one."""

import errno
import json
import math
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tandem.artifacts.checkpoint import (
    Checkpoint,
    RunState,
    initial_weights,
    read_checkpoint,
    read_header,
    save_checkpoint,
    verify_checkpoint,
)
from tandem.artifacts.metrics import Pending, Seconds, Sums
from tandem.artifacts.run_folder import list_checkpoints
from tandem.artifacts.run_lock import locked
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.layers.network import NetworkDescription

SHAPES = {
    "conv1.weight": (4, 3, 2, 2),
    "conv1.bias": (4,),
    "fc8.weight": (5, 3),
    "fc8.bias": (3,),
}
NETWORK = NetworkDescription(67, 3, 0.25, ("n01", "n02", "n03"), True)
PENDING = Pending(
    (
        Sums(3, 0.1 + 0.2, {"top1_errors": 1, "top5_errors": 0}),
        Sums(4, 7e-9, {"top1_errors": 2, "top5_errors": 1, "class_right": (0.0, 2.0)}),
    ),
    Seconds(1 / 3, 0.1, 0.2, 0.7),
)
STATE = RunState(3, 0, 36, (0.9, math.nan, 0.5), 64, None, PENDING, ((2, 7),))


def tensors(seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def make(dtype: str = "float32", state: RunState = STATE) -> Checkpoint:
    config = Config().model_dump(mode="json")
    conditions = {"threads": "1", "numpy": "2.0"}
    states = {"momentum": tensors(2, dtype)}
    return Checkpoint(tensors(1, dtype), states, NETWORK, state, config, conditions)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    path = folder / "a.safetensors"
    save_checkpoint(path, checkpoint)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, make())


def refusal(path: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(InputError) as caught:
        read_checkpoint(path, shapes)
    assert str(path) in str(caught.value)
    return str(caught.value)


def with_metadata(path: Path, **changes: Any) -> Path:
    """Write the checkpoint again, with other metadata and without its checksum; None removes."""
    with safe_open(path, framework="numpy") as file:
        values = {**json.loads(file.metadata()["tandem"]), **changes}
    text = json.dumps({key: value for key, value in values.items() if value is not None})
    save_file(load_file(path), path, {"tandem": text})
    return path


# What goes in comes out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_everything_comes_back(tmp_path: Path, dtype: str) -> None:
    written = make(dtype)
    found = read_checkpoint(write_checkpoint(tmp_path, written), SHAPES)
    assert list(found.states) == ["momentum"]
    for ours, theirs in zip(
        (found.weights, *found.states.values()),
        (written.weights, *written.states.values()),
        strict=True,
    ):
        assert {name: (array.dtype, array.tobytes()) for name, array in ours.items()} == {
            name: (np.dtype(dtype), array.tobytes()) for name, array in theirs.items()
        }
    assert (found.network, found.config) == (NETWORK, written.config)
    errors = found.state.validation_errors
    assert (errors[0], errors[2], len(errors)) == (0.9, 0.5, 3)
    assert math.isnan(errors[1])
    nothing: dict[str, Any] = {"validation_errors": (), "history": ()}
    assert replace(found.state, **nothing) == replace(STATE, **nothing)
    assert [list(epoch) for epoch in found.state.history] == [["top1_error"]] * 3
    assert Config(**found.config) == Config()
    assert found.conditions == written.conditions
    header = read_header(tmp_path / "a.safetensors")
    assert (header.network, header.state.step) == (NETWORK, 36)
    assert (header.config, header.conditions) == (written.config, written.conditions)


def test_the_history_comes_back_and_is_completed_from_older_files(tmp_path: Path) -> None:
    history = ({"validation_loss": 0.1 + 0.2, "f1": 0.5}, {"validation_loss": math.nan})
    state = RunState(2, 0, 8, (0.9, 0.5), updates=7, history=history)
    found = read_checkpoint(write_checkpoint(tmp_path, make(state=state))).state
    assert (found.updates, found.history[0]) == (7, history[0])
    assert math.isnan(found.history[1]["validation_loss"])
    before = RunState(3, 0, 9, (0.9, 0.8, 0.5), history=({"top1_error": 0.5, "f1": 0.25},))
    assert before.history == (
        {"top1_error": 0.9},
        {"top1_error": 0.8},
        {"top1_error": 0.5, "f1": 0.25},
    )
    path = write_checkpoint(tmp_path, make())
    with safe_open(path, framework="numpy") as file:
        old = json.loads(file.metadata()["tandem"])["state"]
    del old["updates"], old["history"]
    header = read_header(with_metadata(path, state=old))
    assert (header.state.updates, header.state.history[2]) == (0, {"top1_error": 0.5})
    for bad, place in (
        ({**old, "updates": -1}, "state.updates"),
        ({**old, "history": [{"f1": "low"}]}, "state.history.0.f1"),
    ):
        with pytest.raises(InputError, match=place):
            read_header(with_metadata(path, state=bad))


def test_weights_without_momentum_belong_to_the_reader(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, replace(make(), states={}))
    found = read_checkpoint(path, SHAPES)
    assert found.states == {}
    assert set(found.weights) == set(SHAPES)
    found.weights["fc8.bias"][:] = 7
    assert not (read_checkpoint(path).weights["fc8.bias"] == 7).any()


def test_a_strided_view_is_written_in_its_logical_order(tmp_path: Path) -> None:
    written = make()
    transposed = np.asfortranarray(written.weights["fc8.weight"])
    every_second = np.zeros((8,), np.float32)
    every_second[::2] = written.weights["conv1.bias"]
    views = {**written.weights, "fc8.weight": transposed, "conv1.bias": every_second[::2]}
    found = read_checkpoint(write_checkpoint(tmp_path, replace(written, weights=views)))
    np.testing.assert_equal(found.weights, written.weights)


def test_no_pickle_is_in_the_file(path: Path) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert set(header) == {"__metadata__", *SHAPES, *(f"momentum/{name}" for name in SHAPES)}
    assert header["fc8.weight"]["shape"] == [5, 3]
    assert json.loads(header["__metadata__"]["tandem"])["state"]["validation_errors"][1] is None


def test_a_pickle_in_a_file_is_not_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = tmp_path / "epoch-0001.safetensors"
    path.write_bytes(pickle.dumps(Trap()))
    refusal(path)
    assert not (tmp_path / "sprung").exists()


# Writing


def test_a_failed_write_leaves_the_older_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.artifacts.checkpoint.save_file", fail)
    message = r"No space left on device: found .* free, expected 0.00 MB$"
    with pytest.raises(InputError, match=message):
        write_checkpoint(path.parent, make())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    with pytest.raises(InputError, match="could not be written"):
        write_checkpoint(path.parent / "missing", make())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights": {}}, "no weights"),
        ({"weights": {**tensors(1), "fc8.bias": np.zeros(3, np.int64)}}, "int64"),
        ({"states": {"momentum": {"fc8.bias": np.zeros(3, np.float32)}}}, "is missing"),
        ({"states": {"momentum": {**tensors(1), "fc8.bias": np.zeros(4, "f4")}}}, r"\(4,\)"),
        ({"states": {"momentum": {**tensors(1), "fc9.bias": np.zeros(4, "f4")}}}, "fc9"),
    ],
)
def test_a_checkpoint_that_does_not_fit_together_is_not_written(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        save_checkpoint(tmp_path / "a.safetensors", replace(make(), **changes))
    assert list(tmp_path.iterdir()) == []


# Damage


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.safetensors")
    assert "is not a file" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 100, b"{}", b"text" * 1000])
def test_bytes_that_are_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "epoch-0001.safetensors"
    path.write_bytes(content)
    assert "not a checkpoint, or damaged" in refusal(path)


def test_a_checkpoint_of_another_length(path: Path) -> None:
    content = path.read_bytes()
    for changed in (*(content[:n] for n in (4, 8, 100, len(content) // 2, -1)), content + b"more"):
        path.write_bytes(changed)
        assert "not a checkpoint, or damaged" in refusal(path)


def test_any_changed_byte_of_the_tensors_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for place in range(8 + length, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert "do not have the checksum" in refusal(path)
        with pytest.raises(InputError, match="checksum"):
            verify_checkpoint(path)
        with pytest.raises(InputError, match="checksum"):
            initial_weights(path, SHAPES)


def test_a_changed_number_of_the_state_is_noticed(path: Path) -> None:
    # Such a file can be read in every other respect.
    content = path.read_bytes()
    changed = content.replace(b'\\"step\\": 36', b'\\"step\\": 37')
    assert changed != content
    path.write_bytes(changed)
    assert read_header(path).state.step == 37
    assert "do not have the checksum" in refusal(path)


def test_a_checkpoint_without_a_checksum(path: Path) -> None:
    assert "do not have the checksum" in refusal(with_metadata(path))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_change_of_the_header_gives_a_checkpoint_or_a_message(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = write_checkpoint(tmp_path, make())
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length + 7))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        found = read_checkpoint(path, SHAPES)
    except InputError:
        return
    assert {name: array.shape for name, array in found.weights.items()} == SHAPES


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=300))
def test_any_bytes_give_a_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "any.safetensors").write_bytes(content)
    refusal(tmp_path / "any.safetensors")


def test_safetensors_of_another_program(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        save_file({"a": np.zeros(3)}, tmp_path / "other.safetensors", metadata)
        assert "not a checkpoint of this program" in refusal(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": 2}, "format"),
        ({"format": None}, "format"),
        ({"network": None}, "network"),
        ({"network": {"crop_size": 0, "classes": 3, "width": 1.0}}, "network.crop_size"),
        ({"network": {"crop_size": 67, "classes": "3", "width": 1.0}}, "network.classes"),
        (
            {"network": {"crop_size": 67, "classes": 3, "width": 1.0, "norm_before_pool": "no"}},
            "network.norm_before_pool",
        ),
        ({"state": {"epoch": -1}}, "state.epoch"),
        ({"state": {"epoch": 1.5}}, "state.epoch"),
        ({"state": {"validation_errors": ["low"]}}, "state.validation_errors.0"),
        ({"state": []}, "state"),
        ({"config": 3}, "config"),
        ({"state": {"pending": {"sums": [{"loss": "nan"}]}}}, "state.pending.sums.0.loss"),
        ({"state": {"pending": {"sums": [{"images": -1}]}}}, "state.pending.sums.0.images"),
        ({"state": {"pending": {"sums": [{"images": 1 << 63}]}}}, "state.pending.sums.0.images"),
        ({"state": {"pending": {"sums": [{"top1_errors": 1e300}]}}}, "state.pending"),
        (
            {"state": {"pending": {"sums": [{"images": 2, "top5_errors": -1}]}}},
            "state.pending.sums.0",
        ),
        ({"state": {"skipped": [[1, -2]]}}, "state.skipped.0.1"),
        ({"conditions": {"numpy": 2}}, "conditions.numpy"),
        ({"momentum": "yes"}, "momentum"),
    ],
)
def test_metadata_is_checked(path: Path, changes: dict[str, Any], expected: str) -> None:
    message = refusal(with_metadata(path, **changes))
    assert f"metadata cannot be used: {expected}: " in message


def test_metadata_that_is_no_json(path: Path) -> None:
    for text in ("{", "[]", "nonsense", "[" * 100_000):
        save_file(load_file(path), path, {"tandem": text})
        assert "metadata cannot be used: JSON: " in refusal(path)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("momentum/fc8.bias", None, "momentum/fc8.bias is missing"),
        ("fc8.bias", None, "momentum/fc8.bias has no weight"),
        ("fc8.bias", np.zeros(3, np.int64), "fc8.bias is of type I64, expected float32 or float64"),
        ("momentum/fc8.bias", np.zeros(4, "f4"), "is float32 (3,), its momentum float32 (4,)"),
    ],
)
def test_missing_and_unknown_tensors(
    path: Path, name: str, value: np.ndarray | None, expected: str
) -> None:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    arrays = {**load_file(path), name: value}
    save_file({name: array for name, array in arrays.items() if array is not None}, path, metadata)
    assert expected in refusal(path)


def test_a_state_that_the_header_does_not_list(path: Path) -> None:
    assert "the header does not list its state" in refusal(with_metadata(path, momentum=False))


# The network


def test_a_checkpoint_from_before_there_was_a_choice_of_order(path: Path) -> None:
    with_metadata(path, network={"crop_size": 67, "classes": 3, "width": 0.25})
    assert read_header(path).network == NetworkDescription(67, 3, 0.25)
    assert read_header(path).network.resize == "squash"


def test_a_checkpoint_of_another_network(path: Path) -> None:
    message = refusal(path, {**SHAPES, "fc8.weight": (5, 10), "fc8.bias": (10,)})
    network = "another network (3 classes, crop_size 67, width 0.25)"
    assert f"{network}: fc8.weight is (5, 3), expected (5, 10)" in message
    assert "fc9.bias is missing, expected (2,)" in refusal(path, {**SHAPES, "fc9.bias": (2,)})
    fewer = {name: shape for name, shape in SHAPES.items() if name != "fc8.bias"}
    assert "fc8.bias is unknown" in refusal(path, fewer)


def test_initial_weights_of_the_same_network(path: Path) -> None:
    np.testing.assert_equal(initial_weights(path, SHAPES), make().weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc8.weight": (5, 10)}, r"fc8.weight is \(5, 3\) there, \(5, 10\) here"),
        ({"fc9.weight": (2, 2)}, r"fc9.weight is missing there, \(2, 2\) here"),
    ],
)
def test_layers_that_do_not_fit_are_an_error_unless_they_are_skipped(
    path: Path, changes: dict[str, tuple[int, ...]], message: str
) -> None:
    (layer,) = (name.partition(".")[0] for name in changes)
    with pytest.raises(InputError, match=message) as caught:
        initial_weights(path, SHAPES | changes)
    assert str(path) in str(caught.value)
    assert "3 classes" in str(caught.value)
    assert f"init_weights_skip: [{layer}]" in str(caught.value)
    weights = initial_weights(path, SHAPES | changes, [layer])
    assert list(weights) == [name for name in SHAPES if not name.startswith(layer)]


def test_how_many_layers_differ_is_said_and_which_setting_makes_them(path: Path) -> None:
    theirs = read_header(path).network
    ours = replace(theirs, width=theirs.width / 2)
    shapes = {name: (*shape[:-1], 99) for name, shape in SHAPES.items()}
    with pytest.raises(InputError) as caught:
        initial_weights(path, shapes, network=ours)
    message = str(caught.value)
    hint = f": set width: {theirs.width}, which is {ours.width} here; conv1.weight is "
    assert hint in message
    assert f", and {len(shapes) - 1} others differ; init_weights_skip: [conv1, fc8] lets" in message


def test_a_file_that_may_not_be_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder without permission, where even to look for a file is refused."""

    def refuse(at: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(at))

    monkeypatch.setattr(Path, "is_file", refuse)
    for read in (read_header, read_checkpoint, lambda file: initial_weights(file, SHAPES)):
        with pytest.raises(InputError, match=r"cannot be read: .*Permission denied"):
            read(path)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match=r"the folder cannot be read: Permission denied"):
        list_checkpoints(path.parent)
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(InputError, match=r"cannot be read: Permission denied"):
        locked(path.parent).__enter__()


def test_a_layer_is_skipped_as_a_whole(path: Path) -> None:
    # Its bias fits, but it was learned for filters that are gone.
    shapes = {**SHAPES, "conv1.weight": (4, 3, 5, 5)}
    assert list(initial_weights(path, shapes, ["conv1"])) == ["fc8.weight", "fc8.bias"]


def test_initial_weights_of_which_nothing_is_taken(path: Path) -> None:
    layers = {name.partition(".")[0] for name in SHAPES}
    with pytest.raises(InputError, match="nothing left to take"):
        initial_weights(path, SHAPES, [*layers])


def test_what_was_not_counted_stays_unknown() -> None:
    """As the errors of pictures from before a resume that adds a metric."""
    before, after = Sums(4, 1.0), Sums(2, 1.0, {"top1_errors": 1, "class_right": (1.0, 2.0)})
    for total in (before + after, after + before):
        assert total.images == 6
        assert np.isnan([total.values["top1_errors"], *total.values["class_right"]]).all()
    assert (Sums() + after).values == after.values == (after + Sums()).values
