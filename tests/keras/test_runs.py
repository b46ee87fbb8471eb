"""Runs of Keras's models by our processes against Keras's own `fit`."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem.keras
from tandem.__main__ import run_verb
from tandem.artifacts.checkpoint import read_checkpoint, read_header
from tandem.artifacts.metrics_log import ValidationRecord, read_records
from tandem.artifacts.run_folder import RECORD, list_checkpoints
from tandem.data.manifest import read_any_manifest, read_manifest, write_manifest
from tandem.errors import InputError
from tandem.memory import RowType
from tests.support.keras_models import keras

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:__array__ implementation")]

Make = Any


def clone(model: Any) -> Any:
    """A model like another, with its weights and compiled alike."""
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    other.compile_from_config(model.get_compile_config())
    return other


def assert_equal_weights(ours: Any, theirs: Any, atol: float = 2e-4, rtol: float = 2e-3) -> None:
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(
            one.numpy(), other.numpy(), rtol=rtol, atol=atol, err_msg=one.path
        )


def pictures(rows: int = 640) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, 10, 10, 2)).astype(np.float32), rng.integers(0, 3, rows)


def classifier(optimizer: Any = "adam", **compiled: Any) -> Any:
    keras.utils.clear_session()  # so that names of layers are those of a new program
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((10, 10, 2)),
            layers.Conv2D(6, 3, padding="same", strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.DepthwiseConv2D(3, activation="tanh"),
            layers.AveragePooling2D(2, padding="same"),
            layers.Flatten(),
            layers.Dense(8, activation="elu", kernel_regularizer="l2"),
            layers.Dense(3, activation="softmax"),
        ]
    )
    given = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compiled}
    model.compile(optimizer=optimizer, **given)
    return model


def test_a_second_fit_goes_on_with_the_states_of_the_optimizer(tmp_path: Path) -> None:
    x, y = pictures(320)
    ours = classifier(keras.optimizers.Adam(0.005, clipnorm=0.5))
    theirs = clone(ours)
    tandem.keras.distribute(ours, ["cpu"], tmp_path / "run", norm_rows=16, precision="float32")
    for part in (slice(240), slice(80)):
        expected = theirs.fit(x[part], y[part], batch_size=16, shuffle=False, verbose=0)
        found = ours.fit(x[part], y[part], batch_size=16, shuffle=False, verbose=0)
        assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-3)
    assert_equal_weights(ours, theirs)
    assert int(ours.optimizer.iterations) == 20
    assert ours.evaluate(x, y, verbose=0) == pytest.approx(
        theirs.evaluate(x, y, verbose=0), rel=1e-2
    )


def test_one_two_and_three_trainers_learn_alike(tmp_path: Path) -> None:
    """Of 48 rows, in groups of 16; and a last step of 32, of which the third has none."""
    x, y = pictures(80)
    found = []
    for trainers in (1, 2, 3):
        model = classifier()
        tandem.keras.distribute(
            model,
            ["cpu"] * trainers,
            tmp_path / f"{trainers}",
            norm_rows=16,
            precision="float64",
        )
        history = model.fit(x, y, 48, 2, verbose=0, validation_data=(x[:31], y[:31]))
        found.append((history.history, model))
    for history, model in found[1:]:
        assert_equal_weights(model, found[0][1], atol=1e-7, rtol=1e-6)
        for key, values in found[0][0].items():
            assert history[key] == pytest.approx(values, rel=1e-6)


def test_sums_of_groups_of_rows_have_the_same_bits(tmp_path: Path) -> None:
    """Of six groups by one trainer and four; and by three that go on after two."""
    x, y = pictures(80)
    found = []
    for name, parts in (("one", [(1, 2)]), ("four", [(4, 2)]), ("others", [(2, 1), (3, 2)])):
        for trainers, epochs in parts:
            model = classifier()
            devices, run = ["cpu"] * trainers, tmp_path / name
            tandem.keras.distribute(model, devices, run, sum_rows=8, threads=1)
            given: Any = {"validation_data": (x[:31], y[:31]), "resume": trainers == 3}
            history = model.fit(x, y, 48, epochs, verbose=0, **given)
        found.append((history.history, [array.tobytes() for array in model.get_weights()]))
    assert found[0] == found[1] == found[2]


def two_headed() -> Any:
    keras.utils.set_random_seed(2)
    layers = keras.layers
    rows, steps = keras.Input((3,), name="rows"), keras.Input((4, 2), name="steps")
    joined = layers.Concatenate()([layers.Dense(4, "relu")(rows), layers.Flatten()(steps)])
    kind = layers.Dense(3, "softmax", name="classes")(joined)  # which is no output's name
    size = layers.Dense(2, name="size")(joined)
    each = layers.Dense(2, "softmax", name="each")(steps)
    model = keras.Model([rows, steps], {"kind": kind, "size": size, "each": each})
    model.compile(
        "sgd",
        {"kind": "sparse_categorical_crossentropy", "size": "huber", "each": "crossentropy"},
        loss_weights={"kind": 1.0, "size": 0.5, "each": 2.0},
        metrics={"kind": ["accuracy"], "size": ["mae"], "each": ["accuracy"]},
    )
    return model


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = {"steps": rng.normal(size=(50, 4, 2)), "rows": rng.normal(size=(50, 3))}
    y = {
        "kind": rng.integers(0, 3, 50),
        "size": rng.normal(size=(50, 2)),
        "each": rng.integers(0, 2, (50, 4)),
    }
    ours, theirs = two_headed(), two_headed()
    theirs.set_weights(ours.get_weights())
    tandem.keras.distribute(ours, ["cpu"], tmp_path / "run")
    arguments = {"batch_size": 20, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = theirs.fit(x, y, validation_split=0.2, **arguments)
    found = ours.fit(x, y, validation_split=0.2, **arguments)
    assert [*found.history] == [*expected.history]
    for key, values in expected.history.items():
        assert found.history[key] == pytest.approx(values, rel=1e-4), key
    assert_equal_weights(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("weights", ["class", "row"])
def test_weights_of_classes_and_of_rows(weights: str, tmp_path: Path) -> None:
    x, y = pictures(100)
    ours = classifier("sgd", weighted_metrics=["accuracy"])
    theirs = clone(ours)
    given: dict[str, Any] = {"class_weight": {0: 5.0, 1: 1.0, 2: 0.5}}
    if weights == "row":
        given = {"sample_weight": np.random.default_rng(0).uniform(0, 3, 100)}
    arguments = {"batch_size": 25, "epochs": 2, "shuffle": False, "verbose": 0, **given}
    tandem.keras.distribute(ours, ["cpu"], tmp_path / "run", norm_rows=25)
    arguments["validation_data"] = (
        x[:20],
        y[:20],
        *(w[:20] for k, w in given.items() if weights == "row"),
    )
    expected, found = theirs.fit(x, y, **arguments), ours.fit(x, y, **arguments)
    for key, values in expected.history.items():
        is_mean = key == "weighted_accuracy"  # of reports, weighted by their rows
        assert found.history[key] == pytest.approx(values, rel=5e-2 if is_mean else 1e-3), key
    assert_equal_weights(ours, theirs)


class Notes(keras.callbacks.Callback):
    """Notes what is called, and that the model has new weights."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weight = float(np.abs(self.model.get_weights()[0]).sum())
        self.calls.append((epoch, sorted(logs), weight))

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("end")


