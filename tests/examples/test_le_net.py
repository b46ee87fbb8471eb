"""The worked example of docs/another-network.md: the network by itself, and in every program."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytensor
import pytensor.tensor as pt
import pytest
from PIL import Image

from examples.le_net import CONTRAST, LeNet
from tandem.backend import device_mode
from tandem.classify.cli import run_classification
from tandem.config.command_line import load_config
from tandem.errors import InputError
from tandem.export.cli import main as export
from tandem.launch.prepare import prepare_run
from tests.support.runs import train
from tests.support.tiny import prepare, read_record, run_program, settings

NAME = "examples.le_net:LeNet"


def correlate(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """(channel, row, column) by (filter, channel, row, column), one output at a time."""
    size = weight.shape[-1]
    side = x.shape[-1] - size + 1
    result = np.empty((len(weight), side, side))
    for f, row, column in np.ndindex(result.shape):
        window = x[:, row : row + size, column : column + size]
        result[f, row, column] = (window * weight[f]).sum() + bias[f]
    return result


def pool(x: np.ndarray) -> np.ndarray:
    side = x.shape[-1] // 2
    result = np.empty((len(x), side, side))
    for f, row, column in np.ndindex(result.shape):
        window = x[f, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        result[f, row, column] = window.max()
    return result


def slow_logits(values: dict[str, np.ndarray], picture: np.ndarray) -> np.ndarray:
    x = picture / CONTRAST[0]
    for name in ("conv1", "conv2"):
        x = correlate(x, values[f"{name}.weight"], values[f"{name}.bias"])
        x = pool(np.maximum(x, 0))
    hidden = np.maximum(x.reshape(-1) @ values["fc3.weight"] + values["fc3.bias"], 0)
    return hidden @ values["fc4.weight"] + values["fc4.bias"]


def test_it_computes_what_its_docstring_says() -> None:
    net = LeNet(crop_size=18, classes=3, width=0.1, dtype="float64")
    values = dict(net.initial_values(seed=2))
    rng = np.random.default_rng(0)
    for name, variable in net.parameters.items():
        if net.parameters.declared[name].kind != "weight":
            values[name] = rng.normal(size=variable.type.shape)
        variable.set_value(values[name])
    images = pt.tensor("images", dtype="float64", shape=(2, 3, 18, 18))
    compute = pytensor.function([images], net.logits(images, None), mode=device_mode("cpu"))
    pictures = 64 * rng.normal(size=(2, 3, 18, 18))
    expected = [slow_logits(values, picture) for picture in pictures]
    np.testing.assert_allclose(compute(pictures), expected, rtol=1e-9)


def test_the_sizes_are_those_of_caffes_example() -> None:
    net = LeNet(crop_size=28, classes=10, width=1.0, dtype="float32")
    shapes = {name: variable.type.shape for name, variable in net.parameters.items()}
    assert shapes["conv1.weight"] == (20, 3, 5, 5)
    assert shapes["conv2.weight"] == (50, 20, 5, 5)
    assert shapes["fc3.weight"] == (800, 500)
    assert shapes["fc4.weight"] == (500, 10)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data set and checkpoint of a run of two trainers."""
    folder = tmp_path_factory.mktemp("le_net")
    data, run = prepare(folder / "data", train=32, image_size=20), folder / "run"
    changes = {"network": NAME, "crop_size": 18, "width": 0.5, "learning_rate": 0.01}
    trainers = {"batch_size": 4, "devices": ["cpu", "cpu"], "n_epochs": 6}
    train(data, run, **changes, **trainers)
    return data, run / "epoch-0006.safetensors"


@pytest.mark.slow
def test_it_learns_with_two_trainers(trained: tuple[Path, Path]) -> None:
    lines = [line for line in read_record(trained[1].parent) if line["event"] == "train"]
    losses = [float(str(line["loss"])) for line in lines]
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:4])


@pytest.mark.slow
def test_validation_takes_it_by_name(trained: tuple[Path, Path], tmp_path: Path) -> None:
    data, weights = trained
    arguments = settings(data, tmp_path / "run", crop_size=18, width=0.5)
    result = run_program("validate.py", [*arguments, "--network", NAME, "--weights", str(weights)])
    assert result.returncode == 0, result.stderr
    last = [line for line in read_record(weights.parent) if line["event"] == "validation"][-1]
    assert json.loads(result.stdout)["loss"] == pytest.approx(last["loss"], rel=1e-5)
    with pytest.raises(InputError, match=f"say --network {NAME}"):
        prepare_run(load_config(arguments), "validate", weights)


@pytest.mark.slow
def test_classification_and_export_take_it_by_name(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, target = tmp_path / "grey.png", tmp_path / "le_net.onnx"
    Image.new("RGB", (30, 30), (200, 200, 200)).save(picture)
    weights = str(trained[1])
    classify = ["--weights", weights, "--json", str(picture)]
    assert run_classification(classify, None) == 2
    assert f"say --network {NAME}" in capsys.readouterr().err
    assert run_classification(["--network", NAME, *classify], None) == 0
    assert len(json.loads(capsys.readouterr().out)["guesses"]) == 3
    assert export([weights, str(target), "--network", NAME]) == 0
    assert onnx.load(target).graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8


@pytest.mark.slow
def test_a_missing_network_is_bad_input(tmp_path: Path) -> None:
    data = prepare(tmp_path / "data", image_size=70)
    result = run_program("train.py", settings(data, tmp_path / "run", network="nowhere:Net"))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: network: there is no module 'nowhere'")
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())
