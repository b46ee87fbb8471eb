"""Training of a model: its arrays become files, its settings those of a run."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.run_folder import CONFIGURATION, RECORD, find_best, list_checkpoints
from tandem.artifacts.run_lock import locked
from tandem.config.command_line import ANSWERS
from tandem.config.hardware import resolve_devices
from tandem.config.schema import Config, make_config
from tandem.data.manifest import MANIFEST_NAME, Manifest, read_any_manifest
from tandem.data.order import minibatch_count
from tandem.errors import InputError
from tandem.launch.api import raise_failure
from tandem.launch.callbacks import Callbacks
from tandem.launch.local import Launcher, LocalLauncher
from tandem.launch.programs import execute_training
from tandem.launch.ranks import is_rank, work_on_ranks_of_script
from tandem.layers.network import GRAPH_NETWORK
from tandem.nn.arrays import Rows, as_rows, checked_rows, divided
from tandem.nn.callbacks import Context, Decisions, decide
from tandem.nn.history import History
from tandem.nn.progress import EpochProgress, Verbose, chosen
from tandem.preprocessing.arrays import checksum, matches, write_arrays, write_pictures
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
        self._check_arguments(x is None)
        splits = None
        if x is not None:
            splits = self._splits(x, y, validation_split, validation_data)
        decided = self._decisions(splits)

        def work(launcher: Launcher) -> tuple[Outcome, Path]:
            folder = self._folder()
            return self._train(splits, folder, decided, launcher), folder

        outcome, folder = work_on_ranks_of_script(work) if is_rank() else work(LocalLauncher())
        if not (decided.ends_at_nan and isinstance(outcome.failure, Diverged)):
            raise_failure(outcome)
        return self._finish(folder, decided)

    def _check_arguments(self, is_prepared: bool) -> None:
        self.model.compiled()
        for name, least in (("batch_size", 1), ("epochs", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"{name}: found {shown(value)}, expected a whole number from {least}"
                )
        for key in self.settings:
            if key in _ARGUMENTS:
                raise InputError(
                    f"fit: found the setting {key}, expected {_ARGUMENTS[key]} instead"
                )
        if is_prepared and "data_folder" not in self.settings:
            raise InputError("x: found None, expected an array, or the setting data_folder")
        if not is_prepared and "data_folder" in self.settings:
            raise InputError("data_folder: found it beside x, expected one of them")
        if self.resume and self.run is None:
            raise InputError("resume: found True without run, expected the run folder to continue")

    def _decisions(self, splits: list[Rows] | None) -> Decisions:
        """What the callbacks decide."""
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
        model, loss = self.model, self.model.compiled().loss
        model.build(np.shape(x))
        shape, units = model.graph.input_shape, model.units
        model.compiled().output_of(model.graph)
        splits = [checked_rows(x, y, shape, units, loss, may_crop=self._crops)]
        if validation_data is not None:
            if not isinstance(validation_data, Sequence) or len(validation_data) != 2:
                raise InputError(
                    f"validation_data: found {type(validation_data).__name__}, expected (x, y)"
                )
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
        if not self.resume and (list_checkpoints(folder) or (folder / RECORD).exists()):
            raise InputError(
                f"run: found a run in {folder} already, expected an empty folder: continue it with "
                "resume=True, or choose another"
            )
        return folder

    def _train(
        self, splits: list[Rows] | None, folder: Path, decided: Decisions, launcher: Launcher
    ) -> Outcome:
        """Write what the processes of the run read, and train."""
        with locked(folder) as lock:
            if splits is None:
                data = Path(self.settings["data_folder"])
            else:
                data = folder / DATA
                self._store(splits, data)
            config = self._config(data, folder, decided, launcher)
            names = self.model.compiled().names

            def make_reporter(spec: RunSpec) -> EpochProgress:
                return EpochProgress(spec, chosen(self.verbose), names)

            callbacks = Callbacks(decided.objects)
            return execute_training(config, lock, launcher, callbacks, make_reporter)

    def _store(self, splits: list[Rows], folder: Path) -> None:
        """Write the arrays to files, or check that those of a stopped run are the same."""
        units = self.model.units
        names = None if self.class_names is None else list(self.class_names)
        if names is not None and len(names) != units:
            raise InputError(f"class_names: found {len(names)}, expected {units}, as outputs")
        train = splits[0].x, splits[0].y
        validation = (splits[1].x, splits[1].y) if len(splits) == 2 else None
        if self.resume:
            if matches(folder, checksum(*train, *(validation or (None, None)))):
                return
        elif (folder / MANIFEST_NAME).exists():  # of a run that did not begin
            shutil.rmtree(folder)
        if splits[0].y.dtype == np.int64 and names is None:
            names = [str(number) for number in range(units)]
        write = write_pictures if splits[0].are_pictures else write_arrays
        write(folder, train, validation, names)

    def _config(self, data: Path, folder: Path, decided: Decisions, launcher: Launcher) -> Config:
        """The configuration of the run."""
        model, manifest = self.model, read_any_manifest(data / MANIFEST_NAME)
        shape = model.graph.input_shape
        devices = self.devices if isinstance(self.devices, str) else list(self.devices)
        given = {
            "n_epochs": self.epochs,
            "resume_train": self.resume,
            "data_folder": os.fspath(data),
            "weights_dir": os.fspath(folder),
            "mean_file": None,
            "network": GRAPH_NETWORK,
            "network_options": model.options(),
            "shuffle": "images" if self.shuffle else "none",
            "rand_crop": False,
            "rand_mirror": False,
            "lr_policy": "constant",
            "seed": model.seed,
            "devices": devices,
            "print_epochs": True,
            "live_view": False,
            "freeze": list(model.graph.frozen),
        }
        side = shape[0] if isinstance(manifest, Manifest) else None
        if side is not None:
            given["crop_size"] = side
        values = {**given, **model.compiled().settings, **decided.settings, **self.settings}
        if values["freeze"] or model.has_own_weights:
            values["init_weights"] = os.fspath(self._initial(folder, side))
        config = validated(Config, values, {key: key for key in self.settings}, "", ANSWERS)
        trainers = len(launcher.ranks) or len(resolve_devices(config.devices, config.para_load))
        if self.batch_size % trainers:
            near = -(-self.batch_size // trainers) * trainers
            raise InputError(
                f"batch_size: found {self.batch_size} for {trainers} trainers, expected a multiple "
                f"of their number, such as {near}"
            )
        own = self.batch_size // trainers
        changes: dict[str, Any] = {"batch_size": own}
        if model.graph.untrained:
            changes["norm_rows"] = min(model.norm_rows, self.batch_size)
        if "print_freq" not in self.settings:
            rows = sum(manifest.counts("train"))
            changes["print_freq"] = max(1, minibatch_count(rows, self.batch_size) // _REPORTS)
        return validated(Config, {**config.model_dump(mode="json"), **changes}, {}, "", ANSWERS)

    def _initial(self, folder: Path, crop_size: int | None) -> Path:
        """Write the weights with which the run begins, unless a stopped run has; their file."""
        path, model = folder / INITIAL, self.model
        if not (self.resume and path.exists()):
            description = model.description(crop_size)
            weights = Checkpoint(model.weights, {}, description, untrained=model.graph.untrained)
            save_checkpoint(path, weights)
        return path

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
