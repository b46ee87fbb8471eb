"""Keras's callbacks that are settings of a run: nothing is called while it trains."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import InputError
from tandem.layers.monitored import is_higher_better
from tandem.validation import shown, suggestion

Mode = Literal["auto", "min", "max"]


@dataclass(frozen=True)
class Context:
    """The facts on which settings depend.

    Attributes
    ----------
    epochs : int
        Of the whole training.
    learning_rate : float
        Of the first epoch.
    metrics : mapping of str to str
        Name of each metric in the configuration, by its name in Keras.
    validates : bool
        Whether there are validation rows.
    """

    epochs: int
    learning_rate: float
    metrics: Mapping[str, str]
    validates: bool = True

    @property
    def logs(self) -> tuple[str, ...]:
        """The names of an epoch's values."""
        names = ("loss", *self.metrics)
        after = tuple(f"val_{name}" for name in names) if self.validates else ()
        return (*names, *after, "learning_rate")

    def monitored(self, who: object, monitor: str, mode: str) -> str:
        """Name in the configuration of the value that a callback looks at.

        Raises InputError where there is none, or where `mode` contradicts it.
        """
        place = f"{type(who).__name__}: monitor"
        values = {"val_loss": "validation_loss"}
        values |= {f"val_{name}": metric for name, metric in self.metrics.items()}
        if not self.validates:
            raise InputError(
                f"{place}: found {shown(monitor)} without validation data, expected "
                "validation_split or validation_data in fit"
            )
        if monitor not in values:
            kind = " of training" if monitor in self.logs else ""
            hint = suggestion(str(monitor), values) or "."
            raise InputError(
                f"{place}: found {shown(monitor)}{kind}{hint} Expected a value of the validation: "
                f"{', '.join(values)}"
            )
        name = values[monitor]
        own = "max" if is_higher_better(name) else "min"
        if mode not in ("auto", own):
            raise InputError(
                f"{type(who).__name__}: mode: found {shown(mode)} for {monitor}, expected auto or "
                f"{own}"
            )
        return name


class SettingCallback(ABC):
    """Base of callbacks that become settings: frozen dataclasses with Keras's arguments.

    `verbose` changes nothing: a run says why it ends, and its rate is in its reports.
    """

    @abstractmethod
    def settings(self, context: Context) -> dict[str, Any]:
        """Keys of the configuration with their values; raises InputError for bad arguments."""

    def _only(self, **expected: Any) -> None:
        """Refuse arguments of Keras's that have no counterpart, where they are not as given."""
        for name, value in expected.items():
            if (found := getattr(self, name)) != value:
                raise InputError(
                    f"{type(self).__name__}: {name}: found {shown(found)}, expected {shown(value)}"
                )

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise InputError(
                f"{type(self).__name__}: {name}: found {shown(getattr(self, name))}, expected "
                f"{expected}"
            )

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        self._check(name, is_count, "a whole number of at least 0")


@dataclass(frozen=True)
class EarlyStopping(SettingCallback):
    """End training when a value of the validation has stopped improving.

    With `restore_best_weights` the model gets the weights of the best epoch.
    """

    monitor: str = "val_loss"
    min_delta: float = 0
    patience: int = 0
    verbose: int = 0
    mode: Mode = "auto"
    baseline: float | None = None
    restore_best_weights: bool = False
    start_from_epoch: int = 0

    def settings(self, context: Context) -> dict[str, Any]:
        self._check_count("patience")
        self._check_count("start_from_epoch")
        name = context.monitored(self, self.monitor, self.mode)
        found = {
            "stop_monitor": name,
            "stop_patience": max(1, self.patience),  # Keras ends at the first bad epoch by 0 too
            "stop_delta": abs(self.min_delta),
            "stop_baseline": self.baseline,
            "stop_from_epoch": self.start_from_epoch,
        }
        return found | ({"keep_monitor": name} if self.restore_best_weights else {})


