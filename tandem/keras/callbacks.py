"""Keras's callbacks during a run: what it reports, as they know it; imports Keras."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tandem.artifacts.checkpoint import RunState, read_checkpoint, read_header
from tandem.artifacts.epochs import epochs_of, logs_of
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records
from tandem.artifacts.run_folder import RECORD, checkpoint_name, find_checkpoint
from tandem.errors import InputError
from tandem.files import write_text
from tandem.keras.compilation import accumulated, own_method, rates_of
from tandem.keras.variables import load
from tandem.launch.status import MEASURED, Status
from tandem.processes.heartbeat import HeartbeatTable
from tandem.processes.supervisor import ProgressReporter
from tandem.training.messages import Notice, Stage

MEMORY = "fit.json"  # what a run's callbacks and History hold, in its folder

_REFUSED = {
    "BackupAndRestore": "the argument resume of fit",
    "SwapEMAWeights": "use_ema of the optimizer alone: trainers validate with the newest weights",
}
_OF_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def check_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Refuse what is no callback of Keras, or cannot be called in time; return what is called.

    A `keras.callbacks.TensorBoard`, which needs TensorFlow, is left to `settings_of`.
    """
    called = []
    for callback in callbacks:
        kind = type(callback).__name__
        if not isinstance(callback, keras.callbacks.Callback):
            raise InputError(f"callbacks: found {kind}, expected keras.callbacks.Callback objects")
        if kind in _REFUSED:
            raise InputError(f"callbacks: found {kind}, expected {_REFUSED[kind]}")
        if getattr(callback, "save_freq", "epoch") != "epoch":
            raise InputError(
                f"{kind}: save_freq: found {callback.save_freq!r}, expected 'epoch': the model "
                "gets new weights at the end of each"
            )
        if isinstance(callback, keras.callbacks.TensorBoard):
            if method := own_method(callback, *(n for n in dir(callback) if n.startswith("on_"))):
                raise InputError(
                    f"callbacks: found a {method} of {kind}'s own, expected TensorBoard itself, "
                    "which the run stands for, and another callback beside it"
                )
            continue
        is_own = not type(callback).__module__.startswith("keras.") or isinstance(
            callback, keras.callbacks.LambdaCallback
        )
        if is_own and any(_is_given(callback, method) for method in _OF_BATCHES):
            warnings.warn(
                f"{kind}: its methods of batches are called about fifty times an epoch, with means "
                "of the epoch so far, and the weights of its begin",
                stacklevel=4,
            )
        called.append(callback)
    return called


def _is_given(callback: Any, method: str) -> bool:
    return not getattr(getattr(callback, method), "_is_default", False)


