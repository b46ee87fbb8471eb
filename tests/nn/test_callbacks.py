"""Callbacks with Keras's names: their settings, refusals, calls and files."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.artifacts.checkpoint import Checkpoint, RunState, read_header, save_checkpoint
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, to_json
from tandem.config.resolve import check_settings
from tandem.config.schema import Config, make_config
from tandem.errors import InputError
from tandem.launch.callbacks import summarised
from tandem.launch.prepare import find_callbacks
from tandem.layers.network import NetworkDescription
from tandem.nn.callbacks import (
    Callback,
    Context,
    CSVLogger,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
    decide,
)
from tandem.optim import SCHEDULES, Moment

NAMES = {"acc": "accuracy", "mean_squared_error": "mse"}
CONTEXT = Context(6, 0.1, NAMES)


def settings(*callbacks: Any, **context: Any) -> dict[str, Any]:
    """The settings of callbacks, which a configuration must take."""
    found = dict(decide(callbacks, Context(**{**vars(CONTEXT), **context})).settings)
    check_settings(make_config({"metrics": ["accuracy", "mse"], **found}))
    return found


def test_early_stopping_is_a_patience() -> None:
    assert settings(EarlyStopping()) == {
        "stop_monitor": "validation_loss",
        "stop_patience": 1,
        "stop_delta": 0,
        "stop_baseline": None,
        "stop_from_epoch": 0,
    }
    found = settings(EarlyStopping("val_acc", -0.25, 3, 1, "max", 0.5, True, 2))
    assert found == {
        "stop_monitor": "accuracy",
        "stop_patience": 3,
        "stop_delta": 0.25,
        "stop_baseline": 0.5,
        "stop_from_epoch": 2,
        "keep_monitor": "accuracy",
    }


def test_a_plateau_is_counted_as_keras_does() -> None:
    assert settings(ReduceLROnPlateau("val_acc", 0.5, 4, cooldown=3, min_lr=0.001)) == {
        "lr_policy": "plateau",
        "lr_monitor": "accuracy",
        "lr_factor": 0.5,
        "lr_patience": 3,
        "lr_cooldown": 2,
        "lr_threshold": 0.0,
        "lr_delta": 1e-4,
        "lr_min": 0.001,
    }
    found = settings(ReduceLROnPlateau(patience=0, min_delta=0))
    assert (found["lr_patience"], found["lr_cooldown"], found["lr_delta"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda epoch, rate: rate if epoch < 2 else rate * 0.5,
        lambda epoch: [0.3, 0.3, 0.2, 0.2, 0.1, 0.1][epoch],
        lambda epoch, rate, power=2: np.float32(0.1 / (epoch + 1) ** power),
    ],
    ids=["of the rate", "of the epoch", "with a default"],
)
def test_a_schedule_becomes_a_table(schedule: Any) -> None:
    found = settings(LearningRateScheduler(schedule))
    table = SCHEDULES.chosen(dict(make_config(found)))
    rate = 0.1
    for epoch in range(6):
        rate = float(
            schedule(epoch, rate) if schedule.__code__.co_argcount > 1 else schedule(epoch)
        )
        assert table.rate(0.1, Moment(epoch, epoch, 6)) == rate


def test_what_a_run_writes() -> None:
    assert settings(CSVLogger(Path("a/log.csv"))) == {"csv_file": "a/log.csv"}
    events = {"tensorboard": True, "tensorboard_dir": "logs"}
    assert settings(TensorBoard()) == {**events, "print_epochs": True}
    assert settings(TensorBoard(update_freq="batch")) == {**events, "print_freq": 1}
    assert settings(TensorBoard(update_freq=50)) == {**events, "print_freq": 50}
    assert settings(TerminateOnNaN()) == {"on_nan": "stop"}
    assert settings(ModelCheckpoint("{epoch:02d}-{val_acc:.2f}")) == {"snapshot_freq": 1}


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            EarlyStopping("loss"),
            "EarlyStopping: monitor: found .loss. of training; did you mean v",
        ),
        (ReduceLROnPlateau("acc"), "found .acc. of training; did you mean val_acc"),
        (EarlyStopping("val_f1"), "found .val_f1.* Expected .*: val_loss, val_acc, val_mean_sq"),
        (EarlyStopping("val_los"), "found .val_los.; did you mean val_loss"),
        (EarlyStopping("val_acc", mode="min"), "mode: found .min. for val_acc, expected auto or"),
        (EarlyStopping(mode="max"), "mode: found .max. for val_loss, expected auto or min"),
        (EarlyStopping(patience=-1), "patience: found -1, expected a whole number of at least 0"),
        (ReduceLROnPlateau(factor=1.0), "factor: found 1.0, expected a number above 0 and below"),
        (ReduceLROnPlateau(cooldown=0.5), "cooldown: found 0.5, expected a whole"),  # type: ignore[arg-type]
        (LearningRateScheduler(lambda e: 0), "schedule: found 0 for epoch 0, expected a number ab"),
        (LearningRateScheduler(lambda e: None), "schedule: found null for epoch 0"),  # type: ignore[arg-type,return-value]
        (CSVLogger("a", ";"), "CSVLogger: separator: found .;., expected .,."),
        (CSVLogger("a", append=True), "append: found true, expected False: a resumed run contin"),
        (TensorBoard(write_images=True), "write_images: found true, expected false"),
        (TensorBoard(update_freq=0), "update_freq: found 0, expected"),
        (ModelCheckpoint("a", save_freq=10), "save_freq: found 10, expected .epoch."),
        (ModelCheckpoint("{batch}"), "filepath: found '{batch}', .* expected only epoch, loss, ac"),
        (ModelCheckpoint("a", "loss", save_best_only=True), "monitor: found .loss. of training"),
        (EarlyStopping, "callbacks: found .* expected objects of tandem.nn.callbacks"),
        (3, "callbacks: found 3, expected objects of tandem.nn.callbacks"),
    ],
)
def test_what_cannot_be_done_is_refused(callback: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(callback)


def test_without_validation_nothing_can_be_monitored() -> None:
    with pytest.raises(InputError, match=r"found .val_loss. without validation data, expected"):
        settings(EarlyStopping(), validates=False)
    with pytest.raises(InputError, match="expected only epoch, loss, acc"):
        settings(ModelCheckpoint("{val_loss}"), validates=False)


def test_two_that_decide_the_same_are_refused() -> None:
    schedule = LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(InputError, match="found ReduceLROnPlateau and LearningRateScheduler, whi"):
        settings(ReduceLROnPlateau(), schedule)
    with pytest.raises(InputError, match="decide stop_patience as 1 and 3, expected one of them"):
        settings(EarlyStopping(), EarlyStopping(patience=3))
    both = EarlyStopping(restore_best_weights=True), ModelCheckpoint("a", save_best_only=True)
    assert settings(*both)["snapshot_freq"] == 1


def test_callbacks_of_keras_itself_are_refused() -> None:
    class OfKeras:
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...

    with pytest.raises(InputError, match=r"expected objects of tandem\.nn\.callbacks"):
        settings(OfKeras())


@pytest.mark.parametrize(
    "method", ["on_train_batch_begin", "on_batch_end", "on_test_begin", "on_predict_batch_end"]
)
def test_a_class_with_methods_of_batches_is_refused(method: str) -> None:
    with pytest.raises(InputError, match=f"Mine: found the method {method}, expected those of tr"):
        type("Mine", (Callback,), {method: lambda self, batch, logs=None: None})


class Notes(Callback):
    """Notes its calls; ends training after an epoch."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", self.params, self.model))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("end", epoch, dict(logs)))
        logs.clear()  # which is its own
        self.model.stop_training = epoch == 1

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append(("done", dict(logs)))


