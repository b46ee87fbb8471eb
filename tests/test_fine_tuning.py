"""Runs that begin with the weights of another: what stays, what is new, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import train as program
from tandem.artifacts.checkpoint import read_checkpoint
from tests.support.tiny import prepare, run_program, settings

FROZEN = ["conv1", "conv2"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a network for three classes."""
    folder = tmp_path_factory.mktemp("three")
    return train(prepare(folder / "data"), folder / "run", batch_size=6, learning_rate=0.05)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of four classes."""
    return prepare(tmp_path_factory.mktemp("four"), classes=4, seed=1)


def train(data: Path, run: Path, **changes: object) -> Path:
    """Train, check that it went well, and give the checkpoint after the first epoch."""
    result = run_program("train.py", settings(data, run, **changes))
    assert result.returncode == 0, result.stderr
    return run / "epoch-0001.safetensors"


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
    path = train(
        data,
        tmp_path / "run",
        init_weights=weights,
        init_weights_skip=["fc8"],
        freeze=FROZEN,
        lr_multipliers="{fc8: 10}",
        exchange=exchange,
        devices=["cpu"] * trainers,
        check_every=1,
    )
    before, after = load_file(weights), load_file(path)
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
    found = []
    for trainers in (1, 2):
        path = train(
            data,
            tmp_path / str(trainers),
            init_weights=weights,
            init_weights_skip=["fc8"],
            freeze=["conv1", "conv4", "fc7"],
            lr_multipliers="{fc8: 10, conv3: .5}",
            devices=["cpu"] * trainers,
            batch_size=6 // trainers,
            precision="float64",
            learning_rate=0.05,
        )
        found.append(load_file(path))
    for name, value in found[0].items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[1][name], value, rtol=0, atol=1e-9 * scale, err_msg=name)


@pytest.mark.slow
def test_a_resumed_fine_tuning_continues_with_the_same_bits(
    weights: Path, data: Path, tmp_path: Path
) -> None:
    common = {
        "init_weights": weights,
        "init_weights_skip": ["fc8"],
        "freeze": FROZEN,
        "batch_size": 6,
    }
    train(data, tmp_path / "whole", n_epochs=2, **common)
    train(data, tmp_path / "parts", **common)
    train(data, tmp_path / "parts", n_epochs=2, resume_train=True, **common)
    whole, parts = (
        load_file(tmp_path / name / "epoch-0002.safetensors") for name in ("whole", "parts")
    )
    assert all(parts[name].tobytes() == whole[name].tobytes() for name in whole)
    config = read_checkpoint(tmp_path / "parts" / "epoch-0002.safetensors").config
    assert (config["freeze"], config["lr_multipliers"]) == (FROZEN, {})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["fc8.weight is", "there", "init_weights_skip: [fc8]"]),
        ({"init_weights_skip": ["fc9"]}, ["init_weights_skip", "'fc9'", "did you mean fc8?"]),
        pytest.param(
            {"freeze": ["conv6"]}, ["freeze", "'conv6'", "mean conv"], marks=pytest.mark.slow
        ),
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
