"""Arguments of `distribute` and `fit`, and callbacks: what is refused before a start."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import tandem.keras
from tandem.artifacts.checkpoint import RunState, save_checkpoint
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, to_json
from tandem.artifacts.run_folder import RECORD, checkpoint_name
from tandem.errors import InputError
from tandem.keras.callbacks import (
    MEMORY,
    Batches,
    Epochs,
    check_callbacks,
    read_memory,
    settings_of,
)
from tandem.keras.compilation import Compilation, check_activations, optimizer_settings
from tandem.keras.distribution import Arguments, Distribution
from tandem.keras.fit import Fit, Plan
from tandem.keras.variables import as_checkpoint, check_variables
from tandem.launch.status import Status
from tandem.training.messages import Activity, Stage
from tests.support.keras_models import describe_model, keras

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
X, Y = np.zeros((8, 3), np.float32), np.zeros(8, np.float32)


def model() -> Any:
    found = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    found.compile("sgd", "mse")
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 8}, "found batch_size, expected the argument batch_size of fit instead"),
        ({"snapshot_freq": 2}, "found snapshot_freq, expected keep_snapshots, since each epoch"),
        ({"freeze": ["a"]}, "found freeze, expected trainable=False of layers instead"),
        ({"devices": 2}, "devices: found 2, expected auto, or a device for each"),
        ({"run": ""}, 'run: found "", expected the path of a folder'),
        ({"run": "a\0b"}, r'run: found "a.*b", expected the path of a folder'),
    ],
)
def test_settings_of_other_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tandem.keras.distribute(model(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: found 0, expected a whole number from 1"),
        ({"batch_size": True}, "batch_size: found true, expected a whole number from 1"),
        ({"epochs": True}, "epochs: found true"),
        ({"initial_epoch": -1}, "initial_epoch: found -1, expected a whole number from 0"),
        ({"verbose": 7}, "verbose: found 7, expected auto, 0, 1 or 2"),
        ({"resume": True}, "resume: found True without run of distribute"),
        ({"callbacks": [object()]}, "callbacks: found object, expected keras.callbacks.Callback"),
        ({"callbacks": keras.callbacks.SwapEMAWeights()}, "found SwapEMAWeights"),
        ({"callbacks": [keras.callbacks.BackupAndRestore("a")]}, "the argument resume of fit"),
        (
            {"callbacks": [keras.callbacks.ModelCheckpoint("a.keras", save_freq=3)]},
            "save_freq: found 3, expected 'epoch'",
        ),
        ({"validation_data": (X,)}, "validation_data: found 1 values"),
        ({"validation_split": 1.5}, "validation_split: found 1.5"),
        ({"y": None}, "y: found None, expected targets"),
        ({"validation_data": (X, None)}, "validation_data: y: found None, expected targets"),
    ],
)
def test_arguments_of_fit_are_checked_first(arguments: Any, message: str) -> None:
    found = tandem.keras.distribute(model(), devices=["cpu"])
    with pytest.raises(InputError, match=message):
        found.fit(X, **{"y": Y, "verbose": 0, **arguments})


def test_steps_of_several_batches_are_whole() -> None:
    found = tandem.keras.distribute(model(), devices=["cpu"])
    found.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    for batch, steps, rows in ((3, None, 8), (4, 1, 4), (3, 4, 8)):
        message = f"accumulation_steps: found {rows} rows, expected a multiple of {2 * batch}"
        with pytest.raises(InputError, match=message):
            found.fit(X, Y, batch, steps_per_epoch=steps)
    found.compile(found.optimizer, keras.losses.MeanSquaredError("sum"))
    with pytest.raises(InputError, match="found a loss that is a sum"):
        found.fit(X, Y, batch_size=4)


@pytest.mark.parametrize("epochs", [{"epochs": 0}, {"epochs": 2, "initial_epoch": 2}])
def test_no_epochs_give_an_empty_history(epochs: Any) -> None:
    calls: list[str] = []
    begins = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: calls.append("begin"))
    found = tandem.keras.distribute(model(), devices=["cpu"])
    listed = keras.callbacks.CallbackList([begins], model=found)
    history = found.fit(X, Y, callbacks=listed, **epochs)
    assert (history.epoch, history.history, calls) == ([], {}, ["begin"])


def test_arguments_beside_a_prepared_data_set_are_refused() -> None:
    found = tandem.keras.distribute(model(), devices=["cpu"], data_folder="data")
    given = {"y": Y, "sample_weight": Y, "validation_data": (X, Y), "validation_split": 0.5}
    for name, value in {**given, "validation_steps": 1}.items():
        with pytest.raises(InputError, match=f"{name}: found it with data_folder"):
            found.fit(**{name: value})


@pytest.mark.parametrize("place", range(3))
def test_masked_arrays_are_refused(place: int) -> None:
    arrays: list[Any] = [X, Y, Y]
    arrays[place] = np.ma.masked_equal(arrays[place], 0)
    found = tandem.keras.distribute(model(), devices=["cpu"])
    with pytest.raises(InputError, match="found a masked array"):
        found.fit(*arrays[:2], sample_weight=arrays[2], verbose=0)


def test_variables_that_are_frozen_apart_from_their_layers_are_refused() -> None:
    m, x = keras.layers, keras.Input((4, 3))
    y = m.RNN([m.LSTMCell(2, trainable=False), m.GRUCell(2)], return_sequences=True)(x)
    y = m.Bidirectional(m.LSTM(2, return_sequences=True), trainable=False)(y)
    base = keras.Sequential([m.Dense(2), m.BatchNormalization(trainable=False)])
    dense, cell, attended = m.Dense(2), m.LSTM(2), m.MultiHeadAttention(1, 2, name="at")
    y = cell(attended(base(y), base(y)))
    found = keras.Model(x, dense(m.Normalization()(y)))
    check_variables(found)
    for layer, variable, name in (
        (dense, dense.bias, f"{dense.name}.bias"),
        (cell, cell.cell, f"{cell.name}.weight"),
        (attended, attended.query_dense, "at.query.weight"),
    ):
        variable.trainable = False
        with pytest.raises(InputError, match=f"{name}: found a variable that is not trained"):
            check_variables(found)
        layer.trainable = False
    check_variables(found)
    dense.bias.trainable = True
    with pytest.raises(InputError, match=f"{dense.name}.bias: found a variable that is trained"):
        check_variables(found)


class Own(keras.layers.Layer):
    """A layer of one's own, of whose regularizer its configuration says nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=shape[1:], name="gain", **self.options)

    def call(self, x: Any) -> Any:
        return x * self.gain


