"""Rules for the Ops of `tandem.ops`.

`ROWS` and `CHANNELS` are the first two axes of images, and of rows of units.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable

from tandem import ops
from tandem.placement.placements import Partial, Placement, Replicate, Shard
from tandem.placement.rules.registry import (
    Locals,
    OpStrategy,
    Part,
    partial_sums,
    replicated,
    rule,
    same_op,
)
from tandem.split import edges

ROWS, CHANNELS = Shard(0), Shard(1)


def apply_parts(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
    """Apply the node's Op to a rank's inputs; where one has no element, all results are 0.

    That holds for results that are shards without elements, and for sums over none. Kernels need
    not accept arrays without elements.
    """
    outputs = same_op(node, inputs, part)
    return zeros_like(outputs) if has_empty(inputs) else outputs


def has_empty(inputs: Locals) -> bool:
    """Return whether one of a rank's inputs has no element."""
    return any(0 in x.type.shape for x in inputs)


def zeros_like(outputs: Sequence[Any]) -> list[Variable]:
    """Zeros of the types of variables."""
    return [pt.zeros(output.type.shape, dtype=output.type.dtype) for output in outputs]


def along(node: Apply, axis: int, whole: Collection[int] = ()) -> OpStrategy:
    """The choice to shard all inputs and outputs along an axis, but for the inputs in `whole`."""
    inputs = tuple(Replicate() if at in whole else Shard(axis) for at, _ in enumerate(node.inputs))
    return OpStrategy(inputs, (Shard(axis),) * len(node.outputs), apply_parts)


