"""Networks of checkpoints: which are built, and that a file decides no code."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem.keras
from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, read_header, save_checkpoint
from tandem.artifacts.trained_network import load_network
from tandem.data.manifest import read_manifest
from tandem.errors import InputError
from tandem.keras.lowering import registry
from tandem.layers.network import KERAS_NETWORK, NetworkDescription, build_network
from tandem.registry import REMOVED, check_class, find_class
from tests.support.keras_models import describe_model, keras, save_model

FOREIGN = "a_foreign_module"
OWN = f"{FOREIGN}:doubled"
MODULE = """
from tandem.keras import lowers

@lowers("own:Doubled")
def doubled(layer, x):
    return 2 * x
"""


@functools.cache
def model() -> Any:
    m = keras.layers
    layers = [m.Identity(name="it"), m.Flatten(), m.Dense(3, name="dense")]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{FOREIGN}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, FOREIGN, raising=False)
    registry._load()
    monkeypatch.setattr(registry, "_LOWERINGS", {**registry._LOWERINGS})


def described(**fields: Any) -> NetworkDescription:
    return describe_model(model(), 8, **fields)


def save(path: Path, **options: Any) -> Path:
    return save_model(path, model(), 8, options=options)


def with_own_layer(path: Path) -> Path:
    """Make a layer of a checkpoint's graph one of a user's own."""
    found = read_checkpoint(path)
    text = json.dumps(found.network.options)
    old = '"module": "keras.layers", "class_name": "Identity"'
    assert old in text
    options = json.loads(text.replace(old, f'"module": "{FOREIGN}", "class_name": "Doubled"'))
    network = NetworkDescription(8, 3, 1.0, network=KERAS_NETWORK, options=options)
    save_checkpoint(path, Checkpoint(found.weights, {}, network))
    return path


@pytest.fixture
def mean(tmp_path: Path) -> Path:
    np.save(tmp_path / "mean.npy", np.zeros((3, 8, 8), np.float32))
    return tmp_path / "mean.npy"


@pytest.mark.parametrize("named", [{}, {"network": KERAS_NETWORK}])
def test_a_graph_needs_no_name(tmp_path: Path, mean: Path, named: dict[str, str]) -> None:
    weights = save(tmp_path / "w.safetensors")
    loaded = load_network(weights, mean, **named)
    assert loaded.description == described()
    for name, value in read_checkpoint(weights).weights.items():
        np.testing.assert_array_equal(loaded.network.parameters[name].get_value(), value)


def test_another_network_that_is_named_is_expected(tmp_path: Path, mean: Path) -> None:
    weights = save(tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"network tandem\.keras.*, not examples\.le_net:LeN"):
        load_network(weights, mean, "examples.le_net:LeNet")


@pytest.mark.parametrize("network", [None, KERAS_NETWORK])
@pytest.mark.parametrize("named", [[OWN], [OWN, "another:Layer"], OWN, FOREIGN])
def test_code_that_a_file_names_is_not_imported(
    tmp_path: Path, mean: Path, network: str | None, named: Any
) -> None:
    weights = save(tmp_path / "w.safetensors", layers=named)
    arguments = {} if network is None else {"network": network}
    for own in ([], ["another:Layer"], ["a_foreign_module:other"]):
        with pytest.raises(InputError, match=r"found a_foreign.* expected only .* say --layers a_"):
            load_network(weights, mean, **arguments, layers=own)
    assert FOREIGN not in sys.modules


@pytest.mark.parametrize("named", [[[OWN]], {OWN: 1}, [{"a": OWN}]])
def test_layers_of_other_types_are_refused(tmp_path: Path, mean: Path, named: Any) -> None:
    weights = save(tmp_path / "w.safetensors", layers=named)
    with pytest.raises(InputError, match=r"layers of .* is "):
        load_network(weights, mean)
    assert FOREIGN not in sys.modules


def test_the_graph_itself_names_no_code(tmp_path: Path, mean: Path) -> None:
    weights = with_own_layer(save(tmp_path / "w.safetensors"))
    for own in ([], [OWN]):
        with pytest.raises(InputError, match="it: found Doubled, a layer of your own, expected"):
            load_network(weights, mean, layers=own)
    assert FOREIGN not in sys.modules


def test_layers_that_are_named_are_imported(tmp_path: Path, mean: Path) -> None:
    weights = with_own_layer(save(tmp_path / "w.safetensors", layers=[OWN]))
    network = load_network(weights, mean, layers=[OWN]).network
    assert FOREIGN in sys.modules
    assert network.graph.layers["it"].kind == "own:Doubled"  # type: ignore[attr-defined]


def test_the_network_that_was_removed_is_refused(tmp_path: Path) -> None:
    """One sentence names the last commit that reads it."""
    path = tmp_path / "w.safetensors"
    network = NetworkDescription(8, 3, 1.0, network=REMOVED, options={"graph": {}})
    save_checkpoint(path, Checkpoint({"it.bias": np.zeros(3, np.float32)}, {}, network))
    reason = f": found the network {REMOVED}, which has been removed: .* reads it is d1f8416$"
    readers: tuple[Any, ...] = (read_header, read_checkpoint, tandem.keras.load_model)
    for read in readers:
        with pytest.raises(InputError, match=f"w.safetensors{reason}"):
            read(path)
    for find in (check_class, find_class):
        with pytest.raises(InputError, match=f"^network{reason}"):
            find("network", REMOVED)


def test_a_graph_in_a_header_is_json(tmp_path: Path) -> None:
    description = described()
    assert NetworkDescription(**json.loads(json.dumps(description.header()))) == description
    weights = save(tmp_path / "w.safetensors")
    assert read_checkpoint(weights).network == description
    assert build_network(description).parameters["dense.bias"].type.shape == (3,)


@pytest.mark.parametrize(("pad", "expected"), [(0, 8), (2, 12)])
def test_a_run_without_a_mean_image_has_zeros(
    data: Path, tmp_path: Path, pad: int, expected: int
) -> None:
    """Of the size of its pictures, or of their crops with a border if those are not there."""
    manifest = read_manifest(data)
    for folder, names, side in (
        (data, manifest.wnids, manifest.image_size),
        (data, ("cat", "dog", "cow"), expected),
        (tmp_path / "gone", manifest.wnids, expected),
    ):
        config = {"data_folder": str(folder), "mean_file": None}
        path = tmp_path / "w.safetensors"
        found = load_network(save_model(path, model(), 8, config, pad=pad, wnids=names), None)
        np.testing.assert_array_equal(found.mean, np.zeros((3, side, side), np.float32))


def test_a_network_of_arrays_has_no_mean_image(tmp_path: Path, mean: Path) -> None:
    rows = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    weights = save_model(tmp_path / "w.safetensors", rows)
    assert load_network(weights, None).mean is None
    assert load_network(weights, mean).mean is None
