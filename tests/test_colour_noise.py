"""Runs with colour noise: the same bits however pictures reach the device; what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.config.command_line import load_config
from tandem.errors import InputError
from tandem.launch.prepare import prepare_run
from tests.support.runs import assert_close, assert_same_weights, train, weights
from tests.support.tiny import run_program, save_weights, settings

slow = pytest.mark.slow
coloured = partial(train, rand_colour=5.0, n_epochs=2, precision="float64")


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose loader process crops, with a short last minibatch."""
    return coloured(data, tmp_path_factory.mktemp("alone") / "run", batch_size=6)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"use_data_layer": True},
        {"para_load": False},
        {"para_load": False, "use_data_layer": True},
        {"loader_threads": 3},
    ],
)
def test_how_pictures_are_loaded_does_not_change_a_bit(
    data: Path, tmp_path: Path, alone: Path, changes: dict[str, Any]
) -> None:
    assert_same_weights(coloured(data, tmp_path / "run", batch_size=6, **changes), alone)


@slow
@pytest.mark.parametrize("exchange", ["average", "gradients"])
def test_each_picture_has_its_colour_whoever_trains_on_it(
    data: Path, tmp_path: Path, alone: Path, exchange: str
) -> None:
    changes = {"batch_size": 2, "devices": ["cpu"] * 3, "exchange": exchange}
    assert_close(coloured(data, tmp_path / "run", **changes), alone, 1e-9)


@slow
def test_a_resumed_run_has_the_same_colours(data: Path, tmp_path: Path, alone: Path) -> None:
    parts = tmp_path / "parts"
    coloured(data, parts, batch_size=6, n_epochs=1)
    result = run_program(
        "train.py",
        settings(data, parts, batch_size=6, n_epochs=2, precision="float64", resume_train=True),
    )
    assert result.returncode == 2
    assert "rand_colour 5.0 by the covariance of checksum" in result.stderr
    coloured(data, parts, batch_size=6, resume_train=True)
    assert_same_weights(parts, alone)


@slow
def test_it_makes_a_difference(data: Path, tmp_path: Path, alone: Path) -> None:
    plain = train(data, tmp_path / "run", n_epochs=2, precision="float64", batch_size=6)
    assert any((weights(plain)[name] != weights(alone)[name]).any() for name in weights(alone))


def test_without_the_covariance_a_run_is_refused(data: Path, tmp_path: Path) -> None:
    """A validation needs none: it has no noise."""
    config = load_config(
        settings(data, tmp_path / "run", rand_colour=0.1, mean_file="moved/img_mean.npy")
    )
    (data / "moved").mkdir()
    (data / "moved" / "img_mean.npy").hardlink_to(data / "misc" / "img_mean.npy")
    with pytest.raises(InputError, match=r"moved/colour_covariance\.npy \(rand_colour\): found no"):
        prepare_run(config)
    checkpoint = save_weights(tmp_path / "w.safetensors", None, 3)
    assert prepare_run(config, "validate", checkpoint).colour_basis == ()
