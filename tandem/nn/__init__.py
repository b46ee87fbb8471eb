"""A front with Keras 3's names, for people with arrays.

::

    from tandem import nn

    model = nn.Sequential([nn.layers.Input((28, 28, 1)), nn.layers.Flatten(), ...])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, epochs=12, devices=["cpu", "cpu"])

Importing it imports neither PyTensor nor PyTorch.
"""

import os
from collections.abc import Sequence

from tandem.nn import callbacks, initializers, layers, losses, metrics, optimizers
from tandem.nn.layers import Input
from tandem.nn.model import Model, Sequential

__all__ = [
    "Input",
    "Model",
    "Sequential",
    "callbacks",
    "initializers",
    "layers",
    "load_model",
    "losses",
    "metrics",
    "optimizers",
]


def load_model(
    path: str | os.PathLike[str], layers: Sequence[type] = (), compile: bool = True
) -> Model:
    """Read a model from a checkpoint of `Model.save` or of a run.

    Nothing in the file is executed: its graph names layers of `tandem.nn.layers`, and those that
    are given here.

    Parameters
    ----------
    path : path
        A checkpoint, or a run folder, of which the newest is taken.
    layers : sequence of type
        Layers of one's own in the graph.
    compile : bool
        Whether the model gets the optimizer, the loss and the metrics of the checkpoint, but for
        functions of one's own: a model with such a loss has to be compiled again.

    Raises
    ------
    InputError
        The file is missing, damaged, or of another network; or it has layers that are not given.
    """
    from tandem.nn.loading import read_model

    return read_model(path, layers, compile)