def test_callbacks_are_called_with_the_newest_weights(tmp_path: Path) -> None:
    x, y = pictures(64)
    model = classifier(keras.optimizers.SGD(0.1))
    notes, best = Notes(), tmp_path / "best.keras"
    callbacks = [
        notes,
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ModelCheckpoint(str(best), monitor="loss"),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.EarlyStopping("loss", patience=2, min_delta=9, restore_best_weights=True),
    ]
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
    history = model.fit(
        x,
        y,
        32,
        initial_epoch=3,
        epochs=20,
        callbacks=callbacks,
        verbose=0,
        validation_data=(x, y),
        validation_freq=2,
    )
    assert history.epoch == [3, 4, 5]  # the first is the best, by so large a delta
    assert history.history["learning_rate"] == pytest.approx([0.05, 0.025, 0.0125])
    assert [c for c in notes.calls if not isinstance(c, tuple)] == ["begin", "end"]
    ends = [c for c in notes.calls if len(c) == 3 and isinstance(c, tuple)]
    assert len({weight for *_, weight in ends}) == 3
    assert "val_loss" in ends[0][1]
    assert "val_loss" not in ends[1][1]
    records = [
        r for r in read_records(tmp_path / "run" / RECORD) if isinstance(r, ValidationRecord)
    ]
    assert [record.images for record in records] == [64, 0, 64]
    restored = float(np.abs(model.get_weights()[0]).sum())
    assert restored == pytest.approx(ends[0][2])  # of the best epoch
    assert keras.saving.load_model(best).count_params() == model.count_params()
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4


