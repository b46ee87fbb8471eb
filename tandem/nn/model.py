"""Models: a graph of layers with weights, and what is done with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.errors import InputError
from tandem.layers.parameter import layer_of
from tandem.nn.compilation import Compilation
from tandem.nn.graph import Graph, registered_name
from tandem.nn.layers import Input, InputLayer, Layer, Symbol
from tandem.nn.weights import checked_weights, from_keras, initial_weights, kept_weights, to_keras

if TYPE_CHECKING:
    from tandem.layers.network import NetworkDescription
    from tandem.nn.history import History
    from tandem.nn.prediction import CompiledModel
    from tandem.nn.progress import Verbose

__all__ = ["Model", "Sequential"]

_PREDICTED = 32  # rows at a time, as in Keras


class Model:
    """A network of one input and one output, as Keras's ``Model``.

    Parameters
    ----------
    inputs, outputs : Symbol
        The ends of a graph of layers that were called on each other.
    name : str
    norm_rows : int
        Consecutive rows that `BatchNormalization` normalises together. It belongs to the model: by
        it, and not by the number of trainers, training is determined, and it has to divide each
        trainer's part of a batch.
    seed : int
        Of the initial weights, and by default of a run's order and dropout.

    Attributes
    ----------
    stop_training : bool
        Set by a callback, at the end of an epoch, to end training.
    """

    def __init__(
        self,
        inputs: Symbol,
        outputs: Symbol,
        *,
        name: str = "model",
        norm_rows: int = 32,
        seed: int = 1,
    ) -> None:
        self._begin(name, norm_rows, seed)
        self._graph: Graph | None = Graph.traced(inputs, outputs, norm_rows)

    def __init_subclass__(cls) -> None:
        if "call" in vars(cls):
            raise InputError(
                f"{cls.__name__}: found the method call, expected a graph of layers, "
                "Model(inputs, outputs): a run builds it in other processes"
            )

    @classmethod
    def of_graph(cls, graph: Graph, name: str) -> Model:
        """A model of a graph."""
        model = Model.__new__(Model)
        model._begin(name, graph.norm_rows, 1)
        model._graph = graph
        return model

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Do nothing: a model has its input shape. See `Sequential`."""

    def __call__(self, symbol: Symbol) -> Symbol:
        """Call the layers on another symbol: calls have their parameters in common.

        Values of the parameters are not passed on to a model that is made of the result:
        ``other.load_weights({**other.weights, **model.weights})`` copies them.
        """
        return self.graph.replayed(symbol)

    def _begin(self, name: str, norm_rows: int, seed: int) -> None:
        self.name, self.norm_rows, self.seed = name, norm_rows, seed
        self.stop_training = False
        self.compilation: Compilation | None = None
        self._weights: dict[str, np.ndarray] | None = None
        self.trained: NetworkDescription | None = None  # of the run that the weights are from
        self._compiled: CompiledModel | None = None

    @property
    def graph(self) -> Graph:
        """The layers and their connections, as data."""
        if self._graph is None:
            raise InputError(
                f"{self.name}: found no input shape, expected layers.Input(shape) at first"
            )
        return self._graph

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in order."""
        return tuple(self.graph.layers.values())

    @property
    def trainable(self) -> bool:
        """Return whether a layer with parameters is trained."""
        layers = {layer_of(parameter.name) for parameter in self.graph.parameters}
        return bool(layers - {*self.graph.frozen})

    @trainable.setter
    def trainable(self, value: bool) -> None:
        raise InputError(
            f"trainable: found {value} for a model, expected it as the argument of its layers"
        )

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        return (None, *self.graph.input_shape)

    @property
    def output_shape(self) -> tuple[int | None, ...]:
        return (None, *self.graph.output_shape)

    def summary(self) -> None:
        """Print a table of the layers with their output shapes and numbers of parameters."""
        from tandem.nn.summary import summary

        sys.stdout.write(summary(self.graph, f'Model: "{self.name}"') + "\n")

    def count_params(self) -> int:
        """The number of parameters, running averages included."""
        return self.graph.total_parameters

    # Weights

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The arrays by name: filters (filter, channel of its group, row, column), other (in, out).

        Float32; initial values until training or `set_weights` gives others.
        """
        if self._weights is None:
            self._weights = initial_weights(self.graph, self.seed)
        return self._weights

    def get_weights(self) -> list[np.ndarray]:
        """The arrays in Keras's order and layout: filters are (row, column, channel, filter)."""
        return to_keras(self.graph, self.weights)

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Set the arrays, in Keras's order and layout."""
        self.load_weights(from_keras(self.graph, weights))

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set the arrays by name, in the layouts of `weights`; others are left out.

        Raises InputError if one is missing or has another shape.
        """
        self._weights = checked_weights(self.graph, weights)
        if self._compiled is not None:
            self._compiled.load(self._weights)

    # Training

    def compile(
        self, optimizer: Any = "rmsprop", loss: Any = None, metrics: Sequence[Any] = ()
    ) -> None:
        """Choose the optimizer, the loss and the metrics.

        Parameters
        ----------
        optimizer : str or tandem.nn.optimizers.Optimizer
        loss : str, tandem.nn.losses.Loss or function
            A function is one of a module, ``f(targets, predictions)`` of symbolic rows, (batch,
            units) each, and returns a number for each row. It must be in a module that can be
            imported: the processes of a run do not run the script.
        metrics : sequence of str or function
            Names; or functions as for `loss`, of which the mean over rows is shown.

        Raises
        ------
        InputError
            A name is unknown, or the model's last activation does not suit the loss.
        """
        self.compilation = Compilation.of(optimizer, loss, metrics)
        self._compiled = None
        if self._graph is not None:
            self.compilation.output_of(self.graph)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int = 32,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: Any = (),
        validation_split: float = 0.0,
        validation_data: tuple[Any, Any] | None = None,
        shuffle: bool = True,
        *,
        devices: str | Sequence[str] = "auto",
        run: str | os.PathLike[str] | None = None,
        resume: bool = False,
        class_names: Sequence[str] | None = None,
        **settings: Any,
    ) -> History:
        """Train with one process for each device, and one that loads beside each.

        The arrays go to files in the run folder first. Afterwards the model has the weights of the
        last epoch, or those that a callback restores.

        Parameters
        ----------
        x : array-like (n, ...), optional
            Inputs; uint8 pictures are stored as pictures, anything else as float32. None where the
            setting `data_folder` names a prepared data set.
        y : array-like
            Targets, as the loss takes them.
        batch_size : int
            Rows of a step over all trainers, which have to divide it.
        epochs : int
            In all, those before a resume included.
        verbose : "auto", 0, 1 or 2
            Silent, a bar for each epoch, or a line; auto is a bar on a terminal or in a notebook.
        callbacks : sequence of tandem.nn.callbacks.Callback, or one
        validation_split : float
            The fraction of rows, the last ones, that are for validation.
        validation_data : (x, y), optional
        shuffle : bool
            Whether each epoch has an order of its own.
        devices : "auto" or sequence of str
            One trainer on each; auto is all GPUs, or the CPU. Under mpirun or torchrun each rank is
            a trainer.
        run : path, optional
            The run folder; by default a new one in ``runs``, named after the model.
        resume : bool
            Continue the run in the folder, if it has begun, with the same arrays.
        class_names : sequence of str, optional
            Names of the classes, by label.
        **settings
            Any other key of ``config.yaml``, such as ``rand_mirror=True``.

        Returns
        -------
        History

        Raises
        ------
        InputError
            An argument or an array cannot be used; nothing has been started.
        RunError
            The run has failed.
        """
        from tandem.nn.fit import Fit

        return Fit(
            self,
            batch_size=int(batch_size) if isinstance(batch_size, np.integer) else batch_size,
            epochs=int(epochs) if isinstance(epochs, np.integer) else epochs,
            verbose=verbose,
            callbacks=_several(callbacks),
            shuffle=shuffle,
            devices=devices,
            run=run,
            resume=resume,
            class_names=class_names,
            settings=settings,
        ).execute(x, y, validation_split, validation_data)

    def compiled(self) -> Compilation:
        """The optimizer, the loss and the metrics; InputError without `compile`."""
        if self.compilation is None:
            raise InputError(
                f"{self.name}: found no optimizer and loss, expected a call of compile first"
            )
        return self.compilation

    # Use

    def predict(self, x: Any, batch_size: int = _PREDICTED, verbose: Any = "auto") -> np.ndarray:
        """The model's outputs, float32 (n, units)."""
        from tandem.nn.arrays import checked_inputs

        _check_batch(batch_size)
        inputs = checked_inputs(x, self.graph.input_shape)
        loss = None if self.compilation is None else self.compilation.loss
        return self._on_device().predict(
            inputs, batch_size, loss is not None and loss.is_from_logits
        )

    def evaluate(
        self,
        x: Any,
        y: Any,
        batch_size: int = _PREDICTED,
        verbose: Any = "auto",
        return_dict: bool = False,
    ) -> Any:
        """The loss and the metrics over rows.

        Returns
        -------
        list of float, or dict by name
            The loss first. Without metrics it alone, as a number, as in Keras.
        """
        from tandem.nn.arrays import checked_rows

        compilation = self.compiled()
        _check_batch(batch_size)
        rows = checked_rows(x, y, self.graph.input_shape, self.units, compilation.loss)
        found = self._on_device().evaluate(rows, batch_size)
        values = {"loss": found["loss"]}
        values |= {key: found[metric.name] for key, metric in compilation.measured.items()}
        if return_dict:
            return values
        return [*values.values()] if compilation.measured else values["loss"]

    @property
    def units(self) -> int:
        """Numbers in a row of the output."""
        shape = self.graph.output_shape
        if len(shape) != 1:
            raise InputError(
                f"{self.name}: found an output of shape {shape}, expected (units,): put a Flatten "
                "and a Dense at the end"
            )
        return shape[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write graph and weights to a checkpoint, safetensors, whole or not at all."""
        from tandem.nn.saving import save_model

        save_model(self, path)

    def description(self, crop_size: int | None, wnids: Sequence[str] = ()) -> NetworkDescription:
        """Describe the network for a checkpoint; `crop_size` is of pictures, None of arrays."""
        from tandem.layers.network import GRAPH_NETWORK, NetworkDescription

        return NetworkDescription(
            crop_size,
            self.units,
            1.0,
            tuple(wnids) or None,
            network=GRAPH_NETWORK,
            options=self.options(),
        )

    def options(self) -> dict[str, Any]:
        """The options of the network, as the setting ``network_options``."""
        options: dict[str, Any] = {"graph": self.graph.to_json()}
        compilation = self.compilation
        options["output"] = (
            self.graph.output if compilation is None else compilation.output_of(self.graph)
        )
        kinds = dict.fromkeys(registered_name(type(layer)) for layer in self.layers)
        if own := [kind for kind in kinds if ":" in kind]:
            options["layers"] = own
        if compilation is not None and (path := compilation.function):
            options["loss"] = path
        return options

    @property
    def has_own_weights(self) -> bool:
        """Return whether its weights are others than a run's random ones."""
        return self._weights is not None

    def _on_device(self) -> CompiledModel:
        if self._compiled is None:
            from tandem.nn.prediction import compiled_model

            self._compiled = compiled_model(self)
        return self._compiled


class Sequential(Model):
    """A model whose layers follow each other.

    Without `layers.Input` it gets its input shape from the arrays of `fit`.
    """

    def __init__(
        self,
        layers: Sequence[Layer | Symbol] = (),
        *,
        name: str = "sequential",
        norm_rows: int = 32,
        seed: int = 1,
    ) -> None:
        self._begin(name, norm_rows, seed)
        self._graph = None
        self._added: list[Any] = []
        for layer in layers if isinstance(layers, Iterable) else (layers,):  # as Keras
            self.add(layer)

    def add(self, layer: Any) -> None:
        """Append a layer, a block or a model; the layers before keep their weights."""
        before, values = self._graph, self._weights
        self._added.append(layer)
        self._graph = self._weights = self._compiled = self.trained = None
        if isinstance(self._added[0], Symbol | InputLayer):
            self._graph = Graph.chained(self._added, self.norm_rows)
        if before is not None and values is not None:
            self.load_weights(self.weights | kept_weights(before, values, self.graph))

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Give the model its input shape, (None, ...), where it has no `Input`."""
        if self._graph is None:
            first = Input(tuple(length for length in input_shape[1:] if length is not None))
            self._added = [first, *self._added]
            self._graph = Graph.chained(self._added, self.norm_rows)


def _several(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks as Keras takes them: None, one, or several."""
    if callbacks is None:
        return ()
    return tuple(callbacks) if isinstance(callbacks, Sequence) else (callbacks,)


def _check_batch(batch_size: int) -> None:
    if (
        isinstance(batch_size, bool)
        or not isinstance(batch_size, int | np.integer)
        or batch_size < 1
    ):
        raise InputError(f"batch_size: found {batch_size}, expected a whole number from 1")
