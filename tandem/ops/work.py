"""The work of a node of a graph: floating-point operations, and bytes read and written.

Both follow from static shapes. A multiplication and an addition are two operations, any other
arithmetic on an element, a root or an exponential included, is one. Convolutions and products are
counted as their plain sums, zeros of a border included, whatever algorithm computes them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import singledispatch
from math import prod
from typing import Any

import numpy as np
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.ifelse import IfElse
from pytensor.scalar.basic import Add, Cast, Composite, Identity, Mul, ScalarType, Second
from pytensor.scan.op import Scan
from pytensor.tensor.basic import Alloc, ARange, Eye, Join, MakeVector, TensorFromScalar
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, Shape, Shape_i
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedIncSubtensor1,
    AdvancedSubtensor,
    AdvancedSubtensor1,
    IncSubtensor,
)
from pytensor.tensor.type import TensorType

from tandem.ops.adam import AdamStep
from tandem.ops.batch_norm import BatchNorm, BatchNormGrad, BatchNormInference
from tandem.ops.batch_norm_stages import (
    BatchNormBySums,
    BatchNormBySumsGrad,
    ChannelGradientSums,
    ChannelSums,
)
from tandem.ops.communication import Collective
from tandem.ops.conv import (
    Conv2d,
    Conv2dBiasGrad,
    Conv2dInputGrad,
    Conv2dWeightGrad,
    winograd_pays,
)
from tandem.ops.crop import CropMirror
from tandem.ops.ctc import CTC
from tandem.ops.dropout import Dropout, DropoutMask
from tandem.ops.lrn import LRN, LRNGrad
from tandem.ops.momentum import MomentumStep
from tandem.ops.pad import Pad2d
from tandem.ops.pool import AveragePool2d, AveragePool2dGrad, MaxPool2d, MaxPool2dGrad
from tandem.ops.pool_norm import PoolNorm, PoolNormGrad
from tandem.ops.recurrent import GRUSteps, GRUStepsGrad, LSTMSteps, LSTMStepsGrad
from tandem.ops.region import Region
from tandem.ops.relu import Relu, ReluGrad

CONVOLUTIONS = ("convolution", "convolution input", "convolution weight")
SHAPES = ("", " large", " winograd", " large winograd", " 1x1", " image", " depthwise")
KINDS = (
    *(kind + shape for kind in CONVOLUTIONS for shape in SHAPES),
    "product",
    "pool",
    "pool gradient",
    "lrn",
    "lrn gradient",
    "norm",
    "norm gradient",
    "relu",
    "relu gradient",
    "dropout",
    "update",
    "crop",
    "softmax",
    "reduction",
    "elementwise",
    "move",
    "view",
)
"""Kinds of work: for each, a machine has a rate.

