"""Translation of a PyTensor graph to ONNX nodes.

A network that uses another Op needs a function here, registered for the Op's class.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytensor
import pytensor.tensor as pt
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from pytensor.compile.mode import Mode
from pytensor.compile.ops import ViewOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.scalar.basic import (
    AND,
    EQ,
    GE,
    GT,
    LE,
    LT,
    NEQ,
    OR,
    Abs,
    Add,
    ArcCos,
    ArcCosh,
    ArcSin,
    ArcSinh,
    ArcTan,
    ArcTanh,
    Cast,
    Ceil,
    Clip,
    Cos,
    Cosh,
    Exp,
    Exp2,
    Expm1,
    Floor,
    Identity,
    IntDiv,
    Invert,
    Log,
    Log1p,
    Mod,
    Mul,
    Neg,
    Pow,
    RoundHalfToEven,
    ScalarMaximum,
    ScalarMinimum,
    ScalarOp,
    Second,
    Sign,
    Sin,
    Sinh,
    Sqr,
    Sqrt,
    Sub,
    Switch,
    Tan,
    Tanh,
    TrueDiv,
    upcast,
)
from pytensor.scalar.math import Erf, Sigmoid, Softplus
from pytensor.scan.op import Scan
from pytensor.tensor.basic import Alloc, AllocEmpty, Join, MakeVector
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.einsum import Einsum
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Any as AnyTrue
from pytensor.tensor.math import Argmax, Dot, Max, Min, Prod, Sum
from pytensor.tensor.shape import Reshape, Shape, SpecifyShape
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedSubtensor,
    AdvancedSubtensor1,
    IncSubtensor,
    Subtensor,
    get_constant_idx,
)

from tandem.errors import InputError
from tandem.ops import (
    LRN,
    AveragePool2d,
    BatchNormInference,
    Conv2d,
    Conv2dInputGrad,
    GRUSteps,
    LSTMSteps,
    MaxPool2d,
    Pad2d,
    Relu,
)

_PYTHON = Mode("py", RewriteDatabaseQuery(include=[]))

OPSET = 17
"""Version of ONNX's operators, of 2022: the operators used here have not changed since."""


class OnnxGraph:
    """Nodes, in an order in which they can run, and constants of an ONNX graph.

    The body of a loop is a graph of its own, whose constants are those of the graph around it.
    """

    def __init__(self, around: "OnnxGraph | None" = None) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = [] if around is None else around.constants
        self.prefix: str = "" if around is None else f"{around.prefix}{len(around.nodes)}."
        self._names: dict[Variable, str] = {}
        self._fixed: set[Variable] = set()  # that depend on no input

    def bind(self, variable: Variable, name: str) -> None:
        """Name an input of the PyTensor graph."""
        self._names[variable] = name

    def add(
        self, kind: str, inputs: Sequence[str], output: str | None = None, **attributes: Any
    ) -> str:
        """Append a node of one output; return the output's name."""
        name = output or f"{self.prefix}{kind}_{len(self.nodes)}"
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
                    self._translate(variable)
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

    def _translate(self, variable: Variable) -> None:
        node = variable.owner
        if node is not None:
            found = translated(node.op, node, [self._name(v) for v in _sources(node)], self)
            names = [found] if isinstance(found, str) else found
            self._names.update(zip(node.outputs, names, strict=False))
        if variable not in self._names:
            raise InputError(f"ONNX: the graph needs {variable}, which has no translation")


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
        lacks = isinstance(node.op, Reshape) and node.outputs[0].type.shape.count(None) > 1
        return node.inputs[: 1 + lacks]
    if isinstance(node.op, Join):
        return node.inputs[1:]
    if isinstance(node.op, Subtensor | IncSubtensor):
        return node.inputs[: 1 + isinstance(node.op, IncSubtensor)]
    if isinstance(node.op, Conv2dInputGrad):
        return node.inputs[1:]
    if isinstance(node.op, Scan):
        op, given = node.op, node.inputs
        states = map(_first, op.outer_sitsot(given))
        return [*op.outer_seqs(given), *states, *op.outer_non_seqs(given)]
    if isinstance(node.op, Conv2d):
        bias = node.inputs[2]
        is_zero = isinstance(bias, Constant) and not np.any(bias.data)
        return node.inputs[:2] if is_zero else node.inputs
    return node.inputs


