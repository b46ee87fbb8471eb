"""Training of a model: its arrays become files, its settings those of a run."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from tandem.artifacts.checkpoint import Checkpoint, RunState, read_checkpoint, save_checkpoint
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.run_folder import (
    CONFIGURATION,
    RECORD,
    checkpoint_name,
    find_best,
    list_checkpoints,
)
from tandem.artifacts.run_lock import locked
from tandem.config.command_line import ANSWERS
from tandem.config.hardware import resolve_devices
from tandem.config.schema import Config, make_config
from tandem.data.manifest import Manifest, read_any_manifest
from tandem.data.order import minibatch_count
from tandem.errors import InputError
from tandem.launch.api import raise_failure
from tandem.launch.callbacks import Callbacks
from tandem.launch.local import Launcher, LocalLauncher
from tandem.launch.programs import execute_training
from tandem.launch.ranks import is_rank, work_on_ranks_of_script
from tandem.layers.network import GRAPH_NETWORK
from tandem.nn.arrays import Rows, as_array, as_rows, checked_rows, divided
from tandem.nn.callbacks import Callback, Context, Decisions, decide
from tandem.nn.history import History
from tandem.nn.progress import EpochProgress, Verbose, chosen
from tandem.nn.stored import check_stored, remove_unbegun, store
from tandem.processes.supervisor import Outcome
from tandem.training.messages import Diverged
from tandem.training.run_spec import RunSpec
from tandem.validation import read_yaml, shown, validated

if TYPE_CHECKING:
    from tandem.nn.model import Model

_REPORTS = 50  # of an epoch, for its bar
DATA = "data"  # the folder of a run's arrays, in its run folder
INITIAL = "initial.safetensors"  # the weights of a model that has learnt before

# Keys of the configuration that are arguments, or belong to the model.
_ARGUMENTS = {
    "n_epochs": "epochs",
    "weights_dir": "run",
    "resume_train": "resume",
    "network": "the model",
    "network_options": "the model",
    "norm_before_pool": "the model",
    "width": "the model",
    "crop_size": "the shape of Input",
    "norm_rows": "norm_rows of the model",
    "mean_file": "a layer, such as Rescaling",
    "optimizer": "optimizer of compile",
    "loss": "loss of compile",
    "metrics": "metrics of compile",
    "init_weights": "load_model or set_weights",
    "freeze": "trainable=False of layers",
}
# Arguments of Keras's `fit` that there is nothing for.
_ABSENT = (
    "class_weight",
    "initial_epoch",
    "sample_weight",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_freq",
    "validation_steps",
)
_OF_PICTURES = ("rand_crop", "rand_mirror", "rand_colour")


@dataclass(frozen=True)
class Fit:
    """The arguments of `Model.fit`, and what follows from them."""

    model: Model
    batch_size: int
    epochs: int
    verbose: Verbose
    callbacks: tuple[Any, ...]
    shuffle: bool
    devices: str | Sequence[str]
    run: str | os.PathLike[str] | None
    resume: bool
    class_names: Sequence[str] | None
    settings: Mapping[str, Any]

    def execute(
        self, x: Any, y: Any, validation_split: float, validation_data: tuple[Any, Any] | None
    ) -> History:
        """Train; return the values of each epoch."""
        try:
            return self._execute(x, y, validation_split, validation_data)
        except InputError as error:
            error.args = (str(error).replace("weights_dir ", "run "),)  # as the caller named it
            raise

    def _execute(
        self, x: Any, y: Any, validation_split: float, validation_data: tuple[Any, Any] | None
    ) -> History:
        self._check_arguments()
        splits = None
        if x is not None:
            splits = self._splits(x, y, validation_split, validation_data)
        else:
            self._check_prepared(y is None and validation_data is None and not validation_split)
        decided = self._decisions(splits)

        def work(launcher: Launcher) -> tuple[Outcome, Path]:
            folder = self._folder()
            return self._train(splits, folder, decided, launcher), folder

        outcome, folder = work_on_ranks_of_script(work) if is_rank() else work(LocalLauncher())
        if not (decided.ends_at_nan and isinstance(outcome.failure, Diverged)):
            raise_failure(outcome)
        return self._finish(folder, decided)

    def _check_arguments(self) -> None:
        self.model.compiled()
        for name, least in (("batch_size", 1), ("epochs", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"{name}: found {shown(value)}, expected a whole number from {least}"
                )
        chosen(self.verbose)
        for key in self.settings:
            if key in _ARGUMENTS:
                raise InputError(
                    f"fit: found the setting {key}, expected {_ARGUMENTS[key]} instead"
                )
            if key in _ABSENT:
                raise InputError(f"fit: found {key}, expected no such argument: only Keras has it")
        if not isinstance(self.devices, Sequence):
            raise InputError(
                f"devices: found {shown(self.devices)}, expected auto, or a device for each "
                "trainer, such as ['cpu', 'cpu']"
            )
        if isinstance(self.class_names, str):
            raise InputError(
                f"class_names: found {shown(self.class_names)}, expected a list of names"
            )
        is_path = isinstance(self.run, str | os.PathLike | NoneType)
        if not is_path or self.run == "" or "\0" in str(self.run):
            raise InputError(f"run: found {shown(self.run)}, expected the path of a folder")
        if self.resume and self.run is None:
            raise InputError("resume: found True without run, expected the run folder to continue")

    def _check_prepared(self, is_alone: bool) -> None:
        """Refuse a fit without x that names no data set, or other arrays beside it."""
        if "data_folder" not in self.settings:
            raise InputError("x: found None, expected an array, or the setting data_folder")
        if not is_alone or self.class_names is not None:
            raise InputError(
                "data_folder: found it with y, class_names, validation_split or validation_data, "
                "expected none of them: the data set has its own"
            )
        folder = Path(self.settings["data_folder"])
        check_stored(folder, read_any_manifest(folder), self.model)

    def _decisions(self, splits: list[Rows] | None) -> Decisions:
        """Return what the callbacks decide."""
        compilation = self.model.compiled()
        rate = self.settings.get("learning_rate", compilation.settings["learning_rate"])
        validates = splits is None or len(splits) == 2
        context = Context(self.epochs, rate, compilation.names, validates)
        self.model.stop_training = False
        return decide(self.callbacks, context, self.model)

    def _splits(
        self, x: Any, y: Any, validation_split: float, validation_data: tuple[Any, Any] | None
    ) -> list[Rows]:
        """Training rows and, if there are any, validation rows, in one form."""
        if "data_folder" in self.settings:
            raise InputError("data_folder: found it beside x, expected one of them")
        x = as_array(x, "x")
        model, loss = copy.copy(self.model), self.model.compiled().loss
        model.build(x.shape)  # the copy alone, until the arrays are known to be usable
        shape, units = model.graph.input_shape, model.units
        model.compiled().output_of(model.graph)
        splits = [checked_rows(x, y, shape, units, loss, may_crop=self._crops)]
        if validation_data is not None:
            if not isinstance(validation_data, Sequence):
                found = type(validation_data).__name__
                raise InputError(f"validation_data: found {found}, expected (x, y)")
            if (count := len(validation_data)) != 2:
                raise InputError(f"validation_data: found {count} values, expected (x, y)")
            name = "validation_data: "
            splits.append(
                checked_rows(*validation_data, shape, units, loss, name=name, may_crop=self._crops)
            )
        elif validation_split:
            splits = [*divided(splits[0], validation_split)]
        splits = as_rows(splits, units, shape)
        if len(splits) == 2 and splits[0].x.shape[1:] != splits[1].x.shape[1:]:
            raise InputError(
                f"validation_data: found pictures of {splits[1].x.shape[1:]}, expected "
                f"{splits[0].x.shape[1:]}, as x has"
            )
        self.model.build(x.shape)
        return splits

    @property
    def _crops(self) -> bool:
        return self.settings.get("rand_crop") is True

    def _folder(self) -> Path:
        """The run folder: the one that was named, or a new one."""
        if self.run is None:
            runs = Path("runs")
            names = (f"{self.model.name}-{number}" for number in itertools.count(1))
            return next(runs / name for name in names if not (runs / name).exists())
        folder = Path(self.run)
        begun = [folder / RECORD, folder / CONFIGURATION, *list_checkpoints(folder)]
        if not self.resume and any(path.exists() for path in begun):
            raise InputError(
                f"run: found a run in {folder} already, expected an empty folder: continue it with "
                "resume=True, or choose another"
            )
        return folder

    def _train(
        self, splits: list[Rows] | None, folder: Path, decided: Decisions, launcher: Launcher
    ) -> Outcome:
        """Write what the processes of the run read, and train."""
        data = folder / DATA if splits is not None else Path(self.settings["data_folder"])
        config = self._config(splits, data, folder, decided, launcher)
        names = self.model.compiled().names

        def make_reporter(spec: RunSpec) -> EpochProgress:
            return EpochProgress(spec, chosen(self.verbose), names)

        objects = decided.objects
        if any(isinstance(each, Callback) for each in self.callbacks):
            objects = (_NewestWeights(self.model, folder), *objects)
        with locked(folder) as lock:
            made = {folder / name for name in (RECORD, CONFIGURATION, INITIAL, DATA)}
            made = {path for path in made if not path.exists()}
            outcome = None
            try:
                if splits is not None:
                    if store(data, splits, self.model, self.class_names):
                        made.add(data)
                    splits.clear()  # copies of the arrays, if they had to be converted
                if config.init_weights is not None and not self._has_begun(folder):
                    self._write_initial(folder, isinstance(read_any_manifest(data), Manifest))
                callbacks = Callbacks(objects)
                outcome = execute_training(config, lock, launcher, callbacks, make_reporter)
                return outcome
            finally:
                failure = None if outcome is None else outcome.failure
                if outcome is None or not isinstance(failure, Diverged | NoneType):
                    remove_unbegun(folder, made)

    def _config(
        self,
        splits: list[Rows] | None,
        data: Path,
        folder: Path,
        decided: Decisions,
        launcher: Launcher,
    ) -> Config:
        """The configuration of the run. Nothing is written."""
        model, settings = self.model, dict(self.settings)
        if splits is None:
            manifest = read_any_manifest(data)
            rows, are_pictures = sum(manifest.counts("train")), isinstance(manifest, Manifest)
        else:
            rows, are_pictures = len(splits[0]), splits[0].are_pictures
        for name in _OF_PICTURES:
            if settings.get(name) and not are_pictures:
                raise InputError(
                    f"{name}: found {shown(settings[name])} with rows of numbers, expected uint8 "
                    "pictures with class labels"
                )
        given = {
            "n_epochs": self.epochs,
            "resume_train": self.resume,
            "data_folder": data,
            "weights_dir": folder,
            "mean_file": None,
            "network": GRAPH_NETWORK,
            "network_options": model.options(),
            "shuffle": "images" if self.shuffle else "none",
            "rand_crop": False,
            "rand_mirror": False,
            "lr_policy": "constant",
            "seed": model.seed,
            "devices": self.devices if isinstance(self.devices, str) else list(self.devices),
            "print_epochs": True,
            "live_view": False,
            "freeze": list(model.graph.frozen),
        }
        if are_pictures:
            given["crop_size"] = model.graph.input_shape[0]
        values = {**given, **model.compiled().settings, **decided.settings, **settings}
        # A run's random weights are those of its seed, and the model's of its own.
        if values["freeze"] or model.has_own_weights or values["seed"] != model.seed:
            values["init_weights"] = folder / INITIAL
        values = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in values.items()}
        config = validated(Config, values, {key: key for key in settings}, "", ANSWERS)
        changes = self._parts(config, launcher, rows)
        if "print_freq" not in settings:
            changes["print_freq"] = max(1, minibatch_count(rows, self.batch_size) // _REPORTS)
        return config.model_copy(update=changes)

    def _parts(self, config: Config, launcher: Launcher, count: int) -> dict[str, Any]:
        """The settings of a trainer's part of each batch, of all rows where there are fewer."""
        trainers = len(launcher.ranks) or len(resolve_devices(config.devices, config.para_load))
        if self.batch_size % trainers:
            near = -(-self.batch_size // trainers) * trainers
            raise InputError(
                f"batch_size: found {self.batch_size} for {trainers} trainers, expected a multiple "
                f"of their number, such as {near}"
            )
        own, most = self.batch_size // trainers, -(-count // trainers)
        if not self.model.graph.untrained:
            return {"batch_size": min(own, most)}
        rows = min(self.model.norm_rows, self.batch_size)
        if own > most:
            own, rows = most, rows if most % rows == 0 else most
        if own % rows:
            raise InputError(
                f"norm_rows: found {rows}, expected a divisor of {own}, the rows that each of "
                f"{trainers} trainers has of batch_size {self.batch_size}: rows that are "
                "normalised together are with one of them"
            )
        return {"batch_size": own, "norm_rows": rows}

    def _has_begun(self, folder: Path) -> bool:
        return bool(list_checkpoints(folder)) and (folder / INITIAL).exists()

    def _write_initial(self, folder: Path, are_pictures: bool) -> None:
        """Write the weights with which the run begins."""
        model = self.model
        description = model.description(model.graph.input_shape[0] if are_pictures else None)
        weights = Checkpoint(model.weights, {}, description, untrained=model.graph.untrained)
        save_checkpoint(folder / INITIAL, weights)

    def _finish(self, folder: Path, decided: Decisions) -> History:
        """Load the weights of the run's end; collect its history."""
        found = list_checkpoints(folder)
        settings = read_yaml(folder / CONFIGURATION)
        best = find_best(make_config(settings)) if decided.restores_best else None
        if path := best or (found[-1] if found else None):
            checkpoint = read_checkpoint(path)
            self.model.load_weights(checkpoint.weights)
            self.model.trained = checkpoint.network
        names = self.model.compiled().names
        with_rate = "lr_policy" in decided.settings
        return History.of_records(read_records(folder / RECORD), names, folder, with_rate=with_rate)


@dataclass(frozen=True)
class _NewestWeights:
    """Loads the weights of each epoch, so that callbacks which look at the model see them."""

    model: Model
    folder: Path

    def on_epoch_end(self, epoch: int, record: Any) -> None:
        path = self.folder / checkpoint_name(RunState(epoch=epoch))
        if path.exists():  # by `snapshot_freq` not every epoch has one
            self.model.load_weights(read_checkpoint(path).weights)
