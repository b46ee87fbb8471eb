"""What earlier versions wrote is read as before: checkpoints of each optimizer, and settings.

``earlier.tar.xz`` has checkpoints of AlexNet's at width 0.01 after an epoch on the pictures of
`tests.support.tiny.prepare`, and the settings' defaults, all written by the commit e7fbb40.
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from alex_net import AlexNet
from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, verify_checkpoint
from tandem.config.schema import Config, make_config
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


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", DTYPES)
def test_a_run_continues(earlier: Path, tmp_path: Path, optimizer: str) -> None:
    data, run = prepare(tmp_path / "data"), tmp_path / "run"
    run.mkdir()
    shutil.copy(earlier / f"{optimizer}.safetensors", run / "epoch-0001.safetensors")
    same = {"optimizer": optimizer, "precision": DTYPES[optimizer], "width": 0.01}
    train(data, run, **same, devices=["cpu"], n_epochs=2, resume_train=True)
    assert read_checkpoint(run / "epoch-0002.safetensors").state.step == 14