class Known(Own):
    def get_config(self) -> Any:
        return {"gain_regularizer": "l2"}


def test_what_a_configuration_does_not_say_of_a_variable_is_refused() -> None:
    x, m = keras.Input((3,)), keras.layers
    check_variables(keras.Model(x, Known(regularizer="l2")(m.Dense(3, kernel_regularizer="l1")(x))))
    for layer, message in (
        (Own(regularizer="l2"), "a regularizer of gain, expected it as gain_regularizer of get_c"),
        (Own(constraint="non_neg"), "gain: found a constraint, expected none"),
        (m.Dense(3, bias_constraint="non_neg"), "bias: found a constraint, expected none"),
    ):
        with pytest.raises(InputError, match=message):
            check_variables(keras.Model(x, layer(x)))


def test_functions_with_names_of_activations_of_keras_are_refused() -> None:
    def tanh(x: Any) -> Any:
        return x

    m, x = keras.layers, keras.Input((4, 3))
    usual = m.Dense(2, activation=keras.activations.gelu)
    check_activations(keras.Model(x, m.Bidirectional(m.LSTM(2))(m.Activation("swish")(usual(x)))))
    for layer in (
        m.Dense(2, activation=tanh),
        m.TimeDistributed(m.Activation(tanh)),
        m.RNN(m.LSTMCell(2, recurrent_activation=tanh)),
    ):
        with pytest.raises(InputError, match=r"test_fit\.tanh, expected keras\.activations\.tanh"):
            check_activations(keras.Model(x, layer(x)))


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_rates_that_cannot_be_used_are_refused(rate: float) -> None:
    found = tandem.keras.distribute(model(), devices=["cpu"])
    found.optimizer.learning_rate = rate
    with pytest.raises(InputError, match=r"learning_rate is .* above 0"):
        found.fit(X, Y, verbose=0)


def test_nothing_is_left_where_arrays_or_settings_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rand_mirror": True}, "rand_mirror: found true with rows of numbers"),
        ({"norm_rows": 3}, "norm_rows: found 3, expected a divisor of global_batch 8"),
        ({"clip_value": 1.0, "exchange": "shared"}, "clip_value is set and exchange is shared"),
        ({"bacth": 1}, "bacth"),
    ]
    for settings, message in cases:
        found = tandem.keras.distribute(model(), ["cpu"], tmp_path / "run", **settings)
        with pytest.raises(InputError, match=message):
            found.fit(X, Y, verbose=0)
        assert not [*(tmp_path / "run").glob("*")]


def fit_of(run: Path | None = None) -> Fit:
    return Fit(Distribution(model(), ["cpu"], run, {}), SimpleNamespace(), None)  # type: ignore[arg-type]


def test_a_fit_that_left_nothing_is_not_counted(tmp_path: Path) -> None:
    fit = fit_of(tmp_path)
    fit._count(tmp_path)
    assert fit.distribution.folder == tmp_path