def test_an_exception_of_a_callback_arrives_as_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Pruned(Exception):
        pass

    def end(epoch: int, logs: Any) -> None:
        raise Pruned

    model = classifier()
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
    with pytest.raises(Pruned):
        model.fit(*pictures(32), callbacks=keras.callbacks.LambdaCallback(on_epoch_end=end))
    assert "continue with resume=True of fit" in caplog.text

    goes_on = classifier()
    tandem.keras.distribute(goes_on, ["cpu"], tmp_path / "run")
    ends: list[int] = []
    say = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(epoch))
    history = goes_on.fit(*pictures(32), callbacks=say, verbose=0, resume=True)
    assert (history.epoch, ends, len(history.history["loss"])) == ([0], [0], 1)
    assert_equal_weights(goes_on, model, atol=0, rtol=0)


def test_a_fit_follows_one_that_was_refused(tmp_path: Path) -> None:
    model = classifier()
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run", norm_rows=16)
    x, y = pictures(48)
    with pytest.raises(InputError, match="norm_rows: found 16, expected a divisor of global_b"):
        model.fit(x, y, 40, verbose=0)
    model.fit(x, y, 48, verbose=0)
    assert list_checkpoints(tmp_path / "run")


def test_metrics_that_keras_alone_has_are_of_the_validation(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(60, 5)), rng.integers(0, 2, 60).astype(float)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    model.compile("rmsprop", "binary_crossentropy", metrics=metrics)
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
    found = model.fit(x, y, epochs=2, validation_split=0.5, verbose=0).history
    assert [*found] == ["accuracy", "loss", "val_accuracy", "val_auc", "val_loss"]
    expected = model.evaluate(x[30:], y[30:], verbose=0, return_dict=True)
    assert {k: found[f"val_{k}"][-1] for k in expected} == pytest.approx(expected, rel=1e-4)
    with pytest.warns(UserWarning, match="metrics: auc are not measured"):
        model.fit(x, y, verbose=0)


def test_batches_of_generators_and_datasets(tmp_path: Path) -> None:
    import torch

    x, y = pictures(64)
    model = classifier()
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)

    def endless() -> Any:
        while True:
            yield x[:16], y[:16]

    for data, steps in ((loader, 4), (endless(), 3)):
        history = model.fit(data, steps_per_epoch=steps, verbose=0, validation_data=loader)
        assert history.params["steps"] == steps
    newest = list_checkpoints(tmp_path / "run-2")[-1]
    assert read_checkpoint(newest).state.step == 3
    assert int(model.optimizer.iterations) == 7
    with pytest.raises(InputError, match="found generator, which may never end"):
        model.fit(endless())


