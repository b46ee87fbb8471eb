"""Rewrites for GPUs: fewer passes over memory, and images in the form that tensor cores take."""

from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.math import Sum

from tandem.backend.lowering.pool_norm import fits
from tandem.backend.lowering.registry import static_shape
from tandem.ops import (
    LRN,
    Conv2d,
    Conv2dBiasGrad,
    Conv2dWeightGrad,
    CropMirror,
    LRNGrad,
    MaxPool2d,
    MaxPool2dGrad,
    PoolNorm,
    PoolNormGrad,
    Relu,
    ReluGrad,
)

Replacements = dict[Variable, Variable]


@node_rewriter([Conv2d, Conv2dWeightGrad])
def space_to_depth(fgraph: FunctionGraph, node: Apply) -> Replacements | None:
    """Make channels of a crop's squares of pixels, in place of a stride.

    Squares have the stride as their side. Three channels would leave tensor cores nearly idle;
    3 stride**2 fill them, and the few products with zeros that pad the filters cost less.
    """
    images, w, last = node.inputs
    crop, (stride, right) = images.owner, node.op.stride
    shape = static_shape(w)
    if crop is None or not isinstance(crop.op, CropMirror) or crop.op.block > 1 or shape is None:
        return None
    op = CropMirror(crop.op.crop_size, crop.op.cropped, crop.op.dtype, stride)
    filters, colours, size, columns = shape
    blocks = -(-size // stride)
    outputs = (crop.op.crop_size - size) // stride + 1
    fitting = size == columns and op.image_shape[1] - blocks + 1 == outputs
    plain = right == stride > 1 and node.op == type(node.op)(stride)
    if not (plain and fitting):
        return None
    x = op(*crop.inputs)
    whole = (filters, colours, blocks * stride, blocks * stride)
    padded = pt.set_subtensor(pt.zeros(whole, w.type.dtype)[:, :, :size, :size], w)
    squares = padded.reshape((filters, colours, blocks, stride, blocks, stride))
    turned = squares.transpose(0, 3, 5, 1, 2, 4)
    v = turned.reshape((filters, op.image_shape[0], blocks, blocks))
    if isinstance(node.op, Conv2d):
        return {node.outputs[0]: cast(Variable, Conv2d()(x, v, last))}
    g = Conv2dWeightGrad()(x, v, last)
    back = g.reshape((filters, stride, stride, colours, blocks, blocks))
    back = back.transpose(0, 3, 4, 1, 5, 2).reshape(whole)
    return {node.outputs[0]: cast(Variable, back[:, :, :size, :size])}


@node_rewriter([Sum])
def bias_gradient(fgraph: FunctionGraph, node: Apply) -> Replacements | None:
    """Sum a bias's gradient over what the filters' gradient reads."""
    (g,) = node.inputs
    if not _is_bias_sum(node):
        return None
    clients = [client for client, _ in fgraph.clients[g]]
    if not any(_is(client, Conv2dWeightGrad) and client.inputs[2] is g for client in clients):
        return None
    return {node.outputs[0]: cast(Variable, Conv2dBiasGrad()(g))}


@node_rewriter([MaxPool2d])
def fuse_pooling(fgraph: FunctionGraph, node: Apply) -> Replacements | None:
    """Pool, rectify and normalise in one pass over memory.

    It follows `tandem.backend.pooling_rewrites`, which has put ReLU and the bias's sum behind
    pooling. Nothing else may read what lies between.
    """
    chain = _Chain(fgraph, node)
    return chain.replacements() if chain.is_closed else None


class _Chain:
    """Pooling, ReLU, normalisation if there is one, and their gradients if there are any."""

    def __init__(self, fgraph: FunctionGraph, pool: Apply) -> None:
        self._fgraph, self._pool = fgraph, pool
        (self._x,), (pooled, argmax) = pool.inputs, pool.outputs
        self._relu = self._only(pooled, Relu)
        self._scatter = self._only(argmax, MaxPool2dGrad)
        self._lrn: Any = None
        self._grad: Any = None
        self._gate: Any = None
        self._sum: Any = None
        if self._relu is None:
            return
        lrns = [c for c in self._clients(self._relu.outputs[0]) if _is(c, LRN)]
        self._lrn = lrns[0] if len(lrns) == 1 else None
        if self._lrn is not None:
            self._grad = self._only(self._lrn.outputs[1], LRNGrad)
        if self._scatter is not None:
            self._gate = self._scatter.inputs[2].owner
            sums = [c for c in self._clients(self._scatter.inputs[2]) if _is_bias_sum(c)]
            self._sum = sums[0] if sums else None

    @property
    def is_closed(self) -> bool:
        """Return whether the kernels take this chain, and nobody reads its middle."""
        if self._relu is None or self._x.type.dtype != "float32" or not self._is_plain:
            return False
        known = (self._relu, self._lrn, self._grad, self._gate, self._scatter, self._sum)
        inner = [*self._pool.outputs]
        if self._lrn is not None:
            inner.append(self._relu.outputs[0])
        if self._scatter is not None:
            inner.append(self._scatter.inputs[2])
        if self._grad is not None:
            inner.append(self._grad.outputs[0])
        reads = (client for variable in inner for client in self._clients(variable))
        if any(client not in known for client in reads):
            return False
        shape = self._x.type.shape
        return fits(PoolNorm(*self._window, self._norm), shape) and self._is_backward()

    def _is_backward(self) -> bool:
        """Return whether the gradients are those of the chain, or there are none."""
        y, scatter, gate, grad = self._relu.outputs[0], self._scatter, self._gate, self._grad
        if scatter is None:
            return True
        same_window = scatter.op == MaxPool2dGrad(*self._window)
        same_images = scatter.inputs[0].type == self._x.type
        gated = _is(gate, ReluGrad) and gate.inputs[0] is y
        if not (same_window and same_images and gated):
            return False
        if self._lrn is None:
            return True
        return (
            grad is not None
            and grad.inputs[0] is y
            and grad.inputs[1] is self._lrn.outputs[1]
            and _norm_of(grad.op) == self._norm
        )

    def replacements(self) -> Replacements:
        x, b = self._without_bias()
        results = PoolNorm(*self._window, self._norm)(x, b)
        found = {self._relu.outputs[0]: results[0]}
        if self._lrn is not None:
            found[self._lrn.outputs[0]] = results[2]
        if self._scatter is not None:
            g = self._grad.inputs[2] if self._grad else self._gate.inputs[1]
            op = PoolNormGrad(*self._window, self._norm, self._x.type.shape[2:])
            dx, sums = op(results[0], results[1], g)
            found[self._scatter.outputs[0]] = dx
            if self._sum is not None:
                found[self._sum.outputs[0]] = sums
        return found

    def _without_bias(self) -> tuple[Variable, Variable]:
        """Return images and biases apart, if a convolution for pooling alone has added them."""
        conv, channels = self._x.owner, self._x.type.shape[1]
        zeros = pt.constant(np.zeros(channels, "float32"))
        clients = self._clients(self._x)
        if not _is(conv, Conv2d) or any(c not in (self._pool, self._scatter) for c in clients):
            return self._x, zeros
        images, filters, bias = conv.inputs
        return cast(Variable, conv.op(images, filters, zeros)), bias

    @property
    def _window(self) -> tuple[int, int]:
        return self._pool.op.size[0], self._pool.op.stride[0]

    @property
    def _is_plain(self) -> bool:
        """Return whether pooling is by squares that lie in the image."""
        return bool(self._pool.op == MaxPool2d(*self._window))

    @property
    def _norm(self) -> tuple[int, float, float, float] | None:
        return None if self._lrn is None else _norm_of(self._lrn.op)

    def _clients(self, variable: Variable) -> list[Any]:
        return [client for client, _ in self._fgraph.clients[variable]]

    def _only(self, variable: Variable, kind: type) -> Any:
        """The one node that reads a variable, if it is of a kind."""
        clients = self._clients(variable)
        return clients[0] if len(clients) == 1 and _is(clients[0], kind) else None


def _is(node: Any, kind: type) -> bool:
    return node is not None and isinstance(node.op, kind)


def _norm_of(op: LRN | LRNGrad) -> tuple[int, float, float, float]:
    return op.size, op.alpha, op.beta, op.k


def _is_bias_sum(node: Any) -> bool:
    """Return whether a node sums images over all but their channels, in their own dtype."""
    return (
        _is(node, Sum)
        and node.op.axis is not None
        and set(node.op.axis) == {0, 2, 3}
        and node.inputs[0].type.ndim == 4
        and node.outputs[0].type.dtype == node.inputs[0].type.dtype
    )


GPU, TRITON = "for_gpus", "by_triton"
"""Tags: rewrites for every GPU, and those to kernels that Triton compiles."""

for _position, _rewriter, _tag in (
    (42, space_to_depth, GPU),
    (43, fuse_pooling, TRITON),
    (44, bias_gradient, GPU),
):
    optdb.register(str(_rewriter), dfs_rewriter(_rewriter), _tag, position=_position)