def test_validation_is_of_the_epochs_that_keras_validates() -> None:
    given: dict[str, Any] = dict.fromkeys(Arguments.__dataclass_fields__)
    given |= {"epochs": 9, "initial_epoch": 0, "verbose": 0, "validation_freq": 1}
    every = Arguments(**{**given, "validation_freq": 3})
    assert [epoch for epoch in range(9) if every.validates(epoch)] == [2, 5, 8]
    some = Arguments(**{**given, "validation_freq": [1, 4]})
    assert [epoch for epoch in range(9) if some.validates(epoch)] == [0, 3]
    for freq in (0, 2.0, "a", [0, 2]):
        with pytest.raises(InputError, match=r"validation_freq: found .*, expected a whole number"):
            Arguments(**{**given, "validation_freq": freq})
    steps = Arguments(**{**given, "validation_steps": 1, "validation_batch_size": 2})
    validation = Fit(Distribution(model(), ["cpu"], None, {}), steps, None)._validation((X, Y))
    assert validation is not None
    assert validation.count == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (32, [8])),
        ({"steps_per_epoch": 3}, (3, [8])),
        ({"steps_per_epoch": 3, "batch_size": 2}, (2, [8])),
        ({"steps_per_epoch": 3, "validation_split": 0.5, "validation_steps": 2}, (2, [4, 4])),
        ({"validation_split": 0.5, "validation_steps": 1, "batch_size": 3}, (3, [4, 3])),
        ({"validation_data": (X, Y), "validation_steps": 3}, (32, [8, 8])),
    ],
)
def test_steps_without_a_size_of_batches_divide_the_rows(
    arguments: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(fit: Any, compilation: Any, data: Any, batch: int, callbacks: Any) -> Any:
        return batch, [len(rows) for rows in data.splits]

    monkeypatch.setattr(Fit, "_train", train)
    found = tandem.keras.distribute(model(), devices=["cpu"])
    assert found.fit(X, Y, verbose=0, **arguments) == expected


def test_callbacks_that_a_run_does_itself_become_settings() -> None:
    board = keras.callbacks.TensorBoard("logs")
    stop = keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True)
    assert check_callbacks([board, stop]) == [stop]
    expected = {"tensorboard": True, "tensorboard_dir": "logs", "keep_snapshots": 6}
    assert settings_of([board, stop]) == expected


def test_a_board_with_methods_of_its_own_is_refused() -> None:
    class Board(keras.callbacks.TensorBoard):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...

    with pytest.raises(InputError, match="found a on_epoch_end of Board's own, expected TensorBoa"):
        check_callbacks([Board("logs")])


def save(folder: Path, found: Any, **state: int) -> None:
    config, at = optimizer_settings(found.optimizer), RunState(**state)
    checkpoint = replace(as_checkpoint(found, describe_model(found), 0, config), state=at)
    save_checkpoint(folder / checkpoint_name(at), checkpoint)


def begun(folder: Path, callbacks: Any = (), rate: Any = 0.1, **state: int) -> Epochs:
    """A run of two steps an epoch that begins, or goes on in a state."""
    found = model()
    found.compile(keras.optimizers.SGD(rate), "mse")
    found.optimizer.build(found.trainable_variables)
    save(folder, found, **state)
    listed = keras.callbacks.CallbackList([*callbacks], add_history=True, model=found)
    epochs = Epochs(found, listed, folder, 0, 2, lambda epoch: False)
    epochs.on_train_begin({})
    return epochs


def record_epoch(folder: Path, epoch: int) -> None:
    train = TrainRecord(epoch, 2 * epoch, 0.5, None, 0.1, 1, 0, 0, 0, images=8)
    end = ValidationRecord(epoch, 2 * epoch, math.nan, math.nan, math.nan, 0)
    with (folder / RECORD).open("a") as file:
        file.write(f"{to_json(train)}\n{to_json(end)}\n")


def test_an_epoch_whose_end_nothing_remembers_is_reported_again(tmp_path: Path) -> None:
    assert begun(tmp_path).model.history.epoch == []
    record_epoch(tmp_path, 1)
    epochs = begun(tmp_path, epoch=1, step=2, updates=2)
    assert (epochs.model.history.epoch, epochs.model.history.history) == ([0], {"loss": [0.5]})
    assert read_memory(tmp_path)["epochs"] == [0]
    assert int(epochs.model.optimizer.iterations) == 2