def test_a_run_of_the_folder_is_not_overwritten(tmp_path: Path) -> None:
    x, y = pictures(32)
    for _ in range(2):
        model = classifier()
        tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
        model.fit(x, y, verbose=0, resume=True)
    weights = model.get_weights()
    model = classifier()
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
    with pytest.raises(InputError, match=r"found a run in .* already, expected an empty folder"):
        model.fit(x, y, verbose=0)
    history = model.fit(x, y, verbose=0, resume=True)  # which is complete
    assert history.epoch == [0]
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)
    other = classifier("rmsprop")
    tandem.keras.distribute(other, ["cpu"], tmp_path / "run")
    with pytest.raises(InputError, match="found RMSprop and a run without mean_square"):
        other.fit(x, y, verbose=0, resume=True)
    other = classifier()
    tandem.keras.distribute(other, ["cpu"], tmp_path / "run")
    with pytest.raises(InputError, match="found a data set of other arrays"):
        other.fit(x + 1, y, epochs=2, verbose=0, resume=True)


def test_methods_of_batches_are_called_now_and_then(tmp_path: Path) -> None:
    x, y = pictures(64)
    steps: list[int] = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: steps.append(step)
    )
    model = classifier()
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
    with pytest.warns(UserWarning, match="methods of batches are called about fifty times"):
        model.fit(x, y, 16, callbacks=[callback], verbose=0)
    assert steps == [0, 1, 2, 3]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*methods of batches")
        model.fit(x, y, 16, callbacks=[Notes()], verbose=0)


def of_grey_pictures() -> tuple[Any, np.ndarray, np.ndarray]:
    rng, layers = np.random.default_rng(5), keras.layers
    x, y = rng.integers(0, 256, (48, 8, 8, 1)).astype(np.uint8), rng.integers(0, 2, 48)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 255),
            layers.Flatten(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, x, y


@pytest.mark.parametrize("weights", [None, np.random.default_rng(0).uniform(0, 3, 48)])
def test_pictures_are_stored_as_bytes(weights: Any, tmp_path: Path) -> None:
    """Of classes as pictures, and with weights as rows."""
    ours, x, y = of_grey_pictures()
    theirs = clone(ours)
    tandem.keras.distribute(ours, ["cpu", "cpu"], tmp_path / "run")
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    for model in (ours, theirs):
        model.fit(x, y[:, np.newaxis], sample_weight=weights, **arguments)
    assert_equal_weights(ours, theirs, atol=1e-6)
    newest = read_checkpoint(list_checkpoints(tmp_path / "run")[-1])
    assert newest.network.crop_size == (8 if weights is None else None)
    if weights is not None:
        assert read_any_manifest(tmp_path / "run" / "data").row == RowType("uint8", (8, 8, 1))


def test_names_of_classes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    model, x, y = of_grey_pictures()
    run, picture = tmp_path / "run", tmp_path / "0.png"
    tandem.keras.distribute(model, ["cpu"], run, class_names=["cat", "dog"])
    model.fit(x, y, 16, validation_split=0.25, verbose=0)
    Image.fromarray(np.repeat(x[0], 3, axis=2)).save(picture)
    assert run_verb("classify", ["--weights", str(run), str(picture)]) == 0
    shown = capsys.readouterr().out
    expected = model.predict(x[:1], verbose=0)[0]
    assert shown.index(("cat", "dog")[expected.argmax()]) < shown.index(
        ("cat", "dog")[expected.argmin()]
    )
    tandem.keras.distribute(model, ["cpu"], run, class_names=["cat", "cow"])
    with pytest.raises(InputError, match="class_names: found cat, cow, expected those of"):
        model.fit(x, y, 16, 2, validation_split=0.25, resume=True)
    report = ["--weights", str(run), "--report", str(tmp_path / "report")]
    assert run_verb("validate", ["--config", str(run / "config.yaml"), *report]) == 0
    assert "cat,dog" in (tmp_path / "report" / "confusion.csv").read_text()


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (["cat"], {}, "class_names: found 1, expected 2, as the model has outputs"),
        (
            ["a", "b"],
            {"sample_weight": np.ones(48)},
            "class_names: found them with weights of rows",
        ),
    ],
)
def test_names_that_fit_no_classes_are_refused(
    names: list[str], given: Any, message: str, tmp_path: Path
) -> None:
    model, x, y = of_grey_pictures()
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run", class_names=names)
    with pytest.raises(InputError, match=message):
        model.fit(x, y, **given)