def record_of(epoch: int, loss: float, accuracy: float = 0.5) -> Any:
    metrics = {"accuracy": accuracy, "mse": 0.125}
    seconds = (10.0, 1.0, 0.0, 0.0)
    train = TrainRecord(epoch, epoch, 2 * loss, None, 0.01, *seconds, metrics, 4)
    return summarised(ValidationRecord(epoch, epoch, loss, 0.5, 0.5, 7, metrics), [train])


def test_a_callback_is_called_as_by_keras() -> None:
    notes, model = Notes(), type("Model", (), {"stop_training": False})()
    (called,) = decide([notes], CONTEXT, model).objects
    called.on_train_begin({"n_epochs": 6})
    ends = []
    for epoch in (1, 2):
        called.on_epoch_begin(epoch)
        ends.append(called.on_epoch_end(epoch, record_of(epoch, 1.5)))
    called.on_train_end({"status": 0})
    logs = {
        "loss": 3.0,
        "acc": 0.5,
        "mean_squared_error": 0.125,
        "val_loss": 1.5,
        "val_acc": 0.5,
        "val_mean_squared_error": 0.125,
        "learning_rate": 0.01,
    }
    assert notes.calls == [
        ("begin", {"epochs": 6}, model),
        ("epoch", 0),
        ("end", 0, logs),
        ("epoch", 1),
        ("end", 1, logs),
        ("done", logs),
    ]
    assert ends == [False, True]


def test_a_run_without_a_model_names_such_a_class_too() -> None:
    """As the setting does: the model is a stand-in, and metrics have the configuration's names."""
    (kind,) = find_callbacks(["tests.support.callbacks:OfKerasKind"])
    called = kind().adapted()
    called.on_train_begin({"n_epochs": 2})
    assert called.on_epoch_end(1, record_of(1, 1.5)) is True
    assert "val_accuracy" in called.logs


