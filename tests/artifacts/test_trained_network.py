"""Networks of checkpoints: which are built, and that a file decides no code."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tandem.artifacts.checkpoint import Checkpoint, save_checkpoint
from tandem.artifacts.trained_network import load_network
from tandem.errors import InputError
from tandem.layers import Network
from tandem.layers.network import GRAPH_NETWORK, NetworkDescription, build_network
from tandem.layers.parameter import bias

FOREIGN = "a_foreign_module"
OWN = f"{FOREIGN}:Swish"
GRAPH = {"layers": [{"name": "dense", "units": 3}]}


class FakeGraphNetwork(Network):
    """As many units as the graph's layer has."""

    def __init__(
        self,
        crop_size: int,
        classes: int,
        width: float,
        dtype: str,
        *,
        graph: dict[str, Any],
        output: str = "softmax",
        layers: list[str] = (),  # type: ignore[assignment]
        loss: str = "",
    ) -> None:
        super().__init__(crop_size, classes, dtype)
        for name in (*layers, loss):
            if name:
                __import__(name.partition(":")[0])
        layer = graph["layers"][0]
        self.parameters.add(bias(layer["name"], layer["units"]))

    def logits(self, images: Any, training: Any) -> Any:
        return images.sum(axis=(2, 3)) + self.parameters["dense.bias"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("tandem.nn.network")
    fake.GraphNetwork = FakeGraphNetwork  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tandem.nn.network", fake)
    (tmp_path / f"{FOREIGN}.py").write_text("Swish = int\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, FOREIGN, raising=False)


def save(path: Path, **options: Any) -> Path:
    description = NetworkDescription(
        8, 3, 1.0, network=GRAPH_NETWORK, options={"graph": GRAPH, **options}
    )
    weights = {"dense.bias": np.arange(3, dtype=np.float32)}
    save_checkpoint(path, Checkpoint(weights, {}, description))
    return path


@pytest.fixture
def mean(tmp_path: Path) -> Path:
    np.save(tmp_path / "mean.npy", np.zeros((3, 8, 8), np.float32))
    return tmp_path / "mean.npy"


@pytest.mark.parametrize("named", [{}, {"network": GRAPH_NETWORK}])
def test_a_graph_needs_no_name(tmp_path: Path, mean: Path, named: dict[str, str]) -> None:
    loaded = load_network(save(tmp_path / "w.safetensors"), mean, **named)
    assert loaded.description.options == {"graph": GRAPH}
    np.testing.assert_array_equal(loaded.network.parameters["dense.bias"].get_value(), [0, 1, 2])


def test_another_network_that_is_named_is_expected(tmp_path: Path, mean: Path) -> None:
    weights = save(tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"of the network tandem\.nn.*, not examples\.le_net:LeN"):
        load_network(weights, mean, "examples.le_net:LeNet")


@pytest.mark.parametrize("network", [None, GRAPH_NETWORK])
@pytest.mark.parametrize("layers", [[OWN], [OWN, "another:Layer"], OWN])
def test_code_that_a_file_names_is_not_imported(
    tmp_path: Path, mean: Path, network: str | None, layers: Any
) -> None:
    weights = save(tmp_path / "w.safetensors", layers=layers)
    arguments = {} if network is None else {"network": network}
    for own in ([], ["another:Layer"], ["a_foreign_module:Other"]):
        with pytest.raises(InputError, match=r"found a_foreign.* expected only .* say --layers a_"):
            load_network(weights, mean, **arguments, layers=own)
    assert FOREIGN not in sys.modules


@pytest.mark.parametrize("layers", [[[OWN]], {OWN: 1}, [{"a": OWN}]])
def test_layers_of_other_types_are_refused(tmp_path: Path, mean: Path, layers: Any) -> None:
    weights = save(tmp_path / "w.safetensors", layers=layers)
    with pytest.raises(InputError, match=r"layers of .* is "):
        load_network(weights, mean)
    assert FOREIGN not in sys.modules


def test_layers_that_are_named_are_imported(tmp_path: Path, mean: Path) -> None:
    load_network(save(tmp_path / "w.safetensors", layers=[OWN]), mean, layers=[OWN])
    assert FOREIGN in sys.modules


def test_a_loss_is_not_needed(tmp_path: Path, mean: Path) -> None:
    loaded = load_network(save(tmp_path / "w.safetensors", loss=f"{FOREIGN}:loss"), mean)
    assert loaded.description.options == {"graph": GRAPH}
    assert FOREIGN not in sys.modules


def test_a_graph_in_a_header_is_json(tmp_path: Path) -> None:
    """Also in descriptions that are sent to other processes."""
    description = NetworkDescription(8, 3, 1.0, network=GRAPH_NETWORK, options={"graph": GRAPH})
    assert NetworkDescription(**json.loads(json.dumps(description.header()))) == description
    assert build_network(description).parameters["dense.bias"].type.shape == (3,)
