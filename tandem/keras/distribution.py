"""The `fit` that `distribute` puts in place of Keras's."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.keras.compilation import check_model
from tandem.validation import shown

# Keys of the configuration that are arguments, or belong to the model.
_ARGUMENTS = {
    "n_epochs": "the argument epochs of fit",
    "batch_size": "the argument batch_size of fit",
    "global_batch": "the argument batch_size of fit",
    "snapshot_freq": "keep_snapshots, since each epoch has a checkpoint, for callbacks,",
    "weights_dir": "the argument run",
    "resume_train": "the argument resume of fit",
    "callbacks": "the argument callbacks of fit",
    "network": "the model",
    "network_options": "the model",
    "norm_before_pool": "the model",
    "width": "the model",
    "crop_size": "the shape of Input",
    "mean_file": "a layer, such as Rescaling",
    "learning_rate": "the optimizer of compile",
    "lr_policy": "the optimizer of compile",
    "lr_scaling": "the optimizer of compile",
    "warmup_epochs": "a schedule of the optimizer of compile",
    "optimizer": "the optimizer of compile",
    "loss": "the loss of compile",
    "metrics": "the metrics of compile",
    "init_weights": "the model's weights",
    "freeze": "trainable=False of layers",
}


@dataclass(frozen=True)
class Arguments:
    """Those of Keras's `fit` that are not data, checked."""

    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: Sequence[Any]
    shuffle: bool
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]
    resume: bool

    def __post_init__(self) -> None:
        counts = {"batch_size": 1, "epochs": 0, "initial_epoch": 0, "steps_per_epoch": 1}
        for name, least in {**counts, "validation_steps": 1, "validation_batch_size": 1}.items():
            value = getattr(self, name)
            is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if value is not None and not (is_count and value >= least):
                raise InputError(
                    f"{name}: found {shown(value)}, expected a whole number from {least}"
                )
        freq = self.validation_freq
        epochs = freq if isinstance(freq, Collection) and not isinstance(freq, str) else [freq]
        if not all(isinstance(n, int | np.integer) and n >= 1 for n in epochs):
            raise InputError(
                f"validation_freq: found {shown(freq)}, expected a whole number from 1, or a list "
                "of epochs"
            )
        if self.verbose not in ("auto", 0, 1, 2):
            raise InputError(f"verbose: found {shown(self.verbose)}, expected auto, 0, 1 or 2")

    def validates(self, epoch: int) -> bool:
        """Return whether an epoch, from 0, has a validation."""
        if isinstance(self.validation_freq, int | np.integer):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


@dataclass
class Distribution:
    """A model, where it is trained, and how far it has come.

    Attributes
    ----------
    epochs_done, fits : int
        Epochs and calls of `fit` so far.
    data : Path or None
        Where the arrays of the last `fit` are.
    """

    model: Any
    devices: str | Sequence[str]
    run: str | os.PathLike[str] | None
    settings: Mapping[str, Any]
    class_names: Sequence[str] | None = None
    epochs_done: int = 0
    fits: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        check_model(self.model)
        for key in self.settings:
            if key in _ARGUMENTS:
                raise InputError(f"distribute: found {key}, expected {_ARGUMENTS[key]} instead")
        if not isinstance(self.devices, Sequence):
            raise InputError(
                f"devices: found {shown(self.devices)}, expected auto, or a device for each "
                "trainer, such as ['cpu', 'cpu']"
            )
        is_path = isinstance(self.run, str | os.PathLike | NoneType)
        if not is_path or self.run == "" or "\0" in str(self.run):
            raise InputError(f"run: found {shown(self.run)}, expected the path of a folder")

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        resume: bool = False,
    ) -> Any:
        """Train as Keras's `fit` does; return its `History`.

        The arrays go to files in the run folder first; without `x` the rows are those of the
        prepared data set that the setting ``data_folder`` of `distribute` names. Of generators and
        loaders one pass is made. `batch_size` is that of all trainers together. Callbacks are
        called at the start and the end of training and of epochs, with the newest weights in the
        model, and about fifty times an epoch those of batches. With `resume` the run in the folder
        goes on, if it has begun.

        Raises
        ------
        InputError
            An argument, an array or the model cannot be used; of these, layers and operations
            without a lowering alone are found by processes that have started.
        RunError
            The run has failed.
        KeyboardInterrupt
            After Ctrl-C, with the weights so far in the model.
        """
        from tandem.keras.fit import Fit

        if resume and self.run is None:
            raise InputError("resume: found True without run of distribute, expected its folder")
        callbacks = getattr(callbacks, "callbacks", callbacks)  # of a CallbackList
        if not isinstance(callbacks, list | tuple):
            callbacks = [callbacks] * bool(callbacks)
        given = {**locals(), "shuffle": bool(shuffle)}
        arguments = Arguments(**{each.name: given[each.name] for each in fields(Arguments)})
        fit = Fit(self, arguments, class_weight)
        return fit.execute(x, y, sample_weight, validation_split, validation_data)

    @property
    def folder(self) -> Path | None:
        """The folder of the next `fit`, if it is named."""
        if self.run is None:
            return None
        path = Path(self.run)
        return path if not self.fits else path.with_name(f"{path.name}-{self.fits + 1}")
