"""Keras's models as networks of the programs, files of them, and models of checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem.keras
from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, read_header, save_checkpoint
from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.schema import Config
from tandem.convert.cli import run_conversion
from tandem.errors import InputError
from tandem.launch import keras_models
from tandem.launch.keras_models import with_keras_model
from tandem.layers.network import KERAS_NETWORK, NetworkDescription
from tests.support.keras_models import keras
from tests.support.runs import train_log
from tests.support.tiny import prepare, run_program, settings

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def small() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, activation="relu", name="first", trainable=False),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2, activation="softmax"),
        ]
    )


def convert(*arguments: object) -> int:
    return run_conversion([str(argument) for argument in arguments], None)


def test_a_file_of_keras_becomes_a_checkpoint_and_comes_back(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path / "model.keras")
    checkpoint = tmp_path / "model.safetensors"
    assert convert(tmp_path / "model.keras", checkpoint) == 0
    network = read_header(checkpoint).network
    assert (network.crop_size, network.classes) == (8, 2)
    assert network.options["output"] == "softmax"
    assert convert(checkpoint, tmp_path / "again.keras") == 0
    again = tandem.keras.load_model(tmp_path / "again.keras")
    x = np.random.default_rng(0).uniform(0, 255, (3, 8, 8, 3))
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_file_does_not_decide_what_is_imported(tmp_path: Path) -> None:
    small().save(tmp_path / "model.keras")
    path = tmp_path / "model.safetensors"
    assert convert(tmp_path / "model.keras", path) == 0
    found = read_checkpoint(path)
    text = json.dumps(found.network.options)
    for old, new in [
        (
            '"module": "keras.layers", "class_name": "Dense"',
            '"module": "os", "class_name": "Dense"',
        ),
        ('"activation": "softmax"', '"activation": {"class_name": "__lambda__", "config": {}}'),
    ]:
        assert old in text
        object.__setattr__(found.network, "options", json.loads(text.replace(old, new)))
        save_checkpoint(path, found)
        with pytest.raises(InputError, match="a file does not decide what code is run"):
            tandem.keras.load_model(path)


def test_what_is_no_keras_model_is_refused(tmp_path: Path) -> None:
    from tandem.keras.loading import find_model

    with pytest.raises(InputError, match="found no checkpoint, expected the folder of a run"):
        tandem.keras.load_model(tmp_path)
    with pytest.raises(InputError, match=r"found no file nothing\.keras"):
        find_model("nothing.keras", {})
    with pytest.raises(InputError, match=r"found no Nothing in keras\.applications"):
        find_model("keras.applications:Nothing", {})
    with pytest.raises(InputError, match="network_options: MobileNet cannot be made"):
        find_model("keras.applications:MobileNet", {"alpha": "a"})


def test_a_run_keeps_its_model_and_a_new_one_takes_the_model_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    converted: list[str] = []

    def convert_here(name: str, target: Path, options: Any, conditions: dict[str, str]) -> None:
        converted.append(Path(name).read_text())
        network = NetworkDescription(8, 2, 1.0, network=KERAS_NETWORK, options={"model": {}})
        save_checkpoint(
            target, Checkpoint({"a.weight": np.ones(1, "f4")}, {}, network, conditions=conditions)
        )

    monkeypatch.setattr(keras_models, "_convert", convert_here)
    path, run = tmp_path / "a.keras", tmp_path / "run"
    run.mkdir()
    config = Config(network=str(path), weights_dir=str(run))
    for text in ("first", "second", "second"):
        path.write_text(text)
        found = with_keras_model(config, run)
        assert (found.network, found.crop_size) == (KERAS_NETWORK, 8)
    assert converted == ["first", "second"]
    (run / "epoch-0001.safetensors").touch()  # a checkpoint of the second
    with_keras_model(config, run)
    path.write_text("third")
    assert not caplog.records
    with_keras_model(config, run)
    assert f"{path} is not the file of which the checkpoints in {run} are" in caplog.text
    path.unlink()  # no longer needed
    assert with_keras_model(config, run).network == KERAS_NETWORK
    assert converted == ["first", "second"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "application"])
def test_the_program_trains_a_keras_model(tmp_path: Path, kind: str) -> None:
    size = 8 if kind == "file" else 32
    data = prepare(tmp_path / "data", train=12, image_size=size)
    classes = len(json.loads((data / "manifest.json").read_text())["wnids"])
    layers = keras.layers
    name, options = "keras.applications:MobileNet", {"alpha": 0.25}
    if kind == "file":
        model = small()
        model.pop()
        model.add(layers.Dense(classes, activation="softmax"))
        name, options = str(tmp_path / "model.keras"), {}
        model.save(name)
    run = tmp_path / "run"
    changes = {"network": name, "crop_size": size, "width": 1.0, "batch_size": 4, "norm_rows": 4}
    changes["network_options"] = json.dumps(options)
    tried = run_program("train.py", [*settings(data, run, **changes), "--try"])
    assert tried.returncode == 0, tried.stderr
    assert not run.exists()
    train_log(data, run, **changes)
    newest = list_checkpoints(run)[-1]
    trained = tandem.keras.load_model(run)
    assert trained.output_shape == (None, classes)
    if kind == "file":
        frozen = trained.get_layer("first").get_weights()[0]
        np.testing.assert_array_equal(frozen, model.get_layer("first").get_weights()[0])
    for named in ([], ["--network", name]):
        validated = run_program("validate.py", ["--weights", str(newest), *named])
        assert validated.returncode == 0, validated.stderr
    again = train_log(data, run, **changes, n_epochs=2, resume_train=True)
    assert "freeze was" not in again
