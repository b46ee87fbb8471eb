"""Translation of a PyTensor graph to ONNX nodes.

A network that uses another Op needs a function here, registered for the Op's class.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.scalar.basic import Add, Mul
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.special import Softmax

from tandem.errors import InputError
from tandem.ops import LRN, Conv2d, MaxPool2d, Relu

OPSET = 17
"""Version of ONNX's operators, of 2022: the operators used here have not changed since."""


class OnnxGraph:
    """Nodes, in an order in which they can run, and constants of an ONNX graph."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._names: dict[Variable, str] = {}

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

    def translate(self, output: Variable) -> str:
        """Add everything that an output depends on; return the output's name."""
        pending = [output]
        while pending:
            variable = pending[-1]
            waiting = [] if variable in self._names else self._unnamed_sources(variable)
            if waiting:
                pending += waiting
                continue
            if variable not in self._names:
                self._names[variable] = self._name(variable)
            pending.pop()
        return self._names[output]

    def _unnamed_sources(self, variable: Variable) -> list[Variable]:
        return [v for v in _sources(variable.owner) if v not in self._names]

    def _name(self, variable: Variable) -> str:
        node = variable.owner
        if isinstance(variable, Constant):
            return self.constant(np.asarray(variable.data))
        if isinstance(variable, TensorSharedVariable):
            return self.constant(variable.get_value(borrow=True), variable.name)
        if node is None or variable is not node.outputs[0]:
            raise InputError(f"ONNX: the graph needs {variable}, which has no translation")
        names = [self._names[source] for source in _sources(node)]
        return translated(node.op, node, names, self)


def _sources(node: Apply | None) -> Sequence[Variable]:
    """Return the inputs of a node that ONNX needs: known lengths are part of a type."""
    if node is None:
        return ()
    return node.inputs[:1] if isinstance(node.op, Reshape) else node.inputs


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
    return graph.add("Conv", inputs, strides=[op.stride] * 2, pads=[op.pad] * 4, group=op.groups)


@translated.register
def _(op: Relu, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("Relu", inputs)


@translated.register
def _(op: MaxPool2d, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("MaxPool", inputs, kernel_shape=[op.size] * 2, strides=[op.stride] * 2)


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
    return graph.add("Reshape", [*inputs, graph.constant(np.array(shape, np.int64))])


@translated.register
def _(op: DimShuffle, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    kept = [axis for axis in op.new_order if axis != "x"]
    if kept != list(range(node.inputs[0].type.ndim)):
        raise InputError(f"ONNX: {op} has no translation: axes can be added, not moved or dropped")
    added = [index for index, axis in enumerate(op.new_order) if axis == "x"]
    return graph.add("Unsqueeze", [*inputs, graph.constant(np.array(added, np.int64))])


@translated.register
def _(op: Elemwise, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    kinds = {Add: "Add", Mul: "Mul"}
    if type(op.scalar_op) not in kinds:
        raise _untranslated(op)
    # ONNX has no mixed arithmetic: PyTensor's 2, say, is an int8.
    dtype = node.outputs[0].type.dtype
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    first, *others = (
        name if source.type.dtype == dtype else graph.add("Cast", [name], to=kind)
        for name, source in zip(inputs, node.inputs, strict=True)
    )
    for other in others:
        first = graph.add(kinds[type(op.scalar_op)], [first, other])
    return first
