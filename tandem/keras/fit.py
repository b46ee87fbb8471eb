"""Training of a Keras model: its arrays become files, what `compile` chose settings of a run."""

import functools
import itertools
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from tandem.artifacts.checkpoint import read_checkpoint, save_checkpoint
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.run_folder import CONFIGURATION, RECORD, checkpoint_name, list_checkpoints
from tandem.artifacts.run_lock import locked
from tandem.config.command_line import ANSWERS
from tandem.config.hardware import resolve_devices
from tandem.config.resolve import divided_by, group_of, resolve
from tandem.config.schema import Config
from tandem.data.manifest import MANIFEST_NAME, Manifest, read_any_manifest
from tandem.data.order import minibatch_count, trainer_shares
from tandem.distributed.ranks import is_rank
from tandem.errors import InputError
from tandem.keras import arrays
from tandem.keras.callbacks import (
    MEMORY,
    Batches,
    Epochs,
    check_callbacks,
    ends_at_nan,
    read_memory,
    restore_rate,
    settings_of,
)
from tandem.keras.compilation import (
    Compilation,
    accumulated,
    check_activations,
    first_rows,
    output_names,
    rates_of,
    without_keras,
)
from tandem.keras.distribution import Arguments, Distribution
from tandem.keras.losses import OF_CLASSES
from tandem.keras.lowering import add_own_lowerings, own_lowerings
from tandem.keras.variables import as_checkpoint, check_variables, load, untrained
from tandem.launch.api import raise_failure
from tandem.launch.callbacks import Callbacks
from tandem.launch.local import Launcher, LocalLauncher
from tandem.launch.programs import execute_training
from tandem.launch.ranks import work_on_ranks_of_script
from tandem.launch.status import Status
from tandem.layers.choices import OF_NETWORK
from tandem.layers.network import KERAS_NETWORK, NetworkDescription
from tandem.memory import CLASS_LABEL
from tandem.preprocessing.arrays import checksum, matches, write_arrays, write_pictures
from tandem.processes.supervisor import Outcome
from tandem.training.messages import Diverged
from tandem.training.run_spec import RunSpec
from tandem.validation import listed, shown, validated

DATA = "data"  # the folder of a run's arrays, in its run folder
RESULT = "fitted.safetensors"  # the model as `fit` leaves it, with what callbacks restore

_REPORTS = 50  # of an epoch
_BATCH = 32  # Keras's own
_OF_PICTURES = ("rand_crop", "rand_mirror", "rand_colour")


@dataclass(frozen=True)
class Data:
    """The rows of a run, checked, in the form in which they are stored."""

    form: arrays.Form
    splits: list[arrays.Rows]  # of training and perhaps of validation; none when they are stored
    count: int  # of training
    validation: arrays.Given | None = None  # as Keras takes it
    class_weights: tuple[float, ...] = ()  # that rows have in training by their classes