@rule.register(ops.Relu)
@rule.register(ops.ReluGrad)
def elementwise(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    choices = [along(node, axis) for axis in range(node.outputs[0].type.ndim)]
    return choices + (partial_sums(node, [[1]]) if isinstance(op, ops.ReluGrad) else [])


@rule.register(ops.MomentumStep)
@rule.register(ops.AdamStep)
def optimizer_step(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    """Elementwise in arrays of one shape; the other inputs are numbers."""
    arrays = 3 if isinstance(op, ops.MomentumStep) else 4
    numbers = range(arrays, len(node.inputs))
    return [along(node, axis, numbers) for axis in range(node.outputs[0].type.ndim)]


@rule.register(ops.MaxPool2d)
@rule.register(ops.MaxPool2dGrad)
@rule.register(ops.AveragePool2d)
@rule.register(ops.AveragePool2dGrad)
@rule.register(ops.Pad2d)
def by_channel(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    """Place by pictures and by channels; all but a maximum are linear in the last input."""
    choices = [along(node, axis) for axis in (0, 1)]
    is_linear = not isinstance(op, ops.MaxPool2d)
    return choices + (partial_sums(node, [[len(node.inputs) - 1]]) if is_linear else [])


@rule.register(ops.LRN)
@rule.register(ops.LRNGrad)
def response_norm(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    is_linear = isinstance(op, ops.LRNGrad)
    return [along(node, 0), *(partial_sums(node, [[2]]) if is_linear else [])]


@rule.register(ops.LSTMSteps)
@rule.register(ops.LSTMStepsGrad)
@rule.register(ops.GRUSteps)
@rule.register(ops.GRUStepsGrad)
def recurrent_steps(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    """Divide rows of the minibatch, which are the second axis of what has steps."""
    rows: dict[int, Placement] = {3: Shard(1), 2: Shard(0), 1: Replicate()}
    given = [rows[v.type.ndim] for v in node.inputs]
    given[1] = Replicate()  # the weight
    return [OpStrategy(tuple(given), tuple(rows[v.type.ndim] for v in node.outputs), apply_parts)]


@rule.register(ops.CTC)
def sequence_losses(op: ops.CTC, node: Apply, ranks: int) -> list[OpStrategy]:
    return [OpStrategy((ROWS, ROWS), (ROWS, ROWS), apply_parts)]


@rule.register(ops.CropMirror)
def crop_mirror(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    return [along(node, 0, whole=(1,))]


@rule.register(ops.PoolNorm)
def pool_norm_rows(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    return [along(node, 0, whole=(1,))]


@rule.register(ops.PoolNormGrad)
def pool_norm_gradient(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    choices = [OpStrategy((ROWS,) * 3, (ROWS, Partial()), apply_parts)]
    return choices + partial_sums(node, [[2]])


# Convolutions: positions of filters are as of rows of w, channels of a group are its columns


@rule.register(ops.Conv2d)
def convolution(op: ops.Conv2d, node: Apply, ranks: int) -> list[OpStrategy]:
    whole = Replicate()
    choices = [along(node, 0, whole=(1, 2))]
    if op.groups == 1:
        choices.append(OpStrategy((whole, ROWS, ROWS), (CHANNELS,), apply_parts))
    choices += _by_group(op, node, ranks, (CHANNELS, ROWS, ROWS), CHANNELS)
    if op.groups == 1:
        choices.append(OpStrategy((CHANNELS, CHANNELS, whole), (Partial(),), _with_one_bias))
    choices.append(OpStrategy((Partial(), whole, whole), (Partial(),), _with_one_bias))
    choices.append(OpStrategy((whole, Partial(), whole), (Partial(),), _with_one_bias))
    return choices


@rule.register(ops.Conv2dInputGrad)
def input_gradient(op: ops.Conv2dInputGrad, node: Apply, ranks: int) -> list[OpStrategy]:
    whole = Replicate()
    choices = [along(node, 0, whole=(1,))]
    if op.groups == 1:
        choices.append(OpStrategy((CHANNELS, CHANNELS, whole), (CHANNELS,), apply_parts))
    choices += _by_group(op, node, ranks, (CHANNELS, ROWS, CHANNELS), CHANNELS)
    if op.groups == 1:
        choices.append(OpStrategy((whole, ROWS, CHANNELS), (Partial(),), apply_parts))
    return choices + partial_sums(node, [[1], [2]])


@rule.register(ops.Conv2dWeightGrad)
def weight_gradient(op: ops.Conv2dWeightGrad, node: Apply, ranks: int) -> list[OpStrategy]:
    whole, choices = Replicate(), []
    if op.groups == 1:
        choices.append(OpStrategy((whole, ROWS, CHANNELS), (ROWS,), apply_parts))
        choices.append(OpStrategy((CHANNELS, CHANNELS, whole), (CHANNELS,), apply_parts))
    choices += _by_group(op, node, ranks, (CHANNELS, ROWS, CHANNELS), ROWS)
    choices.append(OpStrategy((ROWS, whole, ROWS), (Partial(),), apply_parts))
    return choices + partial_sums(node, [[0], [2]])


@rule.register(ops.Conv2dBiasGrad)
def bias_gradient(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    choices = [
        OpStrategy((CHANNELS,), (ROWS,), apply_parts),
        OpStrategy((ROWS,), (Partial(),), apply_parts),
    ]
    return choices + partial_sums(node, [[0]])


def _with_one_bias(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
    """A term of a convolution: the bias is added by rank 0 alone."""
    x, w, b = inputs
    (y,) = apply_parts(node, [x, w, zeros_like([b])[0]], part)
    if part.rank:
        return [y]
    if has_empty(inputs):
        return [y + b.dimshuffle(0, "x", "x")]
    return same_op(node, inputs, part)


def _by_group(
    op: Any, node: Apply, ranks: int, inputs: tuple[Placement, ...], output: Placement
) -> list[OpStrategy]:
    """The choice to share out groups, if equal parts of the channels and of w are whole groups."""
    x, w = (v.type.shape for v in node.inputs[:2])
    if op.groups == 1 or None in (x[1], w[0]):
        return []
    cuts = [edges(count, ranks) for count in (x[1], w[0])]
    groups = [
        [cut * op.groups // count for cut in part]
        for part, count in zip(cuts, (x[1], w[0]), strict=True)
        if all(cut * op.groups % count == 0 for cut in part)
    ]
    if len(groups) < 2 or groups[0] != groups[1]:
        return []

    def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
        own = groups[0][part.rank + 1] - groups[0][part.rank]
        part_op = type(op)(op.stride, op.pad, max(1, own), op.dilation)
        return apply_parts(part_op.make_node(*inputs), inputs, part)

    return [OpStrategy(inputs, (output,), local)]


# Dropout: a part of the units has the number of its first


@rule.register(ops.Dropout)
def dropped(op: ops.Dropout, node: Apply, ranks: int) -> list[OpStrategy]:
    choices = [along(node, 0, whole=(1, 2))]
    if node.inputs[0].type.ndim == 2:

        def units(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
            first = op.first + edges(node.inputs[0].type.shape[1], ranks)[part.rank]
            local = ops.Dropout(op.rate, op.layer, op.factor, first)
            return apply_parts(local.make_node(*inputs), inputs, part)

        choices.append(OpStrategy((CHANNELS, *replicated(3)), (CHANNELS,), units))
    return choices + partial_sums(node, [[0]])


@rule.register(ops.DropoutMask)
def dropout_mask(op: ops.DropoutMask, node: Apply, ranks: int) -> list[OpStrategy]:
    def units(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
        first, last = edges(op.units, ranks)[part.rank :][:2]
        local = ops.DropoutMask(op.rate, op.layer, last - first, op.dtype, op.first + first)
        outputs = local.make_node(*inputs).outputs
        return outputs if last > first else zeros_like(outputs)

    rows = OpStrategy((*replicated(2), ROWS), (ROWS,), apply_parts)
    return [rows, OpStrategy(replicated(3), (CHANNELS,), units)]


# Batch normalisation: rows are shared out by whole groups, and valid ones are the first of all


@rule.register(ops.BatchNorm)
def normalization(op: ops.BatchNorm, node: Apply, ranks: int) -> list[OpStrategy]:
    has_valid = len(node.inputs) == 4 + op.adds
    others, valid = (1,) * op.adds, replicated(has_valid)
    choices = []
    if _divides_groups(op, node, ranks):
        shards = (ROWS, *replicated(2), *(ROWS for _ in others), *valid)
        outputs = (ROWS, Partial(), Partial(), ROWS, ROWS)
        choices.append(OpStrategy(shards, outputs, _normalize_rows))
    vectors = (CHANNELS, ROWS, ROWS, *(CHANNELS for _ in others), *valid)
    results = (CHANNELS, ROWS, ROWS, CHANNELS, CHANNELS)
    return [*choices, OpStrategy(vectors, results, apply_parts)]


@rule.register(ops.BatchNormGrad)
def normalization_gradient(op: ops.BatchNormGrad, node: Apply, ranks: int) -> list[OpStrategy]:
    vectors = 1 + op.relu  # scale, shift
    valid = replicated(len(node.inputs) - 4 - vectors)
    choices = []
    if _divides_groups(op, node, ranks):
        shards = (ROWS, *replicated(vectors), *(ROWS,) * 3, *valid)
        outputs = (ROWS, Partial(), Partial())
        choices.append(OpStrategy(shards, outputs, _with_valid_rows))
    shards = (CHANNELS, *(ROWS,) * vectors, *(CHANNELS,) * 3, *valid)
    choices.append(OpStrategy(shards, (CHANNELS, ROWS, ROWS), apply_parts))
    return choices + partial_sums(node, [[vectors + 1]])


@rule.register(ops.BatchNormInference)
def normalization_by_averages(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    by_channel = OpStrategy((CHANNELS, *(ROWS,) * 4), (CHANNELS,), apply_parts)
    return [along(node, 0, whole=range(1, 5)), by_channel]


@rule.register(ops.ChannelSums)
@rule.register(ops.ChannelGradientSums)
@rule.register(ops.BatchNormBySums)
@rule.register(ops.BatchNormBySumsGrad)
def normalization_by_sums(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    """Images are first, then numbers of each channel, of all rows together."""
    images = 1 + isinstance(op, ops.ChannelGradientSums | ops.BatchNormBySumsGrad)
    adds = isinstance(op, ops.ChannelSums | ops.ChannelGradientSums)
    vectors = len(node.inputs) - images, len(node.outputs) - 1
    by_rows = OpStrategy(
        (*(ROWS,) * images, *replicated(vectors[0])),
        (Partial() if adds else ROWS, *replicated(vectors[1])),
        _with_valid_rows,
    )
    by_channels = OpStrategy(
        tuple(_channels_of(x) for x in node.inputs),
        tuple(_channels_of(y) for y in node.outputs),
        apply_parts,
    )
    is_linear = isinstance(op, ops.ChannelGradientSums)
    return [by_rows, by_channels, *(partial_sums(node, [[1]]) if is_linear else [])]


def _channels_of(variable: Any) -> Placement:
    """The shard of the channels of images, of two numbers for each, of one, or of a number."""
    axes = variable.type.ndim
    return Shard(min(1, axes - 1)) if axes else Replicate()


def _divides_groups(op: Any, node: Apply, ranks: int) -> bool:
    """Return whether the ranks' rows are whole groups, and as many of the groups are theirs."""
    batch = node.inputs[0].type.shape[0]
    if batch is None:
        return False
    groups = edges(-(-batch // op.rows), ranks)
    return [min(batch, group * op.rows) for group in groups] == edges(batch, ranks)


def _own_rows(node: Apply, inputs: Locals, part: Part) -> tuple[Any, Any]:
    """Return how many of a rank's rows are valid, and of all; both as numbers, or variables."""
    batch = node.inputs[0].type.shape[0]
    first, last = edges(batch, part.ranks)[part.rank :][:2]
    valid = inputs[-1]
    if valid.type.dtype != "int64":
        return last - first, batch
    return pt.clip(valid - first, np.int64(0), np.int64(last - first)), valid


def _with_own_rows(node: Apply, inputs: Locals, part: Part) -> Locals:
    """A rank's inputs with its own number of valid rows, if there is such an input."""
    own, _ = _own_rows(node, inputs, part)
    return inputs if isinstance(own, int) else [*inputs[:-1], own]


def _with_valid_rows(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
    inputs = _with_own_rows(node, inputs, part)
    # It has results that do not depend on how many rows there are.
    by_sums = isinstance(node.op, ops.BatchNormBySums)
    return (same_op if by_sums else apply_parts)(node, inputs, part)


def _normalize_rows(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
    """Normalise a rank's groups; its mean and variance count by their share of the valid rows."""
    y, *reported, means, inverses = apply_parts(node, _with_own_rows(node, inputs, part), part)
    own, valid = _own_rows(node, inputs, part)
    dtype = node.outputs[0].type.dtype
    if isinstance(own, int):
        share: Any = np.asarray(own / max(1, valid), dtype)
    else:
        share = own.astype(dtype) / pt.maximum(valid, np.int64(1)).astype(dtype)
    return [y, *(statistic * share for statistic in reported), means, inverses]
