"""The network of a run that is a Keras model."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from tandem.errors import InputError
from tandem.keras.graph import LayerData, read_graph
from tandem.keras.losses import Objective, cut
from tandem.layers.choices import BinaryCrossEntropy, CrossEntropy, KLDivergence
from tandem.layers.network import COLOURS, FullyConnected, Network
from tandem.layers.parameter import layer_of
from tandem.layers.training_pass import Training
from tandem.registry import find_function
from tandem.validation import shown

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

    from tandem.keras.lowering.call import Pass
    from tandem.placement import Placement

Activation = Literal["softmax", "sigmoid", "linear"]

MOST_NUMBERS = 2**31  # of a row

_OF_LOGITS = {"softmax": (CrossEntropy, KLDivergence), "sigmoid": (BinaryCrossEntropy,)}
"""The losses that contain the activation of an output."""


class KerasNetwork(Network):
    """A Keras model, given as the JSON of its configuration.

    Pictures have three colours; a model that takes one is given their mean, which is exact for grey
    pictures. Rows of arrays have Keras's shape; those of a model with several inputs are all inputs
    ravelled behind each other. So are the outputs.

    Parameters
    ----------
    crop_size : int or None
        Side of the pictures; None for arrays.
    classes : int
        Numbers in a row of all outputs.
    width : float
        1: a model has the widths of its layers.
    dtype : "float32" or "float64"
    model : dict
        As of `keras.saving.serialize_keras_object`, a Functional or Sequential model.
    output : {"softmax", "sigmoid", "linear"}
        The activation between `logits` and `predictions`, of the outputs that end in it.
    layers : list of str
        The lowerings of the user's own layers, each "module:function", which are imported.
    input_shapes : list of list of int
        Shapes of the inputs' rows, where the model leaves lengths open.
    objective : dict, optional
        What Keras's `compile` chose, as an `Objective`; None: the loss and metrics of the settings.

    Attributes
    ----------
    input_shapes, output_shapes : list of tuple of int
        Of rows, in Keras's order.
    output_names : list of str
        Of the layers whose outputs they are.
    own_activation : list of str
        The activation in which each output ends.
    untrained : tuple of str
        Names of the running averages.
    frozen : tuple of str
        Names of the layers and parameters that are not trained.

    Raises
    ------
    InputError
        The model is none that can be converted, or does not fit the pictures or classes.
    """

    takes_stored_rows = True

    def __init__(
        self,
        crop_size: int | None,
        classes: int,
        width: float,
        dtype: str,
        *,
        model: dict[str, Any],
        output: Activation = "linear",
        layers: Sequence[str] = (),
        input_shapes: Sequence[Sequence[int]] = (),
        objective: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(crop_size, classes, dtype)
        if width != 1:
            raise InputError(f"width: found {width:g}, expected 1: a model has its layers' widths")
        for name in layers:
            find_function("layers", name)
        self.output = output
        self.graph = read_graph(model)
        self.input_shapes = self._read_inputs(input_shapes)
        self.output_names = [*self.graph.output_names]
        self._costs: list[TensorVariable] | None = None  # of regularizers
        # Of logits that were built: the pass, the masks of outputs, and then the losses of rows and
        # what is measured.
        self._masks: dict[Any, list[Any]] = {}
        self._passes: dict[Any, Pass] = {}
        self._losses: dict[Any, tuple[TensorVariable, dict[str, Any]]] = {}
        self._set_input()
        self._declare()
        numbers = sum(map(math.prod, self.output_shapes))
        self.objective = None
        if objective is not None:  # by which targets may have another shape than outputs
            self.objective, self.classes = Objective.of(objective, len(self.output_shapes)), numbers
            if len(given := self.objective.class_weights) not in (0, numbers):
                raise InputError(f"compiled: found {len(given)} class_weights, expected {numbers}")
        elif numbers != classes:
            raise InputError(f"classes: found {classes}, expected the model's {numbers} outputs")

    def _read_inputs(self, given: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Shapes of the inputs' rows, of the model or, where it leaves them open, given."""
        if given and len(given) != len(self.graph.inputs):
            raise InputError(
                f"input_shapes: found {len(given)}, expected {len(self.graph.inputs)}, as inputs"
            )
        shapes = []
        for place, name in enumerate(self.graph.inputs):
            layer = self.graph.layers[name]
            config = layer.config if isinstance(layer, LayerData) else {}
            declared = config.get("batch_shape", config.get("batch_input_shape"))
            if not isinstance(declared, list) or not declared:
                raise InputError(f"{name}: found the shape {shown(declared)}, expected lengths")
            shape = [*declared[1:]]
            if given:
                fits = len(given[place]) == len(shape) and all(
                    n in (None, m) for n, m in zip(shape, given[place], strict=True)
                )
                if not fits:
                    raise InputError(
                        f"{name}: found rows of shape {tuple(given[place])}, expected "
                        f"{tuple(shape)}, as in the model"
                    )
                shape = [*given[place]]
            if any(type(n) is not int or n < 1 for n in shape):
                raise InputError(
                    f"{name}: found the shape {tuple(shape)}, expected known lengths of at least 1"
                )
            shapes.append(tuple(shape))
        if sum(map(math.prod, shapes)) > MOST_NUMBERS:
            raise InputError(f"{self.graph.name}: found inputs of shapes {shapes}, too large")
        return shapes

    def _set_input(self) -> None:
        """Set the shape of rows; refuse pictures that the model does not take."""
        side, shapes = self.crop_size, self.input_shapes
        if side is None:
            self.shapes["input"] = shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),)
        elif shapes not in ([(side, side, 1)], [(side, side, COLOURS)]):
            raise InputError(
                f"crop_size: found {side}, for a model whose inputs have the shapes {shapes}, "
                f"expected one of ({side}, {side}, 1) or ({side}, {side}, {COLOURS})"
            )

    def _declare(self) -> None:
        """Declare the parameters, by a graph that is thrown away."""
        from tandem.keras.lowering.call import Pass

        declaring = Pass(self.dtype)
        outputs = declaring.run(self.graph, self._cut(self.images()))
        self.parameters.add(*declaring.declared.values())
        self.frozen, self.undivided = tuple(declaring.frozen), tuple(declaring.loops)
        self.shapes |= {k: v for k, v in declaring.shapes.items() if k != "input"}
        self.output_shapes = [tuple(y.type.shape[1:]) for y in outputs]
        self.own_activation = [ending(y)[0] for y in outputs]

    def placements(self, kind: FullyConnected) -> "dict[str, Placement]":
        """As of every network, but each trainer has a copy of recurrent layers."""
        ends = ".recurrent_kernel"
        steps = {layer_of(name) for name in self.parameters if name.endswith(ends)}
        found = super().placements(kind)
        return {name: p for name, p in found.items() if layer_of(name) not in steps}

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        declared = self.parameters.declared.values()
        return tuple(p.name for p in declared if not p.trainable)

    def _cut(self, images: "TensorVariable") -> "list[TensorVariable]":
        """The model's inputs, of a minibatch."""
        import pytensor.tensor as pt

        from tandem.keras.lowering.call import pixels

        self.check_images(images)
        if None in images.type.shape[1:]:
            images = pt.specify_shape(images, (None, *self.shapes["input"]))
        if self.crop_size is not None:
            return [pixels(self._coloured(images), 4)]
        if len(self.input_shapes) == 1:
            return [images]
        count = images.type.shape[0]
        parts = _shaped(images, self.input_shapes)
        return [pt.specify_shape(x, (count, *x.type.shape[1:])) for x in parts]

    def _coloured(self, images: "TensorVariable") -> "TensorVariable":
        if self.input_shapes[0][-1] == COLOURS:
            return images
        red, green, blue = (images[:, n : n + 1] for n in range(COLOURS))
        third = np.asarray(1 / 3, self.dtype)
        return red + ((green - red) + (blue - red)) * third  # of grey pictures, red as it is

    def outputs(
        self, images: "TensorVariable", training: Training | None
    ) -> "list[TensorVariable]":
        """Build the graphs of the model's outputs, in Keras's shapes, (batch, ...)."""
        return self._run(images, training)[0]

    def _run(
        self, images: "TensorVariable", training: Training | None
    ) -> "tuple[list[TensorVariable], Pass]":
        """Build the outputs, and the pass that has their masks."""
        from tandem.keras.lowering.call import Pass

        pass_ = Pass(self.dtype, training, self.parameters)
        outputs = pass_.run(self.graph, self._cut(images))
        self._costs = [*pass_.costs.values()]
        return outputs, pass_

    def logits(self, images: "TensorVariable", training: Training | None) -> "TensorVariable":
        """Build the graph of all outputs before `output`, ravelled: (batch, numbers)."""
        outputs, pass_ = self._run(images, training)
        endings = [ending(y) for y in outputs]
        logits = joined(
            before if self._is_split(activation) else y
            for (activation, before), y in zip(endings, outputs, strict=True)
        )
        self._passes[logits] = pass_
        self._masks[logits] = [pass_.masks.get(y) for y in outputs]
        return logits

    def _is_split(self, activation: str) -> bool:
        """Return whether logits are before an activation in which an output ends."""
        return self.objective is not None or activation == self.output

    def predictions(self, logits: "TensorVariable") -> "TensorVariable":
        """Return what the model predicts: `output` of the logits of outputs that end in it."""
        import pytensor.tensor as pt

        activate = {"softmax": _softmax, "sigmoid": pt.sigmoid}
        applied = [self._is_split(a) and activate.get(a) for a in self.own_activation]
        if not any(applied):
            return logits
        if len(applied) == 1 and applied[0] and len(self.output_shapes[0]) == 1:
            return applied[0](logits)
        parts = self.split(logits)
        return joined(f(y) if f else y for f, y in zip(applied, parts, strict=True))

    def probabilities(self, logits: "TensorVariable") -> "TensorVariable":
        """Return predictions, or the softmax or sigmoid of outputs without an activation.

        Which of them, their loss says.
        """
        import pytensor.tensor as pt

        found = self.predictions(logits)
        losses = () if self.objective is None else self.objective.losses
        is_activated = found is not logits or self.own_activation[0] != "linear"
        if is_activated or (losses and not losses[0].options.get("from_logits")):
            return found
        of_classes = not losses or "categorical" in losses[0].function
        return super().predictions(logits) if of_classes else pt.sigmoid(logits)

    def split(self, rows: "TensorVariable") -> "list[TensorVariable]":
        """Cut (batch, numbers) into the outputs, in Keras's shapes."""
        return _shaped(rows, self.output_shapes)

    def measured(self, logits: "TensorVariable") -> "TensorVariable":
        """The predictions: metrics see what users do."""
        return self.predictions(logits)

    def regularization(self) -> "TensorVariable | None":
        """The cost of the regularizers of parameters, a scalar; None if there are none."""
        if self._costs is None:
            self.outputs(self.images(), None)
        costs = self._costs or []
        return sum(costs[1:], costs[0]) if costs else None

    @property
    def takes_total(self) -> bool:
        return self.objective is not None and any(
            loss.reduction == "sum" for loss in self.objective.losses
        )

    def cost(
        self,
        logits: "TensorVariable",
        labels: "TensorVariable",
        valid: "TensorVariable",
        total: "TensorVariable | None" = None,
    ) -> "TensorVariable":
        """Mean loss of the first `valid` rows, plus `regularization`.

        A loss that is a sum is `total`, by default `valid`, times as much.

        A loss that contains the output's activation is computed from the logits, as is a
        cross-entropy of outputs without one.
        """
        from tandem.layers.losses import mean_over_valid

        masks, pass_ = self._masks.get(logits, []), self._passes.get(logits)
        training = pass_ is not None and pass_.training is not None
        if self.objective is not None:
            self._losses[logits] = self.objective.build(
                logits,
                labels,
                self.output_shapes,
                self.own_activation,
                masks,
                valid,
                training,
                total,
            )
            rows = self._losses[logits][0]
        elif masked := [n for n, m in zip(self.output_names, masks, strict=False) if m is not None]:
            raise InputError(
                f"{masked[0]}: found an output with a mask, expected one without: the losses "
                "of the settings count every step"
            )
        else:
            rows = self.loss(self._of_loss(logits), labels)
        cost = mean_over_valid(sum(pass_.activities, rows) if pass_ else rows, valid)
        penalty = self.regularization()
        return cost if penalty is None else cost + penalty

    @property
    def has_own_cost(self) -> bool:
        return self.objective is not None

    def measures(self, logits: "TensorVariable", labels: "TensorVariable") -> "dict[str, Any]":
        """Build the values of each row that Keras's `compile` chose to measure, by its names."""
        return self._losses[logits][1] if logits in self._losses else {}

    def _of_loss(self, logits: "TensorVariable") -> "TensorVariable":
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


