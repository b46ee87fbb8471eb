"""Runs that begin with the weights of another: what stays, what is new, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import train as program
from tandem.artifacts.checkpoint import read_checkpoint
from tests.support.runs import assert_close, assert_same_weights, train
from tests.support.runs import weights as weights_of
from tests.support.tiny import prepare, settings

FROZEN = ["conv1", "conv2"]
NEW = {"init_weights_skip": ["fc8"]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a network for three classes."""
    folder = tmp_path_factory.mktemp("three")
    train(prepare(folder / "data"), folder / "run", batch_size=6, learning_rate=0.05)
    return folder / "run" / "epoch-0001.safetensors"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of four classes."""
    return prepare(tmp_path_factory.mktemp("four"), classes=4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainers", "exchange"),
    [
        pytest.param(3, "average", marks=pytest.mark.slow),
        (2, "gradients"),
        pytest.param(1, "average", marks=pytest.mark.slow),
        pytest.param(3, "gradients", marks=pytest.mark.slow),
    ],
)
def test_frozen_layers_keep_every_bit_and_the_skipped_one_is_new(
    weights: Path, data: Path, tmp_path: Path, trainers: int, exchange: str
) -> None:
    """Three trainers' shares are thirds, and of a last minibatch others, which all round."""
    changes = {**NEW, "freeze": FROZEN, "lr_multipliers": "{fc8: 10}", "exchange": exchange}
    changes |= {"init_weights": weights, "devices": ["cpu"] * trainers, "check_every": 1}
    before, after = load_file(weights), weights_of(train(data, tmp_path / "run", **changes))
    for name, value in after.items():
        layer = name.removeprefix("momentum/").partition(".")[0]
        if layer == "fc8":
            assert value.shape[-1] == 4
        elif layer in FROZEN:
            assert (value == (0 if "momentum" in name else before[name])).all(), name
        else:
            assert (value != before[name]).any(), name


@pytest.mark.slow
def test_the_number_of_trainers_changes_nothing(weights: Path, data: Path, tmp_path: Path) -> None:
    changes = {**NEW, "init_weights": weights, "freeze": ["conv1", "conv4", "fc7"]}
    changes |= {"lr_multipliers": "{fc8: 10, conv3: .5}"}
    changes |= {"precision": "float64", "learning_rate": 0.05}
    one = train(data, tmp_path / "one", **changes, batch_size=6)
    two = train(data, tmp_path / "two", **changes, batch_size=3, devices=["cpu"] * 2)
    assert_close(two, one, 1e-9)


@pytest.mark.slow
def test_a_resumed_fine_tuning_continues_with_the_same_bits(
    weights: Path, data: Path, tmp_path: Path
) -> None:
    common = {**NEW, "init_weights": weights, "freeze": FROZEN, "batch_size": 6}
    train(data, tmp_path / "whole", n_epochs=2, **common)
    train(data, tmp_path / "parts", **common)
    train(data, tmp_path / "parts", n_epochs=2, resume_train=True, **common)
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")
    config = read_checkpoint(tmp_path / "parts" / "epoch-0002.safetensors").config
    assert (config["freeze"], config["lr_multipliers"]) == (FROZEN, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["fc8.weight is", "there", "init_weights_skip: [fc8]"]),
        ({"init_weights_skip": ["fc9"]}, ["init_weights_skip", "'fc9'", "did you mean fc8?"]),
        ({"freeze": ["conv6"]}, ["freeze", "'conv6'", "mean conv"]),
    ],
)
def test_what_does_not_fit_is_refused(
    weights: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    expected: list[str],
) -> None:
    arguments = settings(data, tmp_path / "run", init_weights=weights, **changes)
    assert program.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    assert all(text in errors for text in expected), errors


@pytest.mark.slow
def test_layers_that_were_frozen_learn_later(
    weights: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their averages are themselves; what is divided by counts begins anew, or is refused."""
    common = {**NEW, "init_weights": weights, "batch_size": 6}
    averaged = {**common, "average_weights": 0.9, "average_overwrites": 1}
    before = weights_of(train(data, tmp_path / "sgd", freeze=FROZEN, **averaged))
    assert (before["weight_average/conv1.weight"] == before["conv1.weight"]).all()
    resumed = {"n_epochs": 2, "resume_train": True, "learning_rate": 1e-9}
    after = weights_of(train(data, tmp_path / "sgd", **averaged, **resumed))
    np.testing.assert_allclose(after["conv1.weight"], before["conv1.weight"], rtol=1e-3, atol=1e-6)

    train(data, tmp_path / "adam", freeze=FROZEN, optimizer="adam", **common)
    later = {**common, **resumed, "optimizer": "adam"}
    assert program.main(settings(data, tmp_path / "adam", **later)) == 2
    assert "freeze: found [], expected conv1, conv2 too" in capsys.readouterr().err
    train(data, tmp_path / "adam", freeze=FROZEN, **later)
    train(data, tmp_path / "adam", **later | {"n_epochs": 3}, exact=False)
