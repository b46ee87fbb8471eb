"""Keras's ``ModelCheckpoint``: copies of a run's checkpoints."""

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.artifacts.checkpoint import RunState, read_header
from tandem.artifacts.epochs import epochs_of, logs_of
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.run_folder import RECORD, checkpoint_name, find_checkpoint
from tandem.errors import InputError
from tandem.files import replacing
from tandem.layers.monitored import is_better, worst
from tandem.nn.callbacks.base import renamed
from tandem.nn.callbacks.settings import Context, Mode, SettingCallback


@dataclass(frozen=True)
class ModelCheckpoint(SettingCallback):
    """Copy the checkpoint of each epoch, or of each best one, to a file.

    `filepath` may name the epoch, from 1, and an epoch's values, as "{epoch:02d}-{val_loss:.2f}".
    The file is a checkpoint of the run: the whole model, with `save_weights_only` too.
    """

    filepath: str | os.PathLike[str]
    monitor: str = "val_loss"
    verbose: int = 0
    save_best_only: bool = False
    save_weights_only: bool = False
    mode: Mode = "auto"
    save_freq: str | int = "epoch"
    initial_value_threshold: float | None = None

    def settings(self, context: Context) -> dict[str, Any]:
        self._only(save_freq="epoch")
        if self.save_best_only:
            context.monitored(self, self.monitor, self.mode)
        self.path(1, dict.fromkeys(context.logs, 0.0))
        return {"snapshot_freq": 1}

    def path(self, epoch: int, logs: Mapping[str, float]) -> Path:
        """The file for an epoch, counted from 1; raises InputError where it cannot be named."""
        text = os.fspath(self.filepath)
        try:
            return Path(text.format(**{**logs, "epoch": epoch}))
        except (LookupError, ValueError) as error:
            raise InputError(
                f"ModelCheckpoint: filepath: found {text!r}, which cannot be filled in "
                f"({error}), expected only {', '.join(('epoch', *logs))} in braces"
            ) from error

    def adapted(self, model: Any = None, metrics: Mapping[str, str] | None = None) -> Any:
        """Return what a run calls, as `tandem.nn.callbacks.Callback.adapted` does."""
        return _Copies(self, metrics)


@dataclass
class _Copies:
    """Copies checkpoints, when the trainers wait.

    Which are copied follows from the values of the epochs before alone, also where these were
    before a resume, or where a run has gone back.
    """

    callback: ModelCheckpoint
    metrics: Mapping[str, str] | None
    run: Path = Path()
    values: dict[int, float] = field(default_factory=dict)  # of each epoch, from 1

    def on_train_begin(self, config: Mapping[str, Any]) -> None:
        self.run, self.values = Path(config["weights_dir"]), {}
        resumed = None
        if config["resume_train"]:
            resumed = find_checkpoint(self.run, config["load_epoch"])
        if resumed is None:
            return
        state = read_header(resumed).state
        for record, train in epochs_of(read_records(self.run / RECORD)):
            if record.epoch <= state.epoch:
                logs = renamed(logs_of(record, train), self.metrics)
                # The run may have ended between the checkpoint of the last epoch and its copy.
                is_last = record.epoch == state.epoch and state.step_in_epoch == 0
                self._note(record.epoch, logs, copies=is_last)

    def on_epoch_end(self, epoch: int, record: Any) -> None:
        self._note(epoch, renamed(record.logs, self.metrics), copies=True)

    def _note(self, epoch: int, logs: Mapping[str, float], *, copies: bool) -> None:
        """Remember an epoch, and copy its checkpoint if that is due."""
        self.values = {each: value for each, value in self.values.items() if each < epoch}
        is_due = not self.callback.save_best_only or self._is_best(logs)
        self.values[epoch] = logs.get(self.callback.monitor, math.nan)
        source = self.run / checkpoint_name(RunState(epoch=epoch))
        if not (copies and is_due):
            return
        target = self.callback.path(epoch, logs)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as partial:
                shutil.copyfile(source, partial)
        except OSError as error:
            raise InputError(
                f"ModelCheckpoint: {source} cannot be copied to {target} ({error.strerror})"
            ) from error

    def _is_best(self, logs: Mapping[str, float]) -> bool:
        """Return whether an epoch is better than all that were noted, and than the threshold."""
        monitor = self.callback.monitor
        name = (self.metrics or {}).get(monitor.removeprefix("val_"), monitor.removeprefix("val_"))
        best = self.callback.initial_value_threshold
        best = worst(name) if best is None else best
        for value in self.values.values():
            if is_better(value, best, name):
                best = value
        return is_better(logs.get(monitor, math.nan), best, name)