def _shaped(rows: "TensorVariable", shapes: Sequence[tuple[int, ...]]) -> "list[TensorVariable]":
    """Parts of rows, (batch, numbers), each in its shape, (batch, ...)."""
    parts = zip(cut(rows, shapes), shapes, strict=True)
    return [part.reshape((rows.shape[0], *shape)) for part, shape in parts]


def ending(y: "TensorVariable") -> "tuple[Activation, TensorVariable]":
    """The activation in which an output ends, and what it is applied to."""
    from pytensor.tensor.elemwise import DimShuffle, Elemwise
    from pytensor.tensor.shape import SpecifyShape
    from pytensor.tensor.special import Softmax

    node: Any = y.owner
    op = getattr(node, "op", None)
    if isinstance(op, SpecifyShape):
        activation, before = ending(node.inputs[0])
        return activation, cast(Any, op(before, *node.inputs[1:]))
    if isinstance(op, Softmax) and op.axis in (-1, y.type.ndim - 1, (y.type.ndim - 1,)):
        return "softmax", node.inputs[0]
    if isinstance(op, Elemwise) and op.scalar_op.name == "sigmoid":
        return "sigmoid", node.inputs[0]
    if isinstance(op, DimShuffle):
        activation, before = ending(node.inputs[0])
        if activation == "sigmoid":
            return activation, cast(Any, op(before))
    return "linear", y


def joined(outputs: "Any") -> "TensorVariable":
    """Ravel outputs behind each other: (batch, numbers)."""
    import pytensor.tensor as pt

    rows = [
        y if y.type.ndim == 2 else y.reshape((y.shape[0], math.prod(y.type.shape[1:])))
        for y in outputs
    ]
    return rows[0] if len(rows) == 1 else pt.concatenate(rows, axis=1)


def _softmax(y: "TensorVariable") -> "TensorVariable":
    import pytensor.tensor as pt

    return pt.special.softmax(y, axis=y.type.ndim - 1)