def _first(buffer: Variable) -> Variable:
    """The state before the first step, (1, ...), with which a buffer of a scan begins."""
    node = buffer.owner
    if node is not None and isinstance(node.op, IncSubtensor):
        empty = node.inputs[0].owner
        if empty is not None and isinstance(empty.op, AllocEmpty):
            return node.inputs[1]
    return buffer


@functools.singledispatch
def translated(op: Op, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str | Sequence[str]:
    """Add the ONNX nodes of an Op; return the name of the first output, or of the first ones.

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
def _(op: Conv2dInputGrad, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    _, weight, g = (variable.type.shape[2:] for variable in node.inputs)
    image = node.outputs[0].type.shape[2:]
    if None in (*weight, *g, *image):
        raise InputError(f"ONNX: {op} of {node.outputs[0].type}: rows and columns must be known")
    windows = zip(image, weight, g, op.stride, op.pad, op.dilation, strict=True)
    behind = [n - ((m - 1) * s - 2 * p + (t - 1) * d + 1) for n, t, m, s, p, d in windows]
    return graph.add(
        "ConvTranspose",
        inputs[::-1],
        group=op.groups,
        strides=op.stride,
        pads=[*op.pad] * 2,
        dilations=op.dilation,
        output_padding=behind,
    )


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
    pairs = zip(inputs, node.inputs[1:], strict=True)
    parts = [_cast(graph, *pair, node.outputs[0].type.dtype) for pair in pairs]
    return graph.add("Concat", parts, axis=int(axis.data))


_REDUCTIONS: Mapping[type[CAReduce], str] = {Max: "ReduceMax", Min: "ReduceMin", Prod: "ReduceProd"}


@translated.register
def _(op: CAReduce, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    (x,), (y,) = node.inputs, node.outputs
    axes = [*range(x.type.ndim)] if op.axis is None else [*op.axis]
    if isinstance(op, AnyTrue):
        number = _cast(graph, inputs[0], x, "int32")
        most = graph.add("ReduceMax", [number], axes=axes, keepdims=0)
        return graph.add("Cast", [most], to=TensorProto.BOOL)
    name = _cast(graph, inputs[0], x, y.type.dtype)
    if isinstance(op, Sum):
        return graph.add("ReduceSum", [name, graph.integers(*axes)], keepdims=0)
    if type(op) not in _REDUCTIONS:
        raise _untranslated(op)
    return graph.add(_REDUCTIONS[type(op)], [name], axes=axes, keepdims=0)


@translated.register
def _(op: LRN, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    # ONNX divides alpha by the size of the window.
    alpha = op.alpha * op.size
    return graph.add("LRN", inputs, size=op.size, alpha=alpha, beta=op.beta, bias=op.k)


@translated.register
def _(op: Dot, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("MatMul", inputs)


@translated.register
def _(op: Blockwise, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    if not isinstance(op.core_op, Dot):
        raise _untranslated(op)
    return graph.add("MatMul", inputs)


@translated.register
def _(op: Einsum, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("Einsum", inputs, equation=op.subscripts)


@translated.register
def _(op: Softmax | LogSoftmax, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    axis = range(node.inputs[0].type.ndim) if op.axis is None else op.axis
    if len(axis) != 1:
        raise InputError(f"ONNX: only a softmax over a single axis has a translation, not {op}")
    return graph.add(type(op).__name__, inputs, axis=axis[0])


@translated.register
def _(op: Argmax, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    if op.axis is None or len(op.axis) != 1:
        raise _untranslated(op)
    return graph.add("ArgMax", inputs, axis=op.axis[0], keepdims=0)


@translated.register
def _(op: CumOp, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    if op.mode != "add" or op.axis is None:
        raise _untranslated(op)
    return graph.add("CumSum", [*inputs, graph.integers(op.axis)])


@translated.register
def _(op: Reshape, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    shape = [-1 if length is None else length for length in node.outputs[0].type.shape]
    return graph.add("Reshape", inputs if len(inputs) > 1 else [*inputs, graph.integers(*shape)])


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
def _(op: SpecifyShape | ViewOp, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    """Nothing: lengths are known as they are, and gradients are not computed."""
    return inputs[0]


@translated.register
def _(op: Shape, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("Shape", inputs)


@translated.register
def _(op: Alloc, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return graph.add("Expand", [inputs[0], _vector(graph, inputs[1:], node.inputs[1:], "int64")])


@translated.register
def _(op: MakeVector, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    return _vector(graph, inputs, node.inputs, op.dtype)


def _vector(graph: OnnxGraph, names: Sequence[str], scalars: Sequence[Variable], dtype: str) -> str:
    pairs = zip(names, scalars, strict=True)
    axis = graph.integers(0)
    parts = [graph.add("Unsqueeze", [_cast(graph, *pair, dtype), axis]) for pair in pairs]
    return graph.add("Concat", parts, axis=0)


@translated.register
def _(op: Subtensor, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    parts = _parts(op, node.inputs)
    numbers = [axis for axis, part in enumerate(parts) if not isinstance(part, slice)]
    slices = [p if isinstance(p, slice) else slice(p, None if p == -1 else p + 1) for p in parts]
    steps = [part.step or 1 for part in slices]
    starts = [part.start for part in slices]
    ends = [part.stop for part in slices]
    for n, step in enumerate(steps):
        if starts[n] is None:
            starts[n] = 0 if step > 0 else _FAR
        if ends[n] is None:
            ends[n] = _FAR if step > 0 else -_FAR
    bounds = (starts, ends, range(len(slices)), steps)
    name = graph.add("Slice", [*inputs, *(graph.integers(*values) for values in bounds)])
    return graph.add("Squeeze", [name, graph.integers(*numbers)]) if numbers else name


@translated.register
def _(
    op: AdvancedSubtensor | AdvancedSubtensor1,
    node: Apply,
    inputs: Sequence[str],
    graph: OnnxGraph,
) -> str:
    """Gather by whole numbers along one axis."""
    places = [axis for axis, part in enumerate(op.idx_list) if part != slice(None)]
    if len(node.inputs) != 2 or len(places) != 1 or node.inputs[1].type.dtype == "bool":
        raise _untranslated(op)
    index = _cast(graph, inputs[1], node.inputs[1], "int64")
    return graph.add("Gather", [inputs[0], index], axis=places[0])


@translated.register
def _(op: IncSubtensor, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    """Pad what is added with zeros first; nothing is repeated."""
    parts = _parts(op, [node.inputs[0], *node.inputs[2:]])
    added = node.inputs[1].type
    if added.ndim != node.inputs[0].type.ndim or op.set_instead_of_inc:
        raise _untranslated(op)
    begins, ends = [], []
    for axis, length in enumerate(node.inputs[0].type.shape):
        part = parts[axis] if axis < len(parts) else slice(None)
        if part == slice(None):
            begins.append(0)
            ends.append(0)
        elif length is None or part.step not in (None, 1):
            raise _untranslated(op)
        else:
            first, last, _ = part.indices(length)
            if added.shape[axis] != last - first:
                raise _untranslated(op)
            begins.append(first)
            ends.append(length - last)
    whole = graph.add("Pad", [inputs[1], graph.integers(*begins, *ends)])
    return graph.add("Add", [inputs[0], whole])


def _divided(graph: OnnxGraph, kind: type, names: Sequence[str], dtype: str) -> str:
    """Quotient or rest as NumPy has them, where the quotient is of what the rest leaves over."""
    x, y = names
    rest = graph.add("Mod", names, fmod=1)  # with the sign of x
    signs = [graph.add("Sign", [name]) for name in (rest, y)]
    differs = graph.add("Less", [graph.add("Mul", signs), graph.constant(np.zeros((), dtype))])
    if kind is Mod:
        return graph.add("Where", [differs, graph.add("Add", [rest, y]), rest])
    whole = graph.add("Round", [graph.add("Div", [graph.add("Sub", [x, rest]), y])])
    one = graph.constant(np.ones((), dtype))
    lower = graph.add("Where", [differs, graph.add("Sub", [whole, one]), whole])
    by_zero = graph.add("Equal", [y, graph.constant(np.zeros((), dtype))])
    return graph.add("Where", [by_zero, graph.add("Div", names), lower])


_FAR = np.iinfo(np.int64).max  # where a slice without an end has it


def _parts(op: Subtensor | IncSubtensor, inputs: Sequence[Variable]) -> list[Any]:
    """The slices and whole numbers of an Op over parts of a tensor, which have to be known."""
    try:
        return [*get_constant_idx(op.idx_list, inputs)]
    except NotScalarConstantError as error:
        raise _untranslated(op) from error


# Steps, each from what the one before it has left.


@translated.register
def _(op: Scan, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> list[str]:
    """A scan over whole sequences whose states are those of one step before."""
    info, (steps, *_) = op.info, node.inputs
    first = [_first(buffer) for buffer in op.outer_sitsot(node.inputs)]
    sequences = op.outer_seqs(node.inputs)
    known = {v.type.shape[0] for v in sequences} | {v.type.shape[0] for v in first}
    is_usual = not (info.as_while or info.mit_mot_in_slices or info.mit_sot_in_slices)
    is_usual &= not info.n_untraced_sit_sot and isinstance(steps, Constant) and bool(sequences)
    if not is_usual or known - {1, int(cast(Constant, steps).data)}:
        raise _untranslated(op)
    counts = (len(sequences), len(first))
    given = [*inputs[: counts[0]], *inputs[counts[0] :]]
    axis = graph.integers(0)
    names = given[counts[0] : sum(counts)]
    states = [graph.add("Squeeze", [name, axis]) for name in names]
    body = [*op.inner_inputs], [*op.inner_outputs]
    traces = _traces(graph, *body, given[: counts[0]], states, given[sum(counts) :])
    whole = zip(names, traces, strict=False)
    return [*(graph.add("Concat", pair, axis=0) for pair in whole), *traces[len(names) :]]


@translated.register
def _(
    op: LSTMSteps | GRUSteps, node: Apply, inputs: Sequence[str], graph: OnnxGraph
) -> Sequence[str]:
    z, weight = (variable.type for variable in node.inputs[:2])
    if (units := weight.shape[0]) is None:
        raise _untranslated(op)
    given = pt.tensor(dtype=z.dtype, shape=z.shape[1:])
    w, *others = (variable.type() for variable in node.inputs[1:])

    def gates(x: Any) -> list[Any]:
        return [x[:, n * units : (n + 1) * units] for n in range(op.gates)]

    if isinstance(op, LSTMSteps):
        h, c = others
        i, f, g, o = gates(given + pt.dot(h, w))
        c_next = pt.sigmoid(f) * c + pt.sigmoid(i) * pt.tanh(g)
        step = [given, h, c, w], [pt.sigmoid(o) * pt.tanh(c_next), c_next]
        return _traces(graph, *step, inputs[:1], inputs[2:], inputs[1:2])
    bias, h = others
    pairs = zip(gates(given), gates(pt.dot(h, w) + bias), strict=True)
    (z_u, of_u), (z_r, of_r), (z_n, of_n) = pairs
    u, n = pt.sigmoid(z_u + of_u), pt.tanh(z_n + pt.sigmoid(z_r + of_r) * of_n)
    step = [given, h, w, bias], [u * h + (1 - u) * n]
    return _traces(graph, *step, inputs[:1], inputs[3:], inputs[1:3])


def _traces(
    graph: OnnxGraph,
    variables: Sequence[Variable],
    results: Sequence[Variable],
    sequences: Sequence[str],
    states: Sequence[str],
    others: Sequence[str],
) -> list[str]:
    """Add steps over sequences; return the names of their results, stacked.

    A step has `variables`, those of a place of each sequence, of states and of what all steps
    share, and results, of which the first are the next states.
    """
    body, count = OnnxGraph(graph), len(sequences)

    def described(name: str, variable: Variable) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, _onnx_type(variable.type.dtype), None)

    names = [f"{body.prefix}given_{n}" for n in range(count + len(states))]
    for variable, name in zip(variables, [*names, *others], strict=True):
        body.bind(variable, name)
    given = [described(*pair) for pair in zip(names, variables, strict=False)]
    ends = [*results[: len(states)], *results]
    made = [described(body.add("Identity", [body.translate(v)]), v) for v in ends]
    given = [*given[count:], *given[:count]]
    step = helper.make_graph(body.nodes, f"{body.prefix}step", given, made)
    outputs = [f"{body.prefix}made_{n}" for n in range(len(made))]
    node = helper.make_node(
        "Scan", [*states, *sequences], outputs, body=step, num_scan_inputs=count
    )
    graph.nodes.append(node)
    return outputs[len(states) :]


# Elements


_ELEMENTWISE: Mapping[type[ScalarOp], str] = {
    Abs: "Abs",
    Add: "Add",
    ArcCos: "Acos",
    ArcCosh: "Acosh",
    ArcSin: "Asin",
    ArcSinh: "Asinh",
    ArcTan: "Atan",
    ArcTanh: "Atanh",
    Ceil: "Ceil",
    Cos: "Cos",
    Cosh: "Cosh",
    Erf: "Erf",
    Exp: "Exp",
    Floor: "Floor",
    Log: "Log",
    Mul: "Mul",
    Neg: "Neg",
    Pow: "Pow",
    RoundHalfToEven: "Round",
    ScalarMaximum: "Max",
    ScalarMinimum: "Min",
    Sign: "Sign",
    Sigmoid: "Sigmoid",
    Sin: "Sin",
    Sinh: "Sinh",
    Softplus: "Softplus",
    Sqrt: "Sqrt",
    Sub: "Sub",
    Switch: "Where",
    Tan: "Tan",
    Tanh: "Tanh",
    TrueDiv: "Div",
}
_COMPARISONS: Mapping[type[ScalarOp], str] = {
    EQ: "Equal",
    GE: "GreaterOrEqual",
    GT: "Greater",
    LE: "LessOrEqual",
    LT: "Less",
    NEQ: "Equal",
}
_OF_BOOLS: Mapping[type[ScalarOp], str] = {AND: "And", Invert: "Not", OR: "Or"}


def _onnx_type(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _cast(graph: OnnxGraph, name: str, source: Variable, dtype: str) -> str:
    if source.type.dtype == dtype:
        return name
    return graph.add("Cast", [name], to=_onnx_type(dtype))


@translated.register
def _(op: Elemwise, node: Apply, inputs: Sequence[str], graph: OnnxGraph) -> str:
    kind, dtype = type(op.scalar_op), node.outputs[0].type.dtype
    # ONNX has no mixed arithmetic: PyTensor's 2, say, is an int8.
    dtypes = [dtype] * len(inputs)
    if kind in _COMPARISONS:
        dtypes = [upcast(*(source.type.dtype for source in node.inputs))] * len(inputs)
    if kind is Switch:
        dtypes[0] = "bool"
    names = [*map(functools.partial(_cast, graph), inputs, node.inputs, dtypes)]
    if kind in (Cast, Identity):
        return names[0]
    if kind in (IntDiv, Mod) and dtype.startswith("float"):
        return _divided(graph, kind, names, dtype)
    if kind is Clip:
        name, low, high = names
        return graph.add("Min", [graph.add("Max", [name, low]), high])
    if kind is Second:
        return graph.add("Expand", [names[1], graph.add("Shape", inputs[:1])])
    if kind is Sqr:
        return graph.add("Mul", names * 2)
    if kind is Exp2:
        return graph.add("Pow", [graph.constant(np.full((), 2, dtype)), *names])
    if kind in (Expm1, Log1p):
        one = graph.constant(np.ones((), dtype))
        if kind is Log1p:
            return graph.add("Log", [graph.add("Add", [*names, one])])
        return graph.add("Sub", [graph.add("Exp", names), one])
    found = _ELEMENTWISE.get(kind) or _COMPARISONS.get(kind)
    if dtype == "bool":
        found = found or _OF_BOOLS.get(kind)
    if found is None:
        raise _untranslated(op)
    if kind is Switch or len(names) == 1:
        return graph.add(found, names)
    first, *others = names
    for other in others:
        first = graph.add(found, [first, other])
    return graph.add("Not", [first]) if kind is NEQ else first
