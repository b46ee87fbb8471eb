"""Keras 3's own models, trained by several processes::

    import tandem.keras  # sets KERAS_BACKEND to torch if nothing has chosen one
    import keras

    model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), ...])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    tandem.keras.distribute(model, devices=["cpu", "cpu"], run="runs/fashion")
    model.fit(x, y, batch_size=128, epochs=12)

Importing it imports neither Keras nor PyTensor nor PyTorch.
"""

import os
from collections.abc import Sequence
from typing import Any

from tandem.keras.lowering import lowers

__all__ = ["distribute", "load_model", "lowers"]

os.environ.setdefault("KERAS_BACKEND", "torch")


def distribute(
    model: Any,
    devices: str | Sequence[str] = "auto",
    run: str | os.PathLike[str] | None = None,
    class_names: Sequence[str] | None = None,
    **settings: Any,
) -> Any:
    """Let `fit` of a Keras model train with a process for each device; all else stays Keras's.

    `fit` takes Keras's arguments, and `resume`: whether to continue the run in the folder, if it
    has begun, with the same arrays. Its `batch_size` is of all trainers together. Weights and the
    optimizer's states are Keras's own, before and after.

    Parameters
    ----------
    model : keras.Model
        Functional or Sequential.
    devices : "auto" or sequence of str
        One trainer on each; auto is all GPUs, or the CPU. Under mpirun or torchrun each rank is a
        trainer.
    run : path, optional
        The run folder; by default a new one in ``runs``, named after the model. A second `fit` has
        one of its own beside it, which ends in ``-2``, and so on.
    class_names : sequence of str, optional
        Of the outputs of a model of classes, by default their numbers; the programs print them.
    **settings
        Other keys of ``config.yaml``, such as ``rand_mirror=True``.

    Returns
    -------
    keras.Model
        The same.

    Raises
    ------
    InputError
        The model is subclassed, or has a training step of its own; or a setting is that of an
        argument.
    """
    from tandem.keras.distribution import Distribution

    model.fit = Distribution(model, devices, run, settings, class_names).fit
    return model


def load_model(path: str | os.PathLike[str], **options: Any) -> Any:
    """Read a Keras model with the weights of a checkpoint or run; another file as Keras does.

    Parameters
    ----------
    path : path
        A checkpoint or a run folder, of which the newest is taken; or a ``.keras`` file.
    **options
        Arguments of `keras.saving.load_model`, such as ``custom_objects``.

    Raises
    ------
    InputError
        There is no checkpoint, or it is of no Keras model.
    """
    from tandem.keras.loading import read_model

    return read_model(path, options)