def test_a_missed_end_may_be_the_last_and_nothing_is_best_unseen(tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    begun(tmp_path)
    record_epoch(tmp_path, 1)
    late = keras.callbacks.EarlyStopping("loss", restore_best_weights=True, start_from_epoch=9)
    begun(tmp_path, [late], epoch=1, step=2, updates=2)
    epochs = begun(tmp_path, [late], epoch=1, step=2, updates=2)
    assert late.best_weights is None
    (tmp_path / MEMORY).unlink()
    epochs.callbacks.callbacks.append(Stop())
    epochs.callbacks.set_model(epochs.model)
    assert epochs.on_train_begin({})


def test_rates_of_an_epoch_that_goes_on_are_counted_from_its_first_step(tmp_path: Path) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    memory = {"epochs": [0], "history": {}, "learning_rate": None, "callbacks": []}
    (tmp_path / MEMORY).write_text(json.dumps(memory))
    (tmp_path / RECORD).touch()
    epochs = begun(tmp_path, rate=schedule, epoch=1, step_in_epoch=1, step=3, updates=3)
    assert epochs.rates() == pytest.approx([0.1 * 0.5**2, 0.1 * 0.5**3])


def test_callbacks_keep_what_they_learn_and_their_new_arguments(tmp_path: Path) -> None:
    def callbacks(patience: int, name: str) -> list[Any]:
        return [
            keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=0.25),
            keras.callbacks.ModelCheckpoint(tmp_path / name, "loss", save_best_only=True),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        ]

    first = begun(tmp_path, callbacks(3, "a.keras"))
    for epoch in (1, 2):
        save(tmp_path, first.model, epoch=epoch, step=2 * epoch)
        record_epoch(tmp_path, epoch)
        first._end(epoch, {"loss": 0.5})
    first.on_train_end({})
    stop, best, _ = given = callbacks(9, "b.keras")
    resumed = begun(tmp_path, given, epoch=2, step=4)
    assert (stop.patience, stop.wait, stop.best) == (9, 1, 0.5)
    assert (best.filepath, best.best) == (str(tmp_path / "b.keras"), 0.5)
    save(tmp_path, resumed.model, epoch=3, step=6)
    resumed._end(3, {"loss": 0.5})
    assert stop.min_delta == -0.25
    assert [line[:5] for line in (tmp_path / "log.csv").read_text().splitlines()] == [
        "epoch", "0,0.5", "1,0.5", "2,0.5",
    ]  # fmt: skip


def test_a_run_that_is_complete_gives_its_rate(tmp_path: Path) -> None:
    (tmp_path / MEMORY).write_text(json.dumps({"epochs": [0], "learning_rate": 0.25}))
    fit = fit_of()
    Plan(fit, *[None] * 2, 8, []).follow(tmp_path)  # type: ignore[arg-type]
    assert float(fit.model.optimizer.learning_rate) == 0.25
    assert fit.model.history.epoch == [0]


def test_batches_are_reported_with_means_of_the_epoch_so_far() -> None:
    class Seen:
        calls: ClassVar[list[Any]] = []

        def on_train_batch_begin(self, step: int) -> None: ...

        def on_train_batch_end(self, step: int, logs: Any) -> None:
            self.calls.append((step, logs["loss"]))

    batches = Batches(Seen(), 4)
    for step, epoch, loss in [(2, 1, 1.0), (4, 1, 3.0), (6, 2, 5.0)]:
        batches.report(TrainRecord(epoch, step, loss, None, 0.1, 1, 0, 0, 0, images=8))
    assert Seen.calls == [(1, 1.0), (3, 2.0), (1, 5.0)]


def test_what_is_done_before_the_first_step_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    spec = SimpleNamespace(begun=0.0, job="train")
    status = Status(spec, clock=lambda: 7.0)  # type: ignore[arg-type]
    for batches in (Batches(None, 4), Batches(None, 4, status)):
        batches.report(Stage(Activity.COMPILING_GRADIENT))
    assert capsys.readouterr().out == "  0.0 s: compiling gradient\n"


def test_a_misspelt_loss_is_answered() -> None:
    misspelt = model()
    misspelt.compile("sgd", "sparse_crossentropy")
    tandem.keras.distribute(misspelt, devices=["cpu"])
    with pytest.raises(InputError, match="did you mean sparse_categorical_crossentropy"):
        misspelt.fit(X, Y)


@pytest.mark.parametrize("loss", ["crossentropy", "CE"])
def test_a_loss_that_keras_chooses_by_the_shapes_is_known(loss: str) -> None:
    chosen = model()
    chosen.compile("sgd", loss)
    (found,) = Compilation.of(chosen, lambda: (X[:1], Y[:1])).losses
    assert found["function"] == "binary_crossentropy"


def test_a_damaged_memory_is_named(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == {}
    (tmp_path / MEMORY).write_text(json.dumps({"epochs": [0]}))
    assert read_memory(tmp_path) == {"epochs": [0]}
    (tmp_path / MEMORY).write_text("{")
    with pytest.raises(InputError, match=r"fit\.json: cannot be read"):
        read_memory(tmp_path)