def test_shares_of_a_batch_may_be_uneven(tmp_path: Path) -> None:
    """Of ten rows 4, 3 and 3, of the last seven 4, 3 and 0; momenta are averaged by them."""
    rng, found = np.random.default_rng(0), []
    x, y = rng.normal(size=(37, 5)), rng.normal(size=37)
    for trainers in (1, 3):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, 0.9), "mse")
        run = tmp_path / f"{trainers}"
        tandem.keras.distribute(model, ["cpu"] * trainers, run, precision="float64", check_every=1)
        model.fit(x, y, 10, 2, verbose=0)
        found.append(model)
    assert_equal_weights(*found, atol=1e-7, rtol=1e-6)


def of_steps() -> tuple[Any, np.ndarray, np.ndarray]:
    layers = keras.layers
    products = layers.EinsumDense("abc,cd->abd", output_shape=(6, 4), bias_axes="d")
    model = keras.Sequential([keras.Input((6, 4)), products, layers.LSTM(4), layers.Dense(3)])
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    return model, rng.normal(size=(64, 6, 4)), rng.normal(size=(64, 3))


def of_norms() -> tuple[Any, np.ndarray, np.ndarray]:
    return classifier("sgd"), *pictures(64)


@pytest.mark.parametrize(
    ("make", "settings"),
    [(of_steps, {"fully_connected": "sharded"}), (of_norms, {"norm_rows": "global"})],
)
def test_trainers_divide_one_graph(make: Any, settings: Any, tmp_path: Path) -> None:
    ours, x, y = make()
    theirs = clone(ours)
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    tandem.keras.distribute(ours, ["cpu", "cpu"], tmp_path / "run", **settings)
    with pytest.raises(InputError, match=r"found 15 and .*, expected a multiple of 2"):
        ours.fit(x, y, 15)
    theirs.fit(x, y, **arguments)
    ours.fit(x, y, **arguments)
    assert_equal_weights(ours, theirs, atol=1e-5, rtol=1e-4)


def test_prepared_pictures_are_trained_on_and_cropped(tmp_path: Path) -> None:
    from tests.support.tiny import prepare

    layers = keras.layers
    data = prepare(tmp_path / "data", train=12, image_size=10)
    manifest = replace(read_manifest(data), resize="shorter_side", pad=1)
    write_manifest(data / "manifest.json", manifest)
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(3, activation="softmax")]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    given = {"data_folder": data, "rand_crop": True, "rand_mirror": True}
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run", **given)
    twice = clone(model)
    history = model.fit(batch_size=4, verbose=0).history
    assert [*history] == ["accuracy", "loss", "val_accuracy", "val_loss"]
    for checkpoint in list_checkpoints(tmp_path / "run"):  # also the one before the first epoch
        network = read_header(checkpoint).network
        assert (network.resize, network.pad) == ("shorter_side", 1)
    twice.optimizer.learning_rate = float(model.optimizer.learning_rate) / 2
    tandem.keras.distribute(twice, ["cpu"], tmp_path / "twice", **given)
    weighed = twice.fit(batch_size=4, verbose=0, class_weight=dict.fromkeys(range(3), 2.0)).history
    assert_equal_weights(model, twice)
    assert weighed.pop("loss") == pytest.approx([2 * history.pop("loss")[0]], rel=1e-3)
    assert {k: v[0] for k, v in weighed.items()} == pytest.approx(
        {k: v[0] for k, v in history.items()}
    )
    other = keras.models.clone_model(model)
    other.compile("sgd", "mse")
    tandem.keras.distribute(other, ["cpu"], tmp_path / "other", **given)
    with pytest.raises(InputError, match="found targets that are classes, expected a cross"):
        other.fit(verbose=0)
