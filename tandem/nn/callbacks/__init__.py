"""Callbacks with Keras's names: those that are settings of a run, and those that it calls."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.callbacks import METHODS
from tandem.errors import InputError
from tandem.nn.callbacks.base import Callback
from tandem.nn.callbacks.checkpoint import ModelCheckpoint
from tandem.nn.callbacks.settings import (
    Context,
    CSVLogger,
    EarlyStopping,
    LearningRateScheduler,
    ReduceLROnPlateau,
    SettingCallback,
    TensorBoard,
    TerminateOnNaN,
)
from tandem.validation import shown

__all__ = [
    "CSVLogger",
    "Callback",
    "Context",
    "Decisions",
    "EarlyStopping",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
    "decide",
]


@dataclass(frozen=True)
class Decisions:
    """The settings that the callbacks of a training stand for.

    Attributes
    ----------
    settings : mapping
        Keys of the configuration.
    objects : tuple
        What `tandem.launch.callbacks.Callbacks` calls.
    ends_at_nan : bool
        Whether values that are not numbers end training well.
    restores_best : bool
        Whether the weights are those of the best epoch at last.
    """

    settings: Mapping[str, Any]
    objects: tuple[Any, ...] = ()
    ends_at_nan: bool = False
    restores_best: bool = False


def decide(callbacks: Iterable[Any], context: Context, model: Any = None) -> Decisions:
    """Find what callbacks stand for.

    Those may be settings, a `Callback`, and an object with the methods of
    `tandem.callbacks.Callback`.

    Raises
    ------
    InputError
        For what is no callback, bad arguments, and two that decide the same.
    """
    settings: dict[str, Any] = {}
    deciding: dict[str, str] = {}  # the callback that has decided, by key
    objects = []
    callbacks = tuple(callbacks)
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, SettingCallback):
            for key, value in callback.settings(context).items():
                if settings.setdefault(key, value) != value:
                    raise InputError(
                        f"callbacks: found {deciding[key]} and {name}, which decide {key} as "
                        f"{shown(settings[key])} and {shown(value)}, expected one of them"
                    )
                deciding.setdefault(key, name)
        if isinstance(callback, Callback | ModelCheckpoint):
            objects.append(callback.adapted(model, context.metrics))
        elif not isinstance(callback, SettingCallback):
            _check_plain(callback)
            objects.append(callback)
    return Decisions(
        settings,
        tuple(objects),
        any(isinstance(each, TerminateOnNaN) for each in callbacks),
        any(isinstance(each, EarlyStopping) and each.restore_best_weights for each in callbacks),
    )


def _check_plain(callback: Any) -> None:
    """Refuse what is no callback, or one of Keras itself."""
    has_methods = any(hasattr(callback, method) for method in METHODS)
    if isinstance(callback, type) or not has_methods or hasattr(callback, "on_train_batch_end"):
        raise InputError(
            f"callbacks: found {shown(callback)}, expected objects of tandem.nn.callbacks"
        )