def test_an_object_of_the_other_interface_is_called_as_it_is() -> None:
    class Plain:
        def on_epoch_end(self, epoch: int, record: Any) -> None: ...

    plain = Plain()
    assert decide([plain], CONTEXT).objects == (plain,)
    decisions = decide([TerminateOnNaN(), EarlyStopping(restore_best_weights=True)], CONTEXT)
    assert (decisions.objects, decisions.ends_at_nan, decisions.restores_best) == ((), True, True)
    assert not decide([EarlyStopping()], CONTEXT).restores_best


class Copied:
    """A run that writes checkpoints, and calls what copies them."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.run, self.values = folder / "run", dict[int, float]()
        self.run.mkdir(exist_ok=True)
        self.target = folder / "copies"
        self.callback = ModelCheckpoint(self.target / "{epoch:02d}-{val_loss:.2f}.x", **arguments)
        self.begin(resume=False)

    def begin(self, resume: bool) -> None:
        """Begin a program, as after a kill."""
        self.called = self.callback.adapted(metrics=NAMES)
        config = Config(weights_dir=str(self.run), resume_train=resume)
        self.called.on_train_begin(config.model_dump(mode="json"))

    def save(self, epoch: int, loss: float, step: int = 0) -> None:
        """Write a checkpoint, and the record up to it."""
        self.values[epoch] = loss
        name = f"epoch-{epoch:04}" + f"-step-{step:06}" * bool(step)
        history = tuple({"validation_loss": self.values[n]} for n in range(1, epoch + 1))
        state = RunState(epoch, step, history=history)
        weights = {"w": np.full(1, loss, "f4")}
        network = NetworkDescription(67, 3, 1.0)
        save_checkpoint(self.run / f"{name}.safetensors", Checkpoint(weights, {}, network, state))
        lines = [ValidationRecord(n, n, self.values[n], 0.5, 0.5, 7) for n in range(1, epoch + 1)]
        (self.run / "record.jsonl").write_text("".join(to_json(each) + "\n" for each in lines))

    def end(self, epoch: int, loss: float) -> None:
        self.save(epoch, loss)
        self.called.on_epoch_end(epoch, record_of(epoch, loss))

    @property
    def copies(self) -> list[str]:
        return sorted(path.name for path in self.target.glob("*"))


def test_each_checkpoint_is_copied(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    run.end(1, 0.5)
    run.end(2, 0.75)
    assert run.copies == ["01-0.50.x", "02-0.75.x"]
    copy, original = run.target / "02-0.75.x", run.run / "epoch-0002.safetensors"
    assert copy.read_bytes() == original.read_bytes()
    assert read_header(copy).state.epoch == 2


@pytest.mark.parametrize("killed_after", [1, 2, 3, 4])
@pytest.mark.parametrize("is_copied", [True, False])
def test_the_best_are_copied_also_over_a_resume(
    tmp_path: Path, killed_after: int, is_copied: bool
) -> None:
    """Killed before the copy as well, of which the checkpoint is there."""
    losses = [0.5, 0.75, 0.25, 0.5, 0.125]
    run = Copied(tmp_path, save_best_only=True)
    for epoch, loss in enumerate(losses, 1):
        if epoch == killed_after and not is_copied:
            run.save(epoch, loss)
        else:
            run.end(epoch, loss)
        if epoch == killed_after:
            run.begin(resume=True)
    assert run.copies == ["01-0.50.x", "03-0.25.x", "05-0.12.x"]


def test_a_run_that_goes_back_compares_with_the_epochs_before(tmp_path: Path) -> None:
    run = Copied(tmp_path, save_best_only=True, initial_value_threshold=0.8)
    for epoch, loss in [(1, 0.9), (2, 0.5), (3, 0.25), (2, 0.6), (3, math.nan), (4, 0.55)]:
        run.end(epoch, loss)
    assert run.copies == ["02-0.50.x", "02-0.60.x", "03-0.25.x", "04-0.55.x"]


def test_a_resume_within_an_epoch_needs_no_older_checkpoint(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    run.end(1, 0.5)
    (run.run / "epoch-0001.safetensors").unlink()
    run.save(1, 0.5, step=3)
    run.begin(resume=True)
    run.end(2, 0.25)
    assert run.copies == ["01-0.50.x", "02-0.25.x"]


def test_a_copy_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    run.target.write_text("")
    with pytest.raises(InputError, match=r"ModelCheckpoint: .* cannot be copied to .*01-0.50.x"):
        run.end(1, 0.5)


def test_importing_the_callbacks_is_cheap() -> None:
    code = (
        "import sys, tandem.nn.callbacks; "
        "print([m for m in ('torch', 'pytensor', 'keras') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