def settings_of(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The keys of the configuration that callbacks stand for, which a run does by itself."""
    settings: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard):
            settings |= {"tensorboard": True, "tensorboard_dir": str(callback.log_dir)}
        if getattr(callback, "restore_best_weights", False):  # of a run that is resumed
            settings["keep_snapshots"] = max(3, int(callback.patience) + 2)
    return settings


def ends_at_nan(callbacks: Sequence[Any]) -> bool:
    """Return whether values that are not numbers end training well."""
    return any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in callbacks)


@dataclass
class Epochs:
    """Calls Keras's callbacks at their time; what a run calls, as `tandem.callbacks.Callback`.

    Attributes
    ----------
    model : keras.Model
    callbacks : keras.callbacks.CallbackList
    folder : Path
    shift : int
        By which Keras's numbers of epochs, from 0, are smaller than the run's.
    steps : int
        Of an epoch.
    validates : function
        Whether Keras's epoch of a number has a validation.
    measure : function or None
        Returns the metrics of the validation that Keras alone measures.
    """

    model: Any
    callbacks: Any
    folder: Path
    shift: int
    steps: int
    validates: Callable[[int], bool]
    measure: Callable[[], Mapping[str, float]] | None = None
    begun: int | None = None  # the epoch, whose begin was reported already
    logs: dict[str, float] = field(default_factory=dict)  # of the last epoch
    initial: list[dict[str, Any]] = field(default_factory=list)  # what `_plain` gave of each

    def on_train_begin(self, config: Mapping[str, Any]) -> bool:
        """Begin, or go on where the run in the folder has been; return whether it ends there."""
        path = find_checkpoint(self.folder, "latest")
        assert path is not None  # with which the run has begun
        goes_on = read_header(path).state.step > 0
        for callback in self.callbacks.callbacks if goes_on else ():
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
        self.model.stop_training = False
        self.callbacks.on_train_begin()
        self.initial = [*map(_plain, self.callbacks.callbacks)]
        if goes_on:
            self._restore(path)
        return bool(self.model.stop_training)

    def on_epoch_begin(self, epoch: int) -> None:
        if self.begun != epoch:
            self.begun = epoch
            self.callbacks.on_epoch_begin(epoch - 1 - self.shift)

    def on_epoch_end(self, epoch: int, record: Any) -> bool:
        self._end(epoch, record.logs)
        return bool(self.model.stop_training)

    def on_train_end(self, result: Mapping[str, Any]) -> None:
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
        self.callbacks.on_train_end(dict(self.logs))

    def rates(self) -> tuple[float, ...]:
        """The learning rates of the steps of the epoch that has begun."""
        return rates_of(self.model.optimizer, self.steps)

    def _end(self, epoch: int, logs: Mapping[str, float]) -> None:
        number = epoch - 1 - self.shift
        path = self.folder / checkpoint_name(RunState(epoch=epoch))
        load(self.model, read_checkpoint(path))
        self.logs = {name: value for name, value in logs.items() if name != "learning_rate"}
        if self.measure is not None and self.validates(number):
            found = {f"val_{name}": value for name, value in self.measure().items()}
            self.logs = found | self.logs
        self.logs = dict(sorted(self.logs.items(), key=lambda i: (i[0].startswith("val_"), i[0])))
        validation = {k[4:]: v for k, v in self.logs.items() if k.startswith("val_")}
        if validation:
            self.callbacks.on_test_begin()
            self.callbacks.on_test_end(validation)
        self.callbacks.on_epoch_end(number, self.logs)
        self._remember()

    def _remember(self) -> None:
        """Write what a resumed run needs of the callbacks, whole or not at all."""
        optimizer, history = self.model.optimizer, self.model.history
        rate = float(optimizer.learning_rate) if _has_plain_rate(optimizer) else None
        memory = {
            "epochs": history.epoch,
            "history": {k: [*map(float, v)] for k, v in history.history.items()},
            "learning_rate": rate,
            "stopped": bool(self.model.stop_training),
            "callbacks": [
                [type(c).__name__, dict(_plain(c).items() - before.items())]
                for c, before in zip(self.callbacks.callbacks, self.initial, strict=False)
            ],
        }
        write_text(self.folder / MEMORY, json.dumps(memory))

    def _restore(self, path: Path) -> None:
        """Set what callbacks have learnt, and report an epoch's end that they have missed."""
        checkpoint, memory = read_checkpoint(path), read_memory(self.folder)
        state, optimizer = checkpoint.state, self.model.optimizer
        load(self.model, checkpoint)
        # The trainers count an epoch's rates from its first step.
        optimizer._iterations.assign_sub(state.step_in_epoch * accumulated(optimizer))
        done = state.epoch - self.shift
        history = self.model.history
        history.epoch = [epoch for epoch in memory.get("epochs", ()) if epoch < done]
        kept = len(history.epoch)
        lists = memory.get("history", {})
        history.history = {key: values[:kept] for key, values in lists.items()}
        restore_rate(optimizer, memory)
        for callback, before, (kind, values) in zip(
            self.callbacks.callbacks, self.initial, memory.get("callbacks", ()), strict=False
        ):
            if type(callback).__name__ == kind:
                for name, value in values.items():
                    before.pop(name, None)  # learnt, whatever the object has had already
                    if name != "min_delta":  # of which Keras's monitors change the sign, once
                        setattr(callback, name, value)
                self._restore_best(callback)
        last = history.epoch[-1] if history.epoch else -1
        path = self.folder / RECORD
        records = read_records(path) if path.exists() else []
        for record, train in epochs_of(records):
            if last < record.epoch - 1 - self.shift < done:
                self.on_epoch_begin(record.epoch)
                self._end(record.epoch, logs_of(record, train))

    def _restore_best(self, callback: Any) -> None:
        """Give an `EarlyStopping` the weights of its best epoch again."""
        if not getattr(callback, "restore_best_weights", False):
            return
        if callback.best in (None, callback.baseline):  # none was better yet
            return
        epoch = callback.best_epoch + 1 + self.shift
        path = self.folder / checkpoint_name(RunState(epoch=epoch))
        if path.exists():
            newest = self.model.get_weights()
            load(self.model, read_checkpoint(path), states=False)
            callback.best_weights = self.model.get_weights()
            self.model.set_weights(newest)


def read_memory(folder: Path) -> dict[str, Any]:
    """Read what a run's callbacks have left in its folder; empty if nothing."""
    try:
        found = json.loads((folder / MEMORY).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / MEMORY}: cannot be read: {error}") from error
    return dict(found)


def restore_rate(optimizer: Any, memory: Mapping[str, Any]) -> None:
    """Set the learning rate that callbacks have left, unless a schedule decides."""
    rate = memory.get("learning_rate")
    if rate is not None and _has_plain_rate(optimizer):
        optimizer.learning_rate = rate


def _has_plain_rate(optimizer: Any) -> bool:
    schedule = keras.optimizers.schedules.LearningRateSchedule
    return not isinstance(optimizer._learning_rate, schedule)


def _plain(callback: Any) -> dict[str, Any]:
    """The attributes of a callback that are numbers, texts or nothing."""
    found = {}
    for name, value in vars(callback).items():
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, bool | int | float | str | None) and not name.startswith("_"):
            found[name] = value
    return found


class Batches(ProgressReporter):
    """Calls the methods of batches, at the pace of reports, with means of the epoch so far.

    With a `status` it says what is done before the first step, and estimates memory and time.
    """

    def __init__(self, callbacks: Any, steps: int, status: Status | None = None) -> None:
        self._callbacks, self._steps, self._status = callbacks, steps, status
        self._records: list[TrainRecord] = []
        self._pids: Mapping[str, int] = {}

    def begin(self, table: HeartbeatTable, pids: Mapping[str, int]) -> None:
        self._pids = pids

    def report(self, message: object) -> None:
        if self._status is not None:
            self._say(self._status, message)
        if isinstance(message, TrainRecord):
            self._records = [r for r in self._records if r.epoch == message.epoch]
            self._records.append(message)
            epoch = message.epoch
            so_far = ValidationRecord(epoch, 0, math.nan, math.nan, math.nan, 0)
            logs = logs_of(so_far, self._records)
            logs.pop("learning_rate", None)
            step = (message.step - 1) % self._steps
            self._callbacks.on_train_batch_begin(step)
            self._callbacks.on_train_batch_end(step, logs)
        elif isinstance(message, Notice):
            sys.stdout.write(f"{message.text}\n")

    def _say(self, status: Status, message: object) -> None:
        measured = status.pace.count
        status.update(message)
        text = ""
        if isinstance(message, Stage) and not self._records:
            text = status.starting
        elif measured < status.pace.count == MEASURED:
            text = f"\r{status.estimate(self._pids.values())}"  # over a line of Keras's progress
        if text:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
