"""Networks of checkpoints: which are built, and that a file decides no code."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from tandem.artifacts.trained_network import load_network
from tandem.data.manifest import read_manifest
from tandem.errors import InputError
from tandem.layers.network import GRAPH_NETWORK, NetworkDescription, build_network
from tandem.nn import layers
from tests.support.graphs import describe_graph, save_graph

FOREIGN = "a_foreign_module"
OWN = f"{FOREIGN}:Doubled"
MODULE = """
from tandem.nn.layers import ReLU

class Doubled(ReLU):
    def build(self, context, *inputs):
        return 2 * inputs[0]
"""
LAYERS = (layers.Input((8, 8, 3)), layers.ReLU(), layers.Flatten(), layers.Dense(3))


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{FOREIGN}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, FOREIGN, raising=False)


def save(path: Path, **options: Any) -> Path:
    return save_graph(path, describe_graph(LAYERS, 8, options=options))


def rename_layer(path: Path, name: str) -> Path:
    """Make a layer of a checkpoint's graph one of another class."""
    text = json.dumps(read_checkpoint(path).network.options).replace('"ReLU"', f'"{name}"')
    found = read_checkpoint(path)
    network = NetworkDescription(8, 3, 1.0, network=GRAPH_NETWORK, options=json.loads(text))
    save_checkpoint(path, Checkpoint(found.weights, {}, network))
    return path


@pytest.fixture
def mean(tmp_path: Path) -> Path:
    np.save(tmp_path / "mean.npy", np.zeros((3, 8, 8), np.float32))
    return tmp_path / "mean.npy"


@pytest.mark.parametrize("named", [{}, {"network": GRAPH_NETWORK}])
def test_a_graph_needs_no_name(tmp_path: Path, mean: Path, named: dict[str, str]) -> None:
    weights = save(tmp_path / "w.safetensors")
    loaded = load_network(weights, mean, **named)
    assert loaded.description == describe_graph(LAYERS, 8)
    for name, value in read_checkpoint(weights).weights.items():
        np.testing.assert_array_equal(loaded.network.parameters[name].get_value(), value)


def test_another_network_that_is_named_is_expected(tmp_path: Path, mean: Path) -> None:
    weights = save(tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"of the network tandem\.nn.*, not examples\.le_net:LeN"):
        load_network(weights, mean, "examples.le_net:LeNet")


@pytest.mark.parametrize("network", [None, GRAPH_NETWORK])
@pytest.mark.parametrize("named", [[OWN], [OWN, "another:Layer"], OWN, FOREIGN])
def test_code_that_a_file_names_is_not_imported(
    tmp_path: Path, mean: Path, network: str | None, named: Any
) -> None:
    weights = save(tmp_path / "w.safetensors", layers=named)
    arguments = {} if network is None else {"network": network}
    for own in ([], ["another:Layer"], ["a_foreign_module:Other"]):
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
    weights = rename_layer(save(tmp_path / "w.safetensors"), OWN)
    for own in ([], [OWN]):
        with pytest.raises(InputError, match=r"found the own layer .*Doubled.* expected one that "):
            load_network(weights, mean, layers=own)
    assert FOREIGN not in sys.modules


def test_layers_that_are_named_are_imported(tmp_path: Path, mean: Path) -> None:
    weights = rename_layer(save(tmp_path / "w.safetensors", layers=[OWN]), OWN)
    network = load_network(weights, mean, layers=[OWN]).network
    assert FOREIGN in sys.modules
    assert type(network.graph.layers["re_lu"]).__name__ == "Doubled"  # type: ignore[attr-defined]


def test_a_loss_is_not_needed(tmp_path: Path, mean: Path) -> None:
    loaded = load_network(save(tmp_path / "w.safetensors", loss=f"{FOREIGN}:loss"), mean)
    assert loaded.description == describe_graph(LAYERS, 8)
    assert FOREIGN not in sys.modules


def test_a_graph_in_a_header_is_json(tmp_path: Path) -> None:
    description = describe_graph(LAYERS, 8)
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
        description = describe_graph(LAYERS, 8, pad=pad, wnids=names)
        config = {"data_folder": str(folder), "mean_file": None}
        found = load_network(save_graph(tmp_path / "w.safetensors", description, config), None)
        np.testing.assert_array_equal(found.mean, np.zeros((3, side, side), np.float32))


def test_a_network_of_arrays_has_no_mean_image(tmp_path: Path, mean: Path) -> None:
    description = describe_graph([layers.Input((5,)), layers.Dense(2)])
    weights = save_graph(tmp_path / "w.safetensors", description)
    assert load_network(weights, None).mean is None
    assert load_network(weights, mean).mean is None
