"""Files of earlier versions are read as before: checkpoints of optimizers and networks, settings.

``earlier.tar.xz`` has checkpoints of AlexNet at width 0.01 after an epoch on the pictures of
`tests.support.tiny.prepare`, one of each network with random weights, the logits of each for two
pictures of normal numbers with seed 99, and the settings' defaults, all written by the commit
e7fbb40.
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytensor
import pytest

from alex_net import AlexNet
from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, verify_checkpoint
from tandem.backend import device_mode
from tandem.config.schema import Config, make_config
from tandem.layers.network import build_network
from tandem.optim import OPTIMIZERS
from tests.support.runs import train
from tests.support.tiny import prepare

DTYPES = {
    "sgd": "float32",
    "rmsprop": "float32",
    "adam": "float64",
    "adamw": "float32",
    "nadam": "float64",
}
QUICK = ("alex_net", "vgg11", "googlenet", "resnet20", "mobilenet", "wide_resnet")
LARGER = ("vgg16", "googlenet_bn", "resnet18", "resnet50", "densenet121", "densenet100")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(Path(__file__).with_name("earlier.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_no_setting_has_gone_or_has_another_default(earlier: Path) -> None:
    before = json.loads((earlier / "settings.json").read_text())
    now = Config().model_dump(mode="json")
    assert {key: now.get(key, "gone") for key in before} == before


@pytest.mark.parametrize(("optimizer", "dtype"), DTYPES.items())
def test_a_checkpoint_has_what_its_network_and_optimizer_ask_for(
    earlier: Path, optimizer: str, dtype: str
) -> None:
    file = earlier / f"{optimizer}.safetensors"
    verify_checkpoint(file)
    checkpoint: Checkpoint = read_checkpoint(file)
    net = AlexNet(67, 3, 0.01, dtype=dtype)
    shapes = {name: value.type.shape for name, value in net.parameters.items()}
    config = dict(make_config(checkpoint.config))
    assert config["optimizer"] == optimizer
    states = OPTIMIZERS.chosen(config).states
    for arrays in (checkpoint.weights, *checkpoint.states.values()):
        assert {name: array.shape for name, array in arrays.items()} == shapes
        assert {array.dtype for array in arrays.values()} == {np.dtype(dtype)}
    assert set(checkpoint.states) == set(states)
    assert (checkpoint.state.epoch, checkpoint.state.step) == (1, 7)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)]
)
def test_a_network_computes_what_it_did(earlier: Path, name: str) -> None:
    checkpoint = read_checkpoint(earlier / f"{name}.safetensors")
    dtype = next(iter(checkpoint.weights.values())).dtype.name
    network = build_network(checkpoint.network, dtype)
    for parameter, value in checkpoint.weights.items():
        network.parameters[parameter].set_value(value)
    assert {*network.parameters} == {*checkpoint.weights}
    images = network.images()
    logits = pytensor.function([images], network.logits(images, None), mode=device_mode("cpu"))
    side = checkpoint.network.crop_size
    pictures = np.random.default_rng(99).normal(size=(2, 3, side, side)).astype(dtype)
    expected = json.loads((earlier / "logits.json").read_text())[name]
    np.testing.assert_allclose(logits(pictures), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", DTYPES)
def test_a_run_continues(earlier: Path, tmp_path: Path, optimizer: str) -> None:
    data, run = prepare(tmp_path / "data"), tmp_path / "run"
    run.mkdir()
    shutil.copy(earlier / f"{optimizer}.safetensors", run / "epoch-0001.safetensors")
    same = {"optimizer": optimizer, "precision": DTYPES[optimizer], "width": 0.01}
    # The archive is of another processor, which may choose other convolutions.
    train(data, run, **same, devices=["cpu"], n_epochs=2, resume_train=True, exact=False)
    assert read_checkpoint(run / "epoch-0002.safetensors").state.step == 14
