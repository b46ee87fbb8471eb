"""Translation of a PyTensor graph to ONNX nodes.

A network that uses another Op needs a function here, registered for the Op's class.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
from onnx import NodeProto, TensorProto, helper, numpy_helper
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.scalar.basic import (
    GT,
    Abs,
    Add,
    ArcTan,
    Exp,
    Expm1,
    Log,
    Mul,
    Neg,
    Pow,
    ScalarMaximum,
    ScalarMinimum,
    ScalarOp,
    Sqrt,
    Sub,
    Switch,
    Tanh,
    TrueDiv,
    upcast,
)
from pytensor.scalar.math import Sigmoid, Softplus
from pytensor.tensor.basic import Join
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, get_constant_idx

from tandem.errors import InputError
from tandem.ops import LRN, AveragePool2d, BatchNormInference, Conv2d, MaxPool2d, Pad2d, Relu

_PYTHON = Mode("py", RewriteDatabaseQuery(include=[]))

OPSET = 17
"""Version of ONNX's operators, of 2022: the operators used here have not changed since."""


class OnnxGraph:
    """Nodes, in an order in which they can run, and constants of an ONNX graph."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._names: dict[Variable, str] = {}
        self._fixed: set[Variable] = set()  # that depend on no input

    def bind(self, variable: Variable, name: str) -> None:
        """Name an input of the PyTensor graph."""
        self._names[variable] = name

    def add(
        self, kind: str, inputs: Sequence[str], output: str | None = None, **attributes: Any
    ) -> str:
        """Append a node of one output; return the output's name."""
        name = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: np.ndarray, name: str | None = None) -> str:
        """Add a constant and return its name."""
        name = name or f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def integers(self, *values: int) -> str:
        """Add a constant vector of integers and return its name."""
        return self.constant(np.array(values, np.int64))

    def translate(self, output: Variable) -> str:
        """Add everything that an output depends on; return the output's name.

        What depends on no input is computed here, and is a constant of the ONNX graph.
        """
        pending = [output]
        while pending:
            variable = pending[-1]
            waiting = [] if self._is_known(variable) else self._unknown_sources(variable)
            if waiting:
                pending += waiting
                continue
            if not self._is_known(variable):
                if self._is_fixed(variable):
                    self._fixed.add(variable)
                else:
                    self._names[variable] = self._translated(variable)
            pending.pop()
        return self._name(output)

    def _is_known(self, variable: Variable) -> bool:
        return variable in self._names or variable in self._fixed

    def _unknown_sources(self, variable: Variable) -> list[Variable]:
        return [v for v in _sources(variable.owner) if not self._is_known(v)]

    def _is_fixed(self, variable: Variable) -> bool:
        if variable.owner is None:
            return isinstance(variable, Constant | TensorSharedVariable)
        return all(v in self._fixed for v in variable.owner.inputs)

    def _name(self, variable: Variable) -> str:
        """Name a variable that is known; one that depends on no input becomes a constant."""
        if variable not in self._names:
            name = variable.name if isinstance(variable, TensorSharedVariable) else None
            self._names[variable] = self.constant(_value(variable), name)
        return self._names[variable]

    def _translated(self, variable: Variable) -> str:
        node = variable.owner
        if node is None or variable is not node.outputs[0]:
            raise InputError(f"ONNX: the graph needs {variable}, which has no translation")
        names = [self._name(source) for source in _sources(node)]
        return translated(node.op, node, names, self)


def _value(variable: Variable) -> np.ndarray:
    """The value of a variable that depends on no input."""
    if isinstance(variable, Constant):
        return np.asarray(variable.data)
    if isinstance(variable, TensorSharedVariable):
        return np.asarray(variable.get_value(borrow=True))
    return np.asarray(pytensor.function([], variable, mode=_PYTHON)())


def _sources(node: Apply | None) -> Sequence[Variable]:
    """Return the inputs of a node that ONNX needs: known lengths are part of a type."""
    if node is None:
        return ()
    if isinstance(node.op, Reshape | SpecifyShape):
        return node.inputs[:1]
    if isinstance(node.op, Join):
        return node.inputs[1:]
    if isinstance(node.op, Subtensor | IncSubtensor):
        return node.inputs[: 1 + isinstance(node.op, IncSubtensor)]
    if isinstance(node.op, Conv2d):
        bias = node.inputs[2]
        is_zero = isinstance(bias, Constant) and not np.any(bias.data)
        return node.inputs[:2] if is_zero else node.inputs
    return node.inputs