A convolution, and its gradient with respect to its images ("input") or filters ("weight"), is
" depthwise" if each channel is a group, else " image" if it has at most `IMAGE_CHANNELS` channels,
else " 1x1" if its filters have one pixel, else " large" if its images have at least `LARGE` pixels,
and then " winograd" too where `tandem.ops.conv.winograd_pays`, whatever computes it. A "move" only
copies, and a "view" does not even that.
"""

IMAGE_CHANNELS = 4
LARGE = 56 * 56


@dataclass(frozen=True)
class Work:
    """The arithmetic of a node, and the bytes that it moves.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    flops : int
        Floating-point operations.
    nbytes : int
        Bytes of operands and results, each once; 0 for a view. An operand of which only the shape
        is used does not count, and of one of which elements are chosen only these.
    """

    kind: str
    flops: int
    nbytes: int


def work_of(node: Apply) -> Work:
    """Count the work of a node.

    An Op that is not known here counts as an elementwise one.

    Raises
    ------
    ValueError
        A length of an operand or a result, or the number of steps of a loop, is not known.
    """
    return _work(node.op, node)


def most_nbytes(fgraph: FunctionGraph) -> int:
    """Return the bytes that a graph's results take at most at a time, each until its last use.

    A view, and what overwrites an operand, takes none; so does a result of unknown shape.
    """
    order = fgraph.toposort()
    owner: dict[Variable, Variable] = {}
    for node in order:
        shared = {**node.op.view_map, **node.op.destroy_map}
        for place, output in enumerate(node.outputs):
            found = node.inputs[shared[place][0]] if place in shared else output
            owner[output] = owner.get(found, found)
    last = {owner.get(v, v): number for number, node in enumerate(order) for v in node.inputs}
    last |= {owner.get(v, v): len(order) for v in fgraph.outputs}
    freed: dict[int, int] = {}
    now = most = 0
    for number, node in enumerate(order):
        for output in node.outputs:
            if owner[output] is output and output in last:
                nbytes = _nbytes_of(output)
                now += nbytes
                freed[last[output]] = freed.get(last[output], 0) + nbytes
        most = max(most, now)
        now -= freed.get(number, 0)
    return most


def _nbytes_of(variable: Variable) -> int:
    """The bytes of a tensor; 0 where they are unknown."""
    shape = getattr(variable.type, "shape", (None,))
    return 0 if None in shape else prod(shape) * np.dtype(variable.type.dtype).itemsize


@singledispatch
def _work(op: Op, node: Apply) -> Work:
    if not op.view_map and not _are_numbers(node.outputs):
        return Work("elementwise", _elements(node.outputs[0]), _nbytes(node))
    return _VIEW


_VIEW = Work("view", 0, 0)


# Numbers of elements and bytes


def lengths(variable: Variable) -> tuple[int, ...]:
    """Return the lengths of the axes of a variable; none of one that is no tensor.

    Those that its type leaves open follow from operands where it is computed element by element.
    """
    if not isinstance(variable.type, TensorType):
        return ()
    shape: tuple[int | None, ...] = variable.type.shape
    node = variable.owner
    if None in shape and node is not None and isinstance(node.op, Elemwise):
        shape = np.broadcast_shapes(*map(lengths, node.inputs))
    if None in shape:
        raise ValueError(f"the shape of {variable} is not known: {shape}")
    return tuple(n for n in shape if n is not None)


def _elements(variable: Variable) -> int:
    return prod(lengths(variable))


def _size(variables: Iterable[Variable]) -> int:
    """Bytes of variables, each once. Numbers of the host count nothing, nor what is no tensor."""
    tensors = (v for v in dict.fromkeys(variables) if isinstance(v.type, TensorType))
    return sum(_elements(v) * np.dtype(v.type.dtype).itemsize for v in tensors)


def _nbytes(node: Apply, unread: int | None = None) -> int:
    """Bytes of operands, but one of which only the shape is used, and results."""
    operands = [v for index, v in enumerate(node.inputs) if index != unread]
    return _size(operands) + _size(node.outputs)


def _are_numbers(variables: Iterable[Variable]) -> bool:
    return all(isinstance(v.type, ScalarType) for v in variables)


# Convolutions and products


@_work.register(Conv2d)
def _convolution(op: Conv2d, node: Apply) -> Work:
    _, w, b = node.inputs
    y = _elements(node.outputs[0])
    adds = not (isinstance(b, Constant) and not b.data.any())
    return Work(_conv_kind("convolution", node), _multiply_adds(y, w) + adds * y, _nbytes(node))


@_work.register(Conv2dInputGrad)
def _convolution_input(op: Conv2dInputGrad, node: Apply) -> Work:
    _, w, g = node.inputs
    kind = _conv_kind("convolution input", node)
    return Work(kind, _multiply_adds(_elements(g), w), _nbytes(node, unread=0))


@_work.register(Conv2dWeightGrad)
def _convolution_weight(op: Conv2dWeightGrad, node: Apply) -> Work:
    _, w, g = node.inputs
    kind = _conv_kind("convolution weight", node)
    return Work(kind, _multiply_adds(_elements(g), w), _nbytes(node, unread=1))


def _multiply_adds(pixels: int, w: Variable) -> int:
    return 2 * pixels * prod(lengths(w)[1:])


def _conv_kind(kind: str, node: Apply) -> str:
    op: Any = node.op
    x, w = node.inputs[:2]
    channels = lengths(x)[1]
    if op.groups == channels > 1:
        return f"{kind} depthwise"
    if channels <= IMAGE_CHANNELS:
        return f"{kind} image"
    if lengths(w)[2:] == (1, 1):
        return f"{kind} 1x1"
    large = " large" if prod(lengths(x)[2:]) >= LARGE else ""
    return f"{kind}{large} winograd" if winograd_pays(node) else f"{kind}{large}"


@_work.register(Dot)
@_work.register(BatchedDot)
def _product(op: Op, node: Apply) -> Work:
    inner = lengths(node.inputs[0])[-1]
    return Work("product", 2 * inner * _elements(node.outputs[0]), _nbytes(node))


@_work.register(Blockwise)
def _blockwise(op: Blockwise, node: Apply) -> Work:
    return _work.dispatch(type(op.core_op))(op.core_op, node)


# Loops over elements: for each Op its kind, and operations on each element


def _per_element(
    kind: str, flops: Callable[[Any], int], of: str = "output", unread: int | None = None
) -> Callable[[Op, Apply], Work]:
    """Count operations on each element of the first result, or operand, or of g, the last."""

    def work(op: Op, node: Apply) -> Work:
        variable = {"output": node.outputs[0], "input": node.inputs[0], "g": node.inputs[-1]}[of]
        return Work(kind, flops(op) * _elements(variable), _nbytes(node, unread))

    return work


def _window(op: Any) -> int:
    return prod(op.size)


# Of a normalisation: the mean takes 1, the variance 3, to scale and to shift 2. Its gradient: to
# normalise again 2, two sums 3, and the gradient of x from them 4; ReLU's gate and what decides
# about it 3 more. LRN: a window of squares, then alpha, k, the power and a product.
for _op, _works in {
    MaxPool2d: _per_element("pool", _window),
    AveragePool2d: _per_element("pool", _window),
    MaxPool2dGrad: _per_element("pool gradient", lambda op: 1, of="g", unread=0),
    AveragePool2dGrad: _per_element("pool gradient", _window, of="g", unread=0),
    LRN: _per_element("lrn", lambda op: 2 * op.size + 3),
    LRNGrad: _per_element("lrn gradient", lambda op: op.size + 7),
    BatchNorm: _per_element("norm", lambda op: 6 + op.relu + op.adds),
    BatchNormInference: _per_element("norm", lambda op: 2),
    ChannelSums: _per_element("norm", lambda op: 4, of="input"),
    BatchNormBySums: _per_element("norm", lambda op: 2),
    BatchNormGrad: _per_element("norm gradient", lambda op: 9 + 3 * op.relu),
    ChannelGradientSums: _per_element("norm gradient", lambda op: 5, of="input"),
    BatchNormBySumsGrad: _per_element("norm gradient", lambda op: 6),
    Relu: _per_element("relu", lambda op: 1),
    ReluGrad: _per_element("relu gradient", lambda op: 1),
    Dropout: _per_element("dropout", lambda op: 1),
    DropoutMask: _per_element("dropout", lambda op: 1),
    MomentumStep: _per_element("update", lambda op: 8 if op.nesterov else 6),
    AdamStep: _per_element("update", lambda op: 14),
    Softmax: _per_element("softmax", lambda op: 5),
    LogSoftmax: _per_element("softmax", lambda op: 5),
    CTC: _per_element("softmax", lambda op: 30, of="input"),
    CAReduce: _per_element("reduction", lambda op: 1, of="input"),
    CumOp: _per_element("reduction", lambda op: 1, of="input"),
    Argmax: _per_element("reduction", lambda op: 1, of="input"),
    Conv2dBiasGrad: _per_element("reduction", lambda op: 1, of="input"),
}.items():
    _work.register(_op, _works)


@_work.register(LSTMSteps)
@_work.register(LSTMStepsGrad)
@_work.register(GRUSteps)
@_work.register(GRUStepsGrad)
def _recurrent(op: Any, node: Apply) -> Work:
    """Count a product of each step, of the states or of the gradients; other work is little."""
    units = lengths(node.inputs[1])[0]
    return Work("product", 2 * units * _elements(node.inputs[0]), _nbytes(node))


@_work.register(CropMirror)
def _crop(op: CropMirror, node: Apply) -> Work:
    adds_colours = len(node.inputs) > 4
    return Work("crop", (1 + adds_colours) * _elements(node.outputs[0]), _nbytes(node))


@_work.register(PoolNorm)
def _pool_norm(op: PoolNorm, node: Apply) -> Work:
    each = op.size**2 + 1 + (2 * op.norm[0] + 3 if op.norm else 0)
    biases = _elements(node.inputs[0])
    return Work("pool", each * _elements(node.outputs[0]) + biases, _nbytes(node))


@_work.register(PoolNormGrad)
def _pool_norm_gradient(op: PoolNormGrad, node: Apply) -> Work:
    each = 3 + (op.norm[0] + 7 if op.norm else 0)  # ReLU's gate, to scatter, and the bias's sum
    return Work("pool gradient", each * _elements(node.inputs[2]), _nbytes(node))


@_work.register(Elemwise)
def _elementwise(op: Elemwise, node: Apply) -> Work:
    each = _scalar_flops(op.scalar_op, len(node.inputs))
    kind = "elementwise" if each else "move"
    return Work(kind, each * _elements(node.outputs[0]), _nbytes(node))


def _scalar_flops(op: Any, operands: int) -> int:
    if isinstance(op, Composite):
        return sum(_scalar_flops(n.op, len(n.inputs)) for n in op.fgraph.apply_nodes)
    if isinstance(op, Cast | Identity | Second):
        return 0
    return operands - 1 if isinstance(op, Add | Mul) else 1


# Copies and views


def _move(op: Op, node: Apply) -> Work:
    return Work("move", 0, _nbytes(node))


for _op in (
    *(Join, MakeVector, DeepCopyOp, Pad2d, ARange, Eye, Collective),
    *(IncSubtensor, AdvancedIncSubtensor, AdvancedIncSubtensor1),
):
    _work.register(_op, _move)
for _op in (Shape, Shape_i, TensorFromScalar, IfElse):
    _work.register(_op, lambda op, node: _VIEW)


@_work.register(AdvancedSubtensor)
@_work.register(AdvancedSubtensor1)
def _chosen(op: Op, node: Apply) -> Work:
    return Work("move", 0, _size(node.inputs[1:]) + 2 * _size(node.outputs))


@_work.register(Alloc)
def _filled(op: Alloc, node: Apply) -> Work:
    """A number fills memory; anything else is a view that repeats it."""
    is_number = isinstance(node.inputs[0], Constant)
    return Work("move", 0, _size(node.outputs)) if is_number else _VIEW


@_work.register(Reshape)
@_work.register(JoinDims)
@_work.register(SplitDims)
def _reshaped(op: Op, node: Apply) -> Work:
    """A view, except of images: in memory their channels lie last, in the new order they don't."""
    variables = [node.inputs[0], node.outputs[0]]
    shapes = map(lengths, variables)
    is_image = any(len(s) == 4 and s[1] > 1 and prod(s[2:]) > 1 for s in shapes)
    return Work("move", 0, _size(variables)) if is_image else _VIEW


# Graphs inside Ops


@_work.register(OpFromGraph)
@_work.register(Region)
def _inner(op: Any, node: Apply) -> Work:
    return _sum(map(work_of, op.fgraph.apply_nodes), steps=1)


@_work.register(Scan)
def _loop(op: Any, node: Apply) -> Work:
    steps = node.inputs[0]
    if not isinstance(steps, Constant):
        raise ValueError(f"the number of steps of {node} is not known: {steps}")
    return _sum(map(work_of, op.fgraph.apply_nodes), int(steps.data))


def _sum(works: Iterable[Work], steps: int) -> Work:
    """Add up works, of the kind of that with the most operations, then bytes."""
    found = sorted(works, key=lambda work: (work.flops, work.nbytes))
    kind = found[-1].kind if found else "view"
    flops, nbytes = (sum(getattr(w, name) for w in found) for name in ("flops", "nbytes"))
    return Work(kind, steps * flops, steps * nbytes)