@dataclass(frozen=True)
class ReduceLROnPlateau(SettingCallback):
    """Multiply the learning rate by a factor when a value has stopped improving."""

    monitor: str = "val_loss"
    factor: float = 0.1
    patience: int = 10
    verbose: int = 0
    mode: Mode = "auto"
    min_delta: float = 1e-4
    cooldown: int = 0
    min_lr: float = 0.0

    def settings(self, context: Context) -> dict[str, Any]:
        self._check("factor", 0 < self.factor < 1, "a number above 0 and below 1")
        self._check("min_lr", self.min_lr >= 0, "a number of at least 0")
        self._check_count("patience")
        self._check_count("cooldown")
        return {
            "lr_policy": "plateau",
            "lr_monitor": context.monitored(self, self.monitor, self.mode),
            "lr_factor": self.factor,
            # Keras's rate falls after `patience` bad epochs, ours after more than `lr_patience`,
            # and the last epoch of its cooldown may be bad already.
            "lr_patience": max(0, self.patience - 1),
            "lr_cooldown": max(0, self.cooldown - 1),
            "lr_threshold": 0.0,
            "lr_delta": abs(self.min_delta),
            "lr_min": self.min_lr,
        }


@dataclass(frozen=True)
class LearningRateScheduler(SettingCallback):
    """Take each epoch's learning rate from a function, which is called before training.

    `schedule` gets the epoch, from 0, and the rate of the epoch before, or the epoch alone.
    """

    schedule: Callable[..., float]
    verbose: int = 0

    def settings(self, context: Context) -> dict[str, Any]:
        try:
            inspect.signature(self.schedule).bind(0, 0.0)
            takes_rate = True
        except (TypeError, ValueError):
            takes_rate = False
        table: dict[int, float] = {}
        last, rate = None, context.learning_rate
        for epoch in range(context.epochs):
            value = self.schedule(epoch, rate) if takes_rate else self.schedule(epoch)
            try:
                rate = float(value)
            except (TypeError, ValueError):
                rate = -1.0
            if not 0 < rate < float("inf"):
                raise InputError(
                    f"LearningRateScheduler: schedule: found {shown(value)} for epoch {epoch}, "
                    "expected a number above 0"
                )
            if rate != last:
                table[epoch] = last = rate
        return {"lr_policy": "table", "lr_table": table}


@dataclass(frozen=True)
class CSVLogger(SettingCallback):
    """Write a table of the epochs, which a resumed run continues."""

    filename: str | os.PathLike[str]
    separator: str = ","
    append: bool = False

    def settings(self, context: Context) -> dict[str, Any]:
        self._only(separator=",")
        self._check("append", self.append is False, "False: a resumed run continues its own table")
        return {"csv_file": os.fspath(self.filename)}


@dataclass(frozen=True)
class TensorBoard(SettingCallback):
    """Write event files for TensorBoard, with histograms of the weights in each checkpoint.

    `update_freq` is "epoch", "batch", or a number of steps.
    """

    log_dir: str | os.PathLike[str] = "logs"
    histogram_freq: int = 0
    write_graph: bool = True
    write_images: bool = False
    write_steps_per_second: bool = False
    update_freq: str | int = "epoch"
    profile_batch: int = 0
    embeddings_freq: int = 0
    embeddings_metadata: Any = None

    def settings(self, context: Context) -> dict[str, Any]:
        self._only(write_images=False, profile_batch=0, embeddings_freq=0, embeddings_metadata=None)
        found = {"tensorboard": True, "tensorboard_dir": os.fspath(self.log_dir)}
        if self.update_freq == "epoch":
            return {**found, "print_epochs": True}
        steps = 1 if self.update_freq == "batch" else self.update_freq
        is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
        self._check("update_freq", is_count, '"epoch", "batch" or a number of steps of at least 1')
        return {**found, "print_freq": steps}


@dataclass(frozen=True)
class TerminateOnNaN(SettingCallback):
    """End training before an update whose loss or gradient is not finite."""

    def settings(self, context: Context) -> dict[str, Any]:
        return {"on_nan": "stop"}
