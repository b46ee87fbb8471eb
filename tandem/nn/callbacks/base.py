"""Callbacks with Keras's methods, and how a run calls them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tandem.errors import InputError

_OF_OTHERS = ("on_batch_", "on_train_batch_", "on_test_", "on_predict_")


class Callback:
    """Base of a callback with the methods of Keras's; all are optional.

    They are called in the process that has called `fit`; of ranks, on rank 0. The trainers wait at
    the end of each epoch. ``self.model.stop_training = True`` ends training after an epoch. The
    setting ``callbacks`` takes such a class too: then `model` has that attribute alone.

    Attributes
    ----------
    model
        The model that is trained. It has the weights of each epoch at its end, where a checkpoint
        was written.
    params : dict
        ``epochs``.
    """

    model: Any = None
    params: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass with methods that nothing would call."""
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith(_OF_OTHERS):
                raise InputError(
                    f"{cls.__name__}: found the method {name}, expected those of training and of "
                    "its epochs alone: the steps of a run are made in other processes, which know "
                    "no callbacks"
                )

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Called before training."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Called before training."""
        self.model = model

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Called once, before the processes start."""

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Called once, at the end of training however it came, with the last epoch's values."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Called when an epoch begins, counted from 0; again for one that is continued."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Called when an epoch, counted from 0, its validation and its checkpoint are done.

        `logs` has ``loss``, the metrics, ``val_loss``, the metrics as ``val_...``, and
        ``learning_rate``.
        """

    def adapted(self, model: Any = None, metrics: Mapping[str, str] | None = None) -> Any:
        """Return what a run calls, with the methods of `tandem.callbacks.Callback`.

        Parameters
        ----------
        model
            Is given to `set_model`.
        metrics : mapping of str to str, optional
            Name of each metric in the configuration, by its name in `logs`; by default the same.
        """
        stand_in = SimpleNamespace(stop_training=False)
        return _Adapted(self, stand_in if model is None else model, metrics)


@dataclass
class _Adapted:
    """A callback with Keras's methods, as a run calls it."""

    callback: Callback
    model: Any
    metrics: Mapping[str, str] | None
    logs: Mapping[str, float] | None = None  # of the last epoch

    def on_train_begin(self, config: Mapping[str, Any]) -> None:
        self.callback.set_params({"epochs": config["n_epochs"]})
        self.callback.set_model(self.model)
        self.callback.on_train_begin({})

    def on_epoch_begin(self, epoch: int) -> None:
        self.callback.on_epoch_begin(epoch - 1, {})

    def on_epoch_end(self, epoch: int, record: Any) -> bool:
        self.logs = renamed(record.logs, self.metrics)
        self.callback.on_epoch_end(epoch - 1, dict(self.logs))
        return bool(self.model.stop_training)

    def on_train_end(self, result: Mapping[str, Any]) -> None:
        self.callback.on_train_end(dict(self.logs or {}))


def renamed(logs: Mapping[str, float], metrics: Mapping[str, str] | None) -> dict[str, float]:
    """Give the metrics of an epoch their names in Keras; `metrics` has those here by those.

    The order is Keras's: training, then validation, each by name.
    """
    if metrics is None:
        return dict(logs)
    names = sorted({"loss": "loss", **metrics}.items())
    pairs = [(f"{start}{key}", f"{start}{name}") for start in ("", "val_") for key, name in names]
    found = {key: logs[name] for key, name in pairs if name in logs}
    if "learning_rate" in logs:
        found["learning_rate"] = logs["learning_rate"]
    return found