@functools.singledispatch
def translated(op: Op, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    """Add the ONNX nodes of an Op; return the name of the first output.

    `inputs` are names in the ONNX graph. A function for another Op is added with
    ``translated.register``; without one, InputError is raised.
    """
    raise _untranslated(op)


def _untranslated(op: Op) -> InputError:
    return InputError(f"ONNX: {op} has no translation; register one in tandem/export/graph.py")


@translated.register
def _(op: Conv2d, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    windows: dict[str, Any] = {
        "strides": op.stride,
        "pads": [*op.pad] * 2,
        "dilations": op.dilation,
    }
    return graph.add("Conv", inputs, group=op.groups, **windows)


@translated.register
def _(op: BatchNormInference, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("BatchNormalization", inputs, epsilon=op.epsilon)


@translated.register
def _(op: Pad2d, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    top, bottom, left, right = op.sides
    return graph.add("Pad", [*inputs, graph.integers(0, 0, top, left, 0, 0, bottom, right)])


@translated.register
def _(op: Relu, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("Relu", inputs)


@translated.register
def _(op: MaxPool2d, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("MaxPool", [_apart(inputs[0], graph)], **_windows(op, node))


@translated.register
def _(op: AveragePool2d, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    windows = _windows(op, node)
    if not (op.count_pad and any(op.pad)):
        return graph.add("AveragePool", [_apart(inputs[0], graph)], **windows)
    # ONNX counts all zeros or none, and those that `ceil` adds do not count.
    rows, columns = op.pad
    ends = windows["pads"][2:]
    windows["pads"] = [0, 0, ends[0] - rows, ends[1] - columns]
    zeros = graph.integers(0, 0, rows, columns, 0, 0, rows, columns)
    return graph.add("AveragePool", [graph.add("Pad", [*inputs, zeros])], **windows)


def _apart(images: str, graph: OnnxGraph) -> str:
    """Keep zeros around images apart from a pool behind them, by a maximum of one array.

    ONNX Runtime folds a Pad into the pool's own border, which is -inf for maxima and may not be as
    wide as the window.
    """
    is_padded = any(node.op_type == "Pad" and images in node.output for node in graph.nodes)
    return graph.add("Max", [images]) if is_padded else images


def _windows(op: MaxPool2d | AveragePool2d, node: Apply) -> dict[str, Any]:
    """Attributes of a pooling: `ceil`, of which runtimes differ, as pads at the ends."""
    (x,), y = node.inputs, node.outputs[0]
    ends = [*op.pad]
    if op.ceil:
        image, pooled = x.type.shape[2:], y.type.shape[2:]
        if None in (*image, *pooled):
            raise InputError(f"ONNX: {op} of {x.type}: rows and columns must be known")
        ends = [
            max(pad, (count - 1) * stride + size - pad - length)
            for length, count, size, stride, pad in zip(
                image, pooled, op.size, op.stride, op.pad, strict=True
            )
        ]
    return {"kernel_shape": op.size, "strides": op.stride, "pads": [*op.pad, *ends]}


@translated.register
def _(op: Join, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    axis = node.inputs[0]
    if not isinstance(axis, Constant):
        raise InputError(f"ONNX: {op}: the axis must be known")
    return graph.add("Concat", inputs, axis=int(axis.data))


@translated.register
def _(op: Sum, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    axes = range(node.inputs[0].type.ndim) if op.axis is None else op.axis
    return graph.add("ReduceSum", [*inputs, graph.integers(*axes)], keepdims=0)


@translated.register
def _(op: LRN, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    # ONNX divides alpha by the size of the window.
    alpha = op.alpha * op.size
    return graph.add("LRN", inputs, size=op.size, alpha=alpha, beta=op.beta, bias=op.k)


@translated.register
def _(op: Dot, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("MatMul", inputs)


@translated.register
def _(op: Softmax, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    axis = range(node.inputs[0].type.ndim) if op.axis is None else op.axis
    if len(axis) != 1:
        raise InputError(f"ONNX: only a softmax over a single axis has a translation, not {op}")
    return graph.add("Softmax", inputs, axis=axis[0])


@translated.register
def _(op: Reshape, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    shape = [-1 if length is None else length for length in node.outputs[0].type.shape]
    if shape.count(-1) > 1:
        raise InputError(f"ONNX: {op} to {node.outputs[0].type}: only one length may be unknown")
    return graph.add("Reshape", [*inputs, graph.integers(*shape)])


@translated.register
def _(op: DimShuffle, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    """Drop axes of length 1, then move the others, then add new ones."""
    (name,) = inputs
    kept = [axis for axis in op.new_order if axis != "x"]
    dropped = [axis for axis in range(node.inputs[0].type.ndim) if axis not in kept]
    if dropped:
        name = graph.add("Squeeze", [name, graph.integers(*dropped)])
    places = [sorted(kept).index(axis) for axis in kept]
    if places != sorted(places):
        name = graph.add("Transpose", [name], perm=places)
    added = [index for index, axis in enumerate(op.new_order) if axis == "x"]
    return graph.add("Unsqueeze", [name, graph.integers(*added)]) if added else name


@translated.register
def _(op: SpecifyShape, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    """Nothing: lengths are known as they are."""
    return inputs[0]


@translated.register
def _(op: Subtensor, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    slices = _slices(op, node.inputs)
    starts = [part.start or 0 for part in slices]
    ends = [_FAR if part.stop is None else part.stop for part in slices]
    steps = [part.step or 1 for part in slices]
    bounds = (starts, ends, range(len(slices)), steps)
    return graph.add("Slice", [*inputs, *(graph.integers(*values) for values in bounds)])


@translated.register
def _(op: IncSubtensor, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    """Return what is added is padded with zeros first; nothing is repeated."""
    slices = _slices(op, [node.inputs[0], *node.inputs[2:]])
    added = node.inputs[1].type
    if added.ndim != node.inputs[0].type.ndim:
        raise _untranslated(op)
    begins, ends = [], []
    for axis, length in enumerate(node.inputs[0].type.shape):
        part = slices[axis] if axis < len(slices) else slice(None)
        if part == slice(None):
            begins.append(0)
            ends.append(0)
        elif op.set_instead_of_inc or length is None or part.step not in (None, 1):
            raise _untranslated(op)
        else:
            first, last, _ = part.indices(length)
            if added.shape[axis] != last - first:
                raise _untranslated(op)
            begins.append(first)
            ends.append(length - last)
    whole = graph.add("Pad", [inputs[1], graph.integers(*begins, *ends)])
    return graph.add("Add", [inputs[0], whole])


_FAR = np.iinfo(np.int64).max  # where a slice without an end has it


def _slices(op: Subtensor | IncSubtensor, inputs: Sequence[Variable]) -> list[slice]:
    """The slices of an Op over parts of a tensor, which have to be known."""
    try:
        found = get_constant_idx(op.idx_list, inputs)
    except NotScalarConstantError as error:
        raise _untranslated(op) from error
    if not all(isinstance(part, slice) and (part.step or 1) > 0 for part in found):
        raise _untranslated(op)
    return [*found]


_ELEMENTWISE: Mapping[type[ScalarOp], str] = {
    Abs: "Abs",
    Add: "Add",
    ArcTan: "Atan",
    Exp: "Exp",
    GT: "Greater",
    Log: "Log",
    Mul: "Mul",
    Neg: "Neg",
    Pow: "Pow",
    ScalarMaximum: "Max",
    ScalarMinimum: "Min",
    Sigmoid: "Sigmoid",
    Softplus: "Softplus",
    Sqrt: "Sqrt",
    Sub: "Sub",
    Switch: "Where",
    Tanh: "Tanh",
    TrueDiv: "Div",
}


def _cast(graph: OnnxGraph, name: str, source: Variable, dtype: str) -> str:
    if source.type.dtype == dtype:
        return name
    return graph.add("Cast", [name], to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


@translated.register
def _(op: Elemwise, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    kind = type(op.scalar_op)
    if kind is Expm1:
        one = graph.constant(np.ones((), node.outputs[0].type.dtype))
        return graph.add("Sub", [graph.add("Exp", inputs), one])
    if kind not in _ELEMENTWISE:
        raise _untranslated(op)
    # ONNX has no mixed arithmetic: PyTensor's 2, say, is an int8.
    dtypes = [node.outputs[0].type.dtype] * len(inputs)
    if kind is GT:
        dtypes = [upcast(*(source.type.dtype for source in node.inputs))] * len(inputs)
    if kind is Switch:
        dtypes[0] = "bool"
    first, *others = map(functools.partial(_cast, graph), inputs, node.inputs, dtypes)
    if kind is Switch:
        return graph.add(_ELEMENTWISE[kind], [first, *others])
    if not others:
        return graph.add(_ELEMENTWISE[kind], [first])
    for other in others:
        first = graph.add(_ELEMENTWISE[kind], [first, other])
    return first