@dataclass(frozen=True)
class Fit:
    """One call of `fit`."""

    distribution: Distribution
    arguments: Arguments
    class_weight: Mapping[int, float] | None

    @property
    def model(self) -> Any:
        return self.distribution.model

    def execute(
        self, x: Any, y: Any, weights: Any, validation_split: float, validation_data: Any
    ) -> Any:
        """Train; return Keras's `History`."""
        callbacks = check_callbacks(self.arguments.callbacks)
        check_activations(self.model)
        if self.arguments.initial_epoch >= self.arguments.epochs:
            return self._untrained(callbacks)
        if x is None and "data_folder" in self.distribution.settings:
            steps, split = self.arguments.validation_steps, validation_split or None
            names = (
                "y",
                "sample_weight",
                "validation_data",
                "validation_steps",
                "validation_split",
            )
            for name, value in zip(names, (y, weights, validation_data, steps, split), strict=True):
                if value is not None:
                    raise InputError(f"{name}: found it with data_folder, expected {name} or that")
            data, compilation = self._prepared()
            return self._train(compilation, data, self.arguments.batch_size or _BATCH, callbacks)
        steps = self.arguments.steps_per_epoch
        given, batch = arrays.gathered(x, y, weights, steps, reads_all=True)
        if given.y is None:
            raise InputError("y: found None, expected targets")
        if batch and self.arguments.verbose:
            kind, rows = type(x).__name__, given.count
            sys.stdout.write(f"one pass of {kind} gave the {rows} rows that each epoch has\n")
        validation = self._validation(validation_data)
        if validation is None and validation_split:
            given, rest = arrays.divided(given, validation_split)
            validation = self._validated(rest)
        batch = batch or (math.ceil(given.count / steps) if steps else _BATCH)
        batch = self.arguments.batch_size or batch
        compilation = Compilation.of(self.model, lambda: self._row(given))
        data = self._data(given, validation, compilation)
        return self._train(compilation, data, batch, callbacks)

    def _untrained(self, callbacks: list[Any]) -> Any:
        """Return the empty history of no epochs, as Keras does."""
        listed = keras.callbacks.CallbackList(callbacks, add_history=True, model=self.model)
        listed.on_train_begin()
        listed.on_train_end()
        return self.model.history

    def _train(self, compilation: Compilation, data: Data, batch: int, callbacks: list[Any]) -> Any:
        check_variables(self.model)  # which is built by now
        if compilation.foreign and data.validation is None:
            warnings.warn(
                f"metrics: {listed([*compilation.foreign])} are not measured: Keras measures them "
                "on validation_data, and there is none",
                stacklevel=4,
            )
        plan = Plan(self, compilation, data, min(batch, data.count) * self.batches, callbacks)
        if self.batches > 1:
            self._check_batches(plan)

        def work(launcher: Launcher) -> tuple[Outcome, Path]:
            return plan.train(launcher)

        ranks = is_rank()
        outcome, folder = work_on_ranks_of_script(work) if ranks else work(LocalLauncher())
        if ranks:
            plan.follow(folder)
        self._count(folder)
        if plan.errors:
            raise plan.errors[0]
        if not (ends_at_nan(callbacks) and isinstance(outcome.failure, Diverged)):
            raise_failure(outcome)
        return self.model.history

    @property
    def batches(self) -> int:
        """Batches of a step, of whose gradients Keras's optimizer accumulates the mean."""
        return accumulated(self.model.optimizer)

    def _check_batches(self, plan: "Plan") -> None:
        """Refuse steps that are not whole, and what each batch of them counts by itself."""
        place, steps = "gradient_accumulation_steps", self.arguments.steps_per_epoch
        rows = plan.data.count
        if steps is not None:
            rows = min(rows, steps * plan.batch // self.batches)
        if rows % plan.batch:
            raise InputError(f"{place}: found {rows} rows, expected a multiple of {plan.batch}")
        layers = self.model._flatten_layers()
        norms = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
        if any(norm.trainable for norm in norms):
            raise InputError(f"{place}: found batch normalisation, which is of each batch")
        if any(loss["reduction"] == "sum" for loss in plan.compilation.losses):
            raise InputError(f"{place}: found a loss that is a sum, expected a mean")

    def _row(self, given: arrays.Given | None) -> tuple[Any, Any]:
        """A row of inputs and targets, of zeros where those that are given are not at hand."""
        if given is not None and not self._crops:
            return first_rows(given.x), first_rows(given.y)
        if not self.model.built:
            raise InputError(f"{self.model.name}: found no input shape, expected keras.Input")
        zeros = [np.zeros((1, *tensor.shape[1:]), np.float32) for tensor in self.model.inputs]
        x = zeros[0] if len(zeros) == 1 else zeros
        if given is not None:
            return x, first_rows(given.y)
        loss, (output, *_) = self.model.loss, self.model.outputs
        is_sparse = "sparse" in str(getattr(loss, "name", loss))
        return x, np.zeros((1, *output.shape[1 : -1 if is_sparse else None]), np.float32)

    def _prepared(self) -> tuple[Data, Compilation]:
        """The rows of a prepared data set, and what `compile` chose; InputError if they differ."""
        folder = Path(self.distribution.settings["data_folder"])
        manifest = read_any_manifest(folder)
        compilation = Compilation.of(self.model, lambda: self._row(None))
        has_classes = manifest.target == CLASS_LABEL
        if self.distribution.class_names is not None:
            raise InputError(f"class_names: found them with {folder}, which has its own")
        if has_classes and not layout_of(self.model, compilation).functions <= OF_CLASSES:
            raise InputError(
                f"{folder}: found targets that are classes, expected a cross-entropy of classes, "
                "and metrics of them"
            )
        table = self._table
        if table and not has_classes:
            raise InputError(f"class_weight: found it with {folder}, whose targets are no classes")
        shapes = (manifest.row.shape,), (manifest.target.shape,)
        form = arrays.Form(manifest.stored is not None, has_classes, (), *shapes)
        count = sum(manifest.counts("train"))
        return Data(form, [], count, class_weights=table), compilation

    @property
    def _table(self) -> tuple[float, ...]:
        """The weight of each class; none without `class_weight`."""
        if self.class_weight is None:
            return ()
        return arrays.class_table(self.class_weight, int(self.model.outputs[0].shape[-1] or 0))

    def _validation(self, values: Any) -> arrays.Given | None:
        if values is None:
            return None
        steps, name = self.arguments.validation_steps, "validation_data"
        parts = values if isinstance(values, tuple | list) else (values, None)
        if not 2 <= len(parts) <= 3:
            raise InputError(f"{name}: found {len(parts)} values, expected (x, y)")
        x, y, weights = (*parts, None)[:3]
        given, found = arrays.gathered(x, y, weights, steps, f"{name}: x")
        return given if found else self._validated(given)

    def _validated(self, given: arrays.Given) -> arrays.Given:
        """The rows of the steps of a validation, into which Keras divides all of no given size."""
        arguments = self.arguments
        steps, batch = arguments.validation_steps, arguments.validation_batch_size
        batch = batch or arguments.batch_size
        return given.part(slice(steps * batch)) if steps and batch else given

    def _data(
        self, given: arrays.Given, validation: arrays.Given | None, compilation: Compilation
    ) -> Data:
        layout, crops = layout_of(self.model, compilation), self._crops
        splits = [arrays.checked_rows(given, layout, may_crop=crops)]
        if validation is not None:
            splits.append(arrays.checked_rows(validation, layout, "validation_data: ", crops))
        form, table = arrays.Form.of(splits, layout), self._table
        if self.class_weight is not None and not form.has_classes:
            weighed = arrays.weighted(given, self.class_weight)
            splits[0], table = arrays.checked_rows(weighed, layout, may_crop=crops), ()
            form = arrays.Form.of(splits, layout)
        for name in _OF_PICTURES:
            if (found := self.distribution.settings.get(name)) and not form.are_pictures:
                raise InputError(
                    f"{name}: found {shown(found)} with rows of numbers, expected uint8 pictures "
                    "with class labels"
                )
        self._check_names(form)
        return Data(form, splits, len(splits[0]), validation, table)

    def _check_names(self, form: arrays.Form) -> None:
        """Refuse names of classes where there are none, or others."""
        names = self.distribution.class_names
        if names is None:
            return
        if not form.has_classes:
            found = "weights of rows" if form.weights else "targets that are no classes"
            raise InputError(f"class_names: found them with {found}, expected classes alone")
        if len(names) != (classes := int(self.model.outputs[0].shape[-1])):
            raise InputError(
                f"class_names: found {len(names)}, expected {classes}, as the model has outputs"
            )

    @property
    def _crops(self) -> bool:
        return self.distribution.settings.get("rand_crop") is True

    def _count(self, folder: Path) -> None:
        """Count what has been trained, from which the next `fit` goes on."""
        distribution, newest = self.distribution, list_checkpoints(folder)
        if newest:
            distribution.fits += 1
            distribution.epochs_done = read_checkpoint(newest[-1]).state.epoch


def layout_of(model: Any, compilation: Compilation) -> arrays.Layout:
    """Names and shapes of a built model's inputs and outputs."""
    functions = {each["function"] for each in (*compilation.losses, *compilation.metrics)}
    return arrays.Layout(
        tuple(tensor.name for tensor in model.inputs),
        tuple(tuple(tensor.shape[1:]) for tensor in model.inputs),
        tuple(output_names(model)),
        tuple(tuple(tensor.shape[1:]) for tensor in model.outputs),
        tuple(compilation.takes_labels(n) for n in range(len(model.outputs))),
        frozenset(functions),
        compilation.as_given,
        tuple(compilation.ignored(n) for n in range(len(model.outputs))),
    )


@dataclass(frozen=True)
class Plan:
    """A run of a fit: its settings and files, and what happens before and after it."""

    fit: Fit
    compilation: Compilation
    data: Data
    batch: int  # rows of a step of all trainers
    callbacks: list[Any]
    errors: list[Exception] = field(default_factory=list)  # of callbacks

    @property
    def model(self) -> Any:
        return self.fit.model

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        steps = minibatch_count(self.data.count, self.batch)
        return min(steps, self._most_steps or steps)

    @property
    def _most_steps(self) -> int | None:
        most = self.fit.arguments.steps_per_epoch
        return None if most is None else most // self.fit.batches

    @property
    def begin(self) -> int:
        """Epochs that the model has been trained for before."""
        return self.fit.distribution.epochs_done

    @property
    def end(self) -> int:
        return self.begin + self.fit.arguments.epochs - self.fit.arguments.initial_epoch

    def train(self, launcher: Launcher) -> tuple[Outcome, Path]:
        """Write what the processes of the run read, and train."""
        arguments, folder = self.fit.arguments, self._folder()
        config = self._config(folder, launcher)
        self.fit.distribution.data = Path(config.data_folder)
        memory = read_memory(folder) if arguments.resume else {}
        done = len(memory.get("epochs", ()))
        if memory.get("stopped"):
            config = config.model_copy(update={"n_epochs": self.begin + done})
        if self.begin + done >= config.n_epochs and (folder / RESULT).exists():
            self.follow(folder)
            return Outcome(0), folder
        listed = keras.callbacks.CallbackList(
            self.callbacks,
            add_history=True,
            add_progbar=arguments.verbose != 0,
            verbose=arguments.verbose,
            epochs=arguments.epochs,
            steps=self.steps,
            model=self.model,
        )
        shift = self.begin - arguments.initial_epoch
        measure = self._measured if self._is_measured else None
        epochs = Epochs(self.model, listed, folder, shift, self.steps, arguments.validates, measure)

        def adapted(spec: RunSpec) -> RunSpec:
            epochs.on_epoch_begin(1 + (spec.header.state.epoch if spec.header else self.begin))
            rates = rates_of(self.model.optimizer, self.steps)
            code = own_code(spec.config.options["model"])
            without = (n for n in range(spec.config.n_epochs) if not arguments.validates(n - shift))
            spec = replace(spec, epoch_steps=self._most_steps)
            return replace(spec, rates=rates, own_code=code, unvalidated=frozenset(without))

        def make_reporter(spec: RunSpec) -> Batches:
            return Batches(listed, self.steps, Status(spec) if arguments.verbose else None)

        with locked(folder) as lock:
            made = [folder / n for n in (RECORD, CONFIGURATION, MEMORY, DATA)]
            made = [path for path in [*made, self._first(folder)] if not path.exists()]
            outcome = None
            try:
                self._store(Path(config.data_folder))
                if not list_checkpoints(folder):
                    self._write_first(folder, resolve(config, launcher.ranks))
                if arguments.verbose:
                    sys.stdout.write(f"{self._shared_out(config, launcher)}\n")
                called, way = Callbacks([epochs]), "resume=True of fit"
                outcome = execute_training(
                    config, lock, launcher, called, make_reporter, adapted, way
                )
                self.errors.extend(filter(None, [called.error]))
            finally:
                if outcome is None or not isinstance(outcome.failure, Diverged | type(None)):
                    remove_unbegun(folder, made)
            if newest := list_checkpoints(folder):
                self._leave(folder, newest[-1])
        return outcome, folder

    def _leave(self, folder: Path, newest: Path) -> None:
        """Write the model after all callbacks, with the weights of a stopped epoch."""
        checkpoint = read_checkpoint(newest)
        if checkpoint.state.step_in_epoch:
            load(self.model, checkpoint)
        found = as_checkpoint(
            self.model, checkpoint.network, checkpoint.state.epoch, checkpoint.config
        )
        save_checkpoint(folder / RESULT, found)

    def follow(self, folder: Path) -> None:
        """Take the model and the history from a run that another rank, or an earlier one, led."""
        if (folder / RESULT).exists():
            load(self.model, read_checkpoint(folder / RESULT))
        memory, history = read_memory(folder), keras.callbacks.History()
        restore_rate(self.model.optimizer, memory)
        history.set_model(self.model)
        history.epoch = memory.get("epochs", [])
        history.history = memory.get("history", {})
        self.model.history = history

    def _folder(self) -> Path:
        """The run folder: the one that was named, or a new one."""
        folder = self.fit.distribution.folder
        if folder is None:
            names = (f"{self.model.name}-{number}" for number in itertools.count(1))
            return next(Path("runs") / n for n in names if not (Path("runs") / n).exists())
        begun = [folder / RECORD, folder / CONFIGURATION, *list_checkpoints(folder)]
        if not self.fit.arguments.resume and any(path.exists() for path in begun):
            raise InputError(
                f"run: found a run in {folder} already, expected an empty folder: continue it with "
                "resume=True of fit, or choose another"
            )
        return folder

    # The configuration

    def _config(self, folder: Path, launcher: Launcher) -> Config:
        """The configuration of the run. Nothing is written."""
        arguments, distribution = self.fit.arguments, self.fit.distribution
        devices = distribution.devices
        given = {
            "n_epochs": self.end,
            "resume_train": True,
            "exact": arguments.resume and (folder / MEMORY).exists(),
            "data_folder": self._data_folder(folder),
            "weights_dir": folder,
            "mean_file": None,
            "network": KERAS_NETWORK,
            "network_options": self._options(),
            "shuffle": "images" if arguments.shuffle else "none",
            "rand_crop": False,
            "rand_mirror": False,
            "lr_policy": "constant",
            "learning_rate": rates_of(self.model.optimizer, 1)[0] or 1e-12,
            "devices": devices if isinstance(devices, str) else list(devices),
            "metrics": [OF_NETWORK + name for name in self._names],
            "global_batch": self.batch,
            "norm_rows": self._group,
            "print_epochs": True,
            "print_freq": max(1, self.steps // _REPORTS),
            "live_view": False,
            "tensorboard": False,
        }
        if self.data.form.are_pictures:
            side = self.model.inputs[0].shape[1]
            given["crop_size"] = side or self.data.form.input_shapes[0][0]
        values = {
            **given,
            **self.compilation.settings,
            **settings_of(arguments.callbacks),
            **distribution.settings,
        }
        values = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in values.items()}
        names = {key: key for key in distribution.settings}
        config = validated(Config, values, names, "", ANSWERS)
        if not (why := divided_by(config)):
            return config
        trainers = _trainers(config, launcher)
        if self.batch % trainers:
            raise InputError(
                f"batch_size: found {self.batch} and {why}, expected a multiple of {trainers}, the "
                "number of trainers: their shares are then the same"
            )
        shares = {"batch_size": self.batch // trainers, "global_batch": None}
        return config.model_copy(update=shares)

    @property
    def _group(self) -> int:
        """Rows of which a normalisation or a loss is one: 1 where each is by itself."""
        masks = any(getattr(y, "_keras_mask", None) is not None for y in self.model.outputs)
        has_groups = masks or self.compilation.of_groups or untrained(self.model)
        found = self.fit.distribution.settings.get("norm_rows", "auto")
        if isinstance(found, int):
            return found
        if found != "auto" and (masks or self.compilation.of_groups):
            raise InputError(
                f"norm_rows: found {shown(found)} with a loss of groups, expected their rows"
            )
        if not has_groups:
            return 1
        rows, batch = self.fit.distribution.settings.get("sum_rows"), self.batch // self.fit.batches
        return group_of(rows if isinstance(rows, int) and rows > 0 else batch)

    @property
    def _names(self) -> list[str]:
        """Names of what the network measures."""
        losses = self.compilation.losses
        of_losses = [f"{loss['name']}_loss" for loss in losses] if len(losses) > 1 else []
        return [*of_losses, *(metric["name"] for metric in self.compilation.metrics)]

    def _options(self) -> dict[str, Any]:
        form = self.data.form
        objective = {
            "losses": self.compilation.losses,
            "metrics": self.compilation.metrics,
            "targets": form.targets,
            "weights": form.weights,
            "group": self._group,
            "class_weights": self.data.class_weights,
        }
        options: dict[str, Any] = {"model": without_keras(self.model), "objective": objective}
        if any(None in tensor.shape[1:] for tensor in self.model.inputs):
            options["input_shapes"] = form.input_shapes
        own = {each.function for each in own_lowerings(options["model"]).values()}
        named = [f"{f.__module__}:{f.__qualname__}" for f in own if f.__module__ != "__main__"]
        if named:
            options["layers"] = sorted(named)
        return dict(json.loads(json.dumps(options)))

    def _shared_out(self, config: Config, launcher: Launcher) -> str:
        """Say in a line how many rows of a minibatch each trainer has."""
        trainers = _trainers(config, launcher)
        group = 1 if config.norm_rows == "global" else int(config.norm_rows)
        shares = trainer_shares(self.batch, trainers, config.summed_rows or group)
        counts = ", ".join(str(share.stop - share.start) for share in shares)
        of_groups = f", in groups of {group} that are normalised together" if group > 1 else ""
        noun = "trainer" if trainers == 1 else "trainers"
        return f"{self.batch} rows a step by {trainers} {noun}: {counts}{of_groups}"

    # Files

    def _first(self, folder: Path) -> Path:
        from tandem.artifacts.checkpoint import RunState

        return folder / checkpoint_name(RunState(epoch=self.begin))

    def _write_first(self, folder: Path, config: Config) -> None:
        """Write the checkpoint with which the run begins: Keras's variables."""
        form, manifest = self.data.form, read_any_manifest(Path(config.data_folder))
        network = NetworkDescription(
            config.crop_size if form.are_pictures else None,
            manifest.classes,
            config.width,
            manifest.wnids or None,
            network=config.network,
            options=config.options,
            resize=manifest.resize if isinstance(manifest, Manifest) else "squash",
            pad=manifest.pad if isinstance(manifest, Manifest) else 0,
        )
        found = as_checkpoint(self.model, network, self.begin, config.model_dump(mode="json"))
        save_checkpoint(self._first(folder), found)

    def _data_folder(self, folder: Path) -> Path:
        """The folder of the arrays: that of the last fit, if they are the same."""
        before = self.fit.distribution.data
        if not self.data.splits:  # a prepared data set, which is a setting
            return Path(self.fit.distribution.settings["data_folder"])
        if (
            before is not None
            and (before / MANIFEST_NAME).exists()
            and read_any_manifest(before).source == self._source
        ):
            return before
        return folder / DATA

    @functools.cached_property
    def _packed(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self.data.form.packed(rows) for rows in self.data.splits]

    @functools.cached_property
    def _source(self) -> str:
        packed = [array for pair in self._packed for array in pair]
        return checksum(*packed, *[None] * (4 - len(packed)))

    def _store(self, folder: Path) -> None:
        """Write training and perhaps validation rows, unless the folder has them."""
        if not self.data.splits:
            return
        is_there = matches(folder, self._source)
        form, (train, *rest) = self.data.form, self.__dict__.pop("_packed")
        self.data.splits.clear()  # copies of the arrays, if they had to be converted
        names = self.fit.distribution.class_names
        if form.has_classes and names is None:
            names = [*map(str, range(int(self.model.outputs[0].shape[-1])))]
        if is_there:
            if names and (before := read_any_manifest(folder).wnids) != (*names,):
                raise InputError(
                    f"class_names: found {listed([*names])}, expected those of {folder}, "
                    f"{listed([*before])}"
                )
            return
        write = write_pictures if form.are_pictures else write_arrays
        write(folder, train, rest[0] if rest else None, names)

    # Metrics of Keras

    @property
    def _is_measured(self) -> bool:
        return bool(self.compilation.foreign) and self.data.validation is not None

    def _measured(self) -> dict[str, float]:
        """The metrics of the validation that Keras alone measures."""
        given, own = self.data.validation, {"loss", *self._names}
        assert given is not None
        batch = self.fit.arguments.validation_batch_size or self.batch
        found = self.model.evaluate(given.x, given.y, batch, 0, given.weights, return_dict=True)
        return {name: float(value) for name, value in found.items() if name not in own}


def _trainers(config: Config, launcher: Launcher) -> int:
    return len(launcher.ranks) or len(resolve_devices(config.devices, config.para_load))


def own_code(model: Any) -> bytes:
    """The user's own lowerings of a model, by value, for a run's processes; empty without any."""
    found = own_lowerings(model)
    return cloudpickle.dumps(functools.partial(add_own_lowerings, found)) if found else b""


def remove_unbegun(folder: Path, made: list[Path]) -> None:
    """Remove what was made for a run that failed before it recorded anything.

    So the corrected call finds the folder as this one did.
    """
    if (folder / RECORD).exists() and read_records(folder / RECORD):
        return
    for path in made:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
