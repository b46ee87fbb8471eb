"""`fit` by one trainer, and what can be done with what it leaves."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem import nn
from tandem.artifacts.checkpoint import read_checkpoint, read_header, save_checkpoint
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records
from tandem.artifacts.run_folder import list_checkpoints
from tandem.data.reader import PictureReader
from tandem.errors import InputError
from tests.nn.conftest import Trained


def test_the_history_has_every_epoch_and_the_model_has_learnt(trained: Trained) -> None:
    history = trained.history
    assert history.epoch == [*range(6)]
    assert [*history.history] == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert {len(values) for values in history.history.values()} == {6}
    assert history.history["val_accuracy"][-1] > 0.85
    assert history.history["loss"][-1] < history.history["loss"][0] / 2


def test_the_history_is_a_mean_over_the_rows_of_an_epoch(trained: Trained) -> None:
    records = read_records(trained.history.run / "record.jsonl")
    first = [r for r in records if isinstance(r, TrainRecord) and r.epoch == 1]
    assert sum(record.images for record in first) == 256
    mean = sum(r.loss * r.images for r in first) / 256
    assert trained.history.history["loss"][0] == pytest.approx(mean)


def test_evaluation_gives_what_the_run_measured(trained: Trained) -> None:
    x, y = trained.x[256:], trained.y[256:]
    found = trained.model.evaluate(x, y, return_dict=True)
    assert found["loss"] == pytest.approx(trained.history.history["val_loss"][-1], rel=1e-5)
    assert found["accuracy"] == trained.history.history["val_accuracy"][-1]
    assert trained.model.evaluate(x, y, batch_size=7) == pytest.approx([*found.values()], rel=1e-5)


def test_a_prediction_is_repeatable_and_agrees_with_the_evaluation(trained: Trained) -> None:
    found = trained.model.predict(trained.x)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, trained.model.predict(trained.x))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    accuracy = (found.argmax(axis=1) == trained.y)[256:].mean()
    assert accuracy == pytest.approx(trained.history.history["val_accuracy"][-1])
    as_numbers = trained.model.predict(trained.x.astype(float)[..., np.newaxis])
    np.testing.assert_allclose(as_numbers, found, atol=1e-6)


def test_the_rows_are_stored_in_their_order(trained: Trained) -> None:
    """The last ones are for validation, and are not augmented."""
    from tandem.data.dataset import open_split
    from tandem.data.manifest import read_any_manifest

    folder = trained.history.run / "data"
    manifest = read_any_manifest(folder / "manifest.json")
    for split, rows in (("train", slice(0, 256)), ("val", slice(256, None))):
        dataset = open_split(manifest, folder, split, folder / "labels")
        pictures = np.empty((dataset.size, 8, 8, 3), np.uint8)
        with PictureReader(dataset) as reader:
            reader.read(np.arange(dataset.size), pictures)
            np.testing.assert_array_equal(reader.labels(range(dataset.size)), trained.y[rows])
        for channel in range(3):
            np.testing.assert_array_equal(pictures[..., channel], trained.x[rows])
    config = read_header(list_checkpoints(trained.history.run)[-1]).config
    assert config["rand_crop"] is config["rand_mirror"] is False


@pytest.mark.parametrize("whole_folder", [True, False])
def test_a_model_comes_back_from_a_run(trained: Trained, whole_folder: bool) -> None:
    run = trained.history.run
    loaded = nn.load_model(run if whole_folder else list_checkpoints(run)[-1])
    np.testing.assert_array_equal(loaded.predict(trained.x), trained.model.predict(trained.x))
    one_hot = np.eye(2)[trained.y]
    for targets in (trained.y, one_hot):
        assert loaded.evaluate(trained.x, targets) == trained.model.evaluate(trained.x, trained.y)


def test_a_model_comes_back_from_a_file(trained: Trained, tmp_path: Path) -> None:
    trained.model.save(tmp_path / "model.safetensors")
    loaded = nn.load_model(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict(trained.x), trained.model.predict(trained.x))
    assert loaded.evaluate(trained.x, trained.y) == trained.model.evaluate(trained.x, trained.y)


def test_a_model_that_is_compiled_anew_is_saved_as_it_is(trained: Trained, tmp_path: Path) -> None:
    model = nn.load_model(trained.history.run)
    model.compile("sgd", "mse", ["mae"])
    model.save(tmp_path / "model.safetensors")
    assert read_header(tmp_path / "model.safetensors").network.options["output"] == "linear"
    loaded = nn.load_model(tmp_path / "model.safetensors")
    assert loaded.compiled().names == {"mae": "mae"}
    one_hot = np.eye(2)[trained.y]
    assert loaded.evaluate(trained.x, one_hot) == model.evaluate(trained.x, one_hot)


def test_the_graph_in_a_checkpoint_is_data(trained: Trained) -> None:
    network = read_header(list_checkpoints(trained.history.run)[-1]).network
    assert network.wnids == ("across", "down")
    assert network.options["output"] == "softmax"
    assert json.loads(json.dumps(network.options["graph"])) == trained.model.graph.to_json()


def test_a_file_does_not_decide_what_a_model_imports(trained: Trained, tmp_path: Path) -> None:
    path, name = tmp_path / "model.safetensors", "module_of_a_file"
    newest = read_checkpoint(list_checkpoints(trained.history.run)[-1])
    options = {**newest.network.options, "loss": f"{name}:loss"}
    config = {**newest.config, "metrics": ["accuracy", f"{name}:metric"]}
    save_checkpoint(path, replace(newest, config=config))
    loaded = nn.load_model(path)
    assert loaded.compiled().metrics == {"accuracy": "accuracy"}
    loaded.evaluate(trained.x, trained.y)
    save_checkpoint(path, replace(newest, network=replace(newest.network, options=options)))
    loaded = nn.load_model(path)
    np.testing.assert_array_equal(loaded.predict(trained.x), trained.model.predict(trained.x))
    with pytest.raises(InputError, match="expected a call of compile first"):
        loaded.evaluate(trained.x, trained.y)
    assert name not in sys.modules


def test_a_checkpoint_of_another_network_is_no_model(tmp_path: Path) -> None:
    from tests.support.tiny import save_weights

    path = save_weights(tmp_path / "alexnet.safetensors", ("a", "b"))
    with pytest.raises(InputError, match="found the network alex_net:AlexNet, expected a model"):
        nn.load_model(path)


def test_an_empty_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found no checkpoint, expected the folder of a run"):
        nn.load_model(tmp_path)


def test_event_files_are_written(trained: Trained) -> None:
    assert [*trained.history.run.glob("events.out.tfevents*")]


def test_a_finished_run_is_not_trained_again(trained: Trained) -> None:
    """Nothing is started: the history is that of the run."""
    model = nn.load_model(trained.history.run)
    again = model.fit(
        trained.x,
        trained.y,
        batch_size=32,
        epochs=6,
        validation_split=0.2,
        devices=["cpu"],
        run=trained.history.run,
        resume=True,
        verbose=0,
        class_names=["across", "down"],
        learning_rate=0.04,
    )
    assert again.history == trained.history.history


def test_other_arrays_do_not_continue_a_run(trained: Trained) -> None:
    other = trained.x.copy()
    other[0, 0, 0] ^= 1
    with pytest.raises(InputError, match="found a data set of other arrays"):
        trained.model.fit(
            other, trained.y, batch_size=32, validation_split=0.2, run=trained.history.run,
            resume=True, devices=["cpu"], verbose=0,
        )  # fmt: skip


def test_a_run_that_holds_a_run_is_refused(trained: Trained) -> None:
    with pytest.raises(InputError, match="continue it with resume=True, or choose another"):
        trained.model.fit(trained.x, trained.y, run=trained.history.run, devices=["cpu"])


@pytest.mark.slow
def test_programs_take_the_checkpoints(trained: Trained, tmp_path: Path) -> None:
    from PIL import Image

    from tests.support.tiny import run_program

    weights = list_checkpoints(trained.history.run)[-1]
    result = run_program("validate.py", ["--weights", str(weights)])
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    last = read_records(trained.history.run / "record.jsonl")[-1]
    assert isinstance(last, ValidationRecord)
    assert found["loss"] == pytest.approx(last.loss, rel=1e-5)
    Image.fromarray(trained.x[0]).save(tmp_path / "bar.png")
    result = run_program(
        "classify.py", [str(tmp_path / "bar.png"), "--weights", str(weights), "--json"]
    )
    assert result.returncode == 0, result.stderr
    best = trained.model.predict(trained.x[:1]).argmax()
    assert ("across", "down")[best] in result.stdout.split("}")[0]
    target = tmp_path / "model.onnx"
    command = [sys.executable, "-m", "tandem.export", str(weights), str(target)]
    subprocess.run(command, check=True, timeout=120)
    import onnxruntime

    session = onnxruntime.InferenceSession(target)
    pictures = np.repeat(trained.x[:8, ..., np.newaxis], 3, axis=-1)
    probabilities = session.run(["probabilities"], {"pictures": pictures})[0]
    expected = trained.model.predict(trained.x[:8])
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
