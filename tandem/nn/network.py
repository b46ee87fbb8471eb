"""The network of a run whose graph is data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tandem.errors import InputError
from tandem.layers.choices import BinaryCrossEntropy, CrossEntropy, KLDivergence
from tandem.layers.network import COLOURS, Network
from tandem.layers.training_pass import Training
from tandem.nn.graph import Graph
from tandem.nn.layers import Activation, BuildContext, Layer, Shape, Softmax
from tandem.registry import find_class, find_function

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

OwnLoss = Callable[["TensorVariable", "TensorVariable"], "TensorVariable"]
"""A loss of targets and predictions: the loss of each row, (batch,)."""

_OF_LOGITS = {"softmax": (CrossEntropy, KLDivergence), "sigmoid": (BinaryCrossEntropy,)}
"""The losses that contain the activation of an output."""


class GraphNetwork(Network):
    """A network whose layers and calls are a `Graph`, given as JSON.

    Pictures have three colours. Where the graph takes one, it is given their mean, which is exact
    for grey pictures. Rows of arrays reach the graph as they are.

    Parameters
    ----------
    crop_size : int or None
        Side of the pictures; None for arrays.
    classes : int
        Number of outputs, for messages alone: the graph has it.
    width : float
        1: a graph has the widths of its layers.
    dtype : "float32" or "float64"
    graph : dict
        As of `Graph.to_json`.
    output : {"softmax", "sigmoid", "linear"}
        The activation between `logits` and `predictions`; where the graph ends in it, the logits
        are what it is applied to.
    layers : list of str
        The own layers that the graph may name, each "module:Class", which are imported.
    loss : str
        "module:function", which is imported, or empty: that of the setting ``loss``. The function
        takes targets and predictions, both rows (batch, classes), classes as one-hot rows, and
        returns the loss of each row.

    Raises
    ------
    InputError
        The graph is none, does not fit the pictures or classes, or a name cannot be imported.
    """

    def __init__(
        self,
        crop_size: int | None,
        classes: int,
        width: float,
        dtype: str,
        *,
        graph: dict[str, Any],
        output: Literal["softmax", "sigmoid", "linear"] = "softmax",
        layers: Sequence[str] = (),
        loss: str = "",
    ) -> None:
        super().__init__(crop_size, classes, dtype)
        if width != 1:
            raise InputError(f"width: found {width:g}, expected 1: a graph has its layers' widths")
        self.graph = Graph.from_json(graph, [find_layer(name) for name in layers])
        self.output = output
        self._own_loss: OwnLoss | None = find_function("loss", loss) if loss else None
        outputs = int(np.prod(self.graph.output_shape))
        if outputs != classes:
            raise InputError(f"classes: found {classes}, expected the graph's {outputs} outputs")
        if output == "softmax" and len(self.graph.output_shape) > 1:
            raise InputError(
                f"output: found softmax of outputs of shape {self.graph.output_shape}, expected"
                " (classes,), or sigmoid or linear"
            )
        self._check_input()
        self.parameters.add(*self.graph.parameters)
        for node, shape in zip(self.graph.nodes[1:], self.graph.shapes[1:], strict=True):
            self.shapes.setdefault(node.layer, symbolic_shape(shape))

    def _check_input(self) -> None:
        shape, side = self.graph.input_shape, self.crop_size
        if side is None:
            self.shapes["input"] = symbolic_shape(shape)
        elif shape not in ((side, side, 1), (side, side, COLOURS)):
            raise InputError(
                f"crop_size: found {side}, for a graph whose input has the shape {shape}, expected"
                f" the graph to take ({side}, {side}, 1) or ({side}, {side}, {COLOURS})"
            )

    def logits(self, images: "TensorVariable", training: Training | None) -> "TensorVariable":
        """Build the graph of the outputs before `output`, (batch, class)."""
        import pytensor.tensor as pt

        from tandem.nn.layers.core import flattened

        self.check_images(images)
        if None in images.type.shape[1:]:
            images = pt.specify_shape(images, (None, *self.shapes["input"]))
        values = [self._input(images)]
        for number, node in enumerate(self.graph.nodes[1:], 1):
            layer = self.graph.layers[node.layer]
            if number == len(self.graph.nodes) - 1:
                layer = self._without_output(layer)
            context = BuildContext(node.layer, self.parameters, training, number)
            built = layer.build(context, *(values[source] for source in node.inputs))
            values.append(self._checked(node.layer, built, self.graph.shapes[number]))
        return flattened(values[-1])

    def _input(self, images: "TensorVariable") -> "TensorVariable":
        if self.crop_size is None or self.graph.input_shape[-1] == COLOURS:
            return images
        red, green, blue = (images[:, n : n + 1] for n in range(COLOURS))
        third = np.asarray(1 / 3, self.dtype)
        return red + ((green - red) + (blue - red)) * third  # of grey pictures, red as it is

    def _without_output(self, layer: Layer) -> Layer:
        """The last layer without the activation that `predictions` applies."""
        if self.output == "linear" or self.graph.output != self.output:
            return layer
        if isinstance(layer, Softmax):
            return Activation("linear")
        return replace(layer, activation="linear")  # type: ignore[call-arg]

    def _checked(self, name: str, built: "TensorVariable", shape: Shape) -> "TensorVariable":
        """Return what a layer built, with the shape that it said; InputError if it has another."""
        import pytensor.tensor as pt

        expected = symbolic_shape(shape)
        found = built.type.shape[1:]
        fits = built.type.dtype == self.dtype and len(found) == len(expected)
        if not fits or any(n not in (None, m) for n, m in zip(found, expected, strict=True)):
            raise InputError(
                f"{name}: found a graph of {built.type}, expected {self.dtype} of shape"
                f" {('batch', *expected)}"
            )
        return pt.specify_shape(built, (None, *expected)) if None in found else built

    def predictions(self, logits: "TensorVariable") -> "TensorVariable":
        """Return what the network predicts: `output` of the logits, (batch, class)."""
        import pytensor.tensor as pt

        if self.output == "softmax":
            return super().predictions(logits)
        return pt.sigmoid(logits) if self.output == "sigmoid" else logits

    def measured(self, logits: "TensorVariable") -> "TensorVariable":
        """The predictions: metrics see what users do."""
        return self.predictions(logits)

    @property
    def has_own_cost(self) -> bool:
        return self._own_loss is not None

    def cost(
        self, logits: "TensorVariable", labels: "TensorVariable", valid: "TensorVariable"
    ) -> "TensorVariable":
        """Mean loss of the first `valid` rows, of the predictions.

        A loss that contains the output's activation is computed from the logits, as is a
        cross-entropy of outputs without one.
        """
        from tandem.layers.losses import mean_over_valid, target_rows

        if self._own_loss is None:
            return mean_over_valid(self.loss(self._outputs(logits), labels), valid)
        predictions = self.predictions(logits)
        rows = self._own_loss(target_rows(predictions, labels), predictions)
        if getattr(getattr(rows, "type", None), "ndim", None) != 1:
            raise InputError(
                f"loss: found {rows} of {getattr(self._own_loss, '__name__', 'the own loss')},"
                " expected the loss of each row, (batch,)"
            )
        return mean_over_valid(rows, valid)

    def _outputs(self, logits: "TensorVariable") -> "TensorVariable":
        """Return what the loss of the configuration is computed from."""
        of_logits = _OF_LOGITS.get(self.output, (*_OF_LOGITS["softmax"], *_OF_LOGITS["sigmoid"]))
        if isinstance(self.loss, of_logits):
            return logits
        if isinstance(self.loss, CrossEntropy | KLDivergence | BinaryCrossEntropy):
            raise InputError(
                f"loss: found {self.loss.name} of a network whose output is {self.output}, expected"
                f" {' or '.join(kind.name for kind in of_logits)}, or another loss"
            )
        return self.predictions(logits)


def find_layer(name: str) -> type[Layer]:
    """Import an own layer by its name "module:Class"; InputError if there is none."""
    kind = find_class("layers", name)
    if not issubclass(kind, Layer):
        raise InputError(f"layers: found {name}, expected a subclass of nn.layers.Layer")
    return kind


def symbolic_shape(shape: Shape) -> Shape:
    """A row's shape as a symbolic minibatch has it: images with the channel first."""
    return (shape[2], shape[0], shape[1]) if len(shape) == 3 else shape
