"""FLOPs, bytes and kinds of nodes, against loops that count each multiplication and addition."""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.scan.op import Scan

from tandem.backend import device_mode
from tandem.ops import (
    LRN,
    AdamStep,
    AllGather,
    AveragePool2d,
    AveragePool2dGrad,
    BatchNorm,
    BatchNormBySums,
    BatchNormBySumsGrad,
    BatchNormGrad,
    ChannelGradientSums,
    ChannelSums,
    Conv2d,
    Conv2dInputGrad,
    Conv2dWeightGrad,
    LRNGrad,
    MaxPool2d,
    MaxPool2dGrad,
    MomentumStep,
    PoolNorm,
    PoolNormGrad,
    Relu,
    ReluGrad,
    adam_step,
    crop_mirror,
    dropout,
    first_token,
)
from tandem.ops.batch_norm import batch_norm_inference
from tandem.ops.work import KINDS, Work, most_nbytes, work_of


def zeros(*shape: int, dtype: str = "float32") -> Any:
    return pt.tensor(dtype=dtype, shape=shape)


def node_of(*outputs: Any) -> Apply:
    """The node of a variable, or of the first of several."""
    node = outputs[0].owner
    assert isinstance(node, Apply)
    return node


def counted(node: Apply, *read: int) -> Work:
    """The work of a node, whose bytes are those of the operands at `read`, and of all results."""
    work = work_of(node)
    assert work.kind in KINDS
    arrays = [node.inputs[i] for i in read] + list(node.outputs)
    nbytes = sum(np.zeros(v.type.shape, v.type.dtype).nbytes for v in arrays)
    assert work.nbytes == nbytes
    return work


# Convolutions

CONVOLUTIONS = [
    # batch, channels, rows, columns, filters, (taps), stride, pad, groups, dilation, suffix
    (2, 6, 5, 4, 4, (3, 2), 1, 0, 1, 1, ""),
    (2, 6, 7, 6, 4, (3, 3), 2, 1, 2, 1, ""),
    (1, 5, 9, 8, 3, (3, 2), 1, 2, 1, 3, ""),
    (1, 5, 56, 56, 1, (1, 2), 2, 0, 1, 1, " large"),
    (1, 5, 56, 55, 1, (1, 2), 2, 0, 1, 1, ""),
    (16, 1, 13, 13, 1, (3, 3), 1, 1, 1, 1, " image"),
    (16, 5, 13, 13, 1, (3, 3), 1, 1, 1, 1, " winograd"),
    (1, 5, 56, 56, 1, (3, 3), 1, 1, 1, 1, " large winograd"),
    (2, 5, 5, 4, 7, (1, 1), 2, 0, 1, 1, " 1x1"),
    (1, 5, 56, 56, 1, (1, 1), 4, 0, 1, 1, " 1x1"),
    (2, 3, 7, 7, 4, (5, 5), (2, 1), 2, 1, 1, " image"),
    (2, 1, 5, 5, 2, (1, 1), 1, 0, 1, 1, " image"),
    (2, 6, 5, 5, 6, (3, 3), 1, 1, 6, 1, " depthwise"),
    (2, 6, 5, 5, 12, (1, 1), 1, 0, 6, 1, " depthwise"),
]


def multiply_adds(
    batch: int, channels: int, filters: int, image: tuple[int, int], taps: tuple[int, int], op: Any
) -> Iterator[tuple[int, ...]]:
    """Yield what is multiplied in a convolution, zeros of the border included, pair by pair."""
    for n, o in np.ndindex(batch, filters):
        group = o // (filters // op.groups)
        of_group = range(channels // op.groups)
        for top, left in windows(image, taps, op):
            for c, i, j in product(of_group, range(taps[0]), range(taps[1])):
                row, column = top + op.dilation[0] * i, left + op.dilation[1] * j
                yield n, group * len(of_group) + c, row, column, o, c, i, j


def windows(image: tuple[int, int], taps: tuple[int, int], op: Any) -> Iterator[tuple[int, int]]:
    """Yield the upper left corner of each window that lies within the padded image."""
    ends = [
        n + pad - dilation * (tap - 1)
        for n, pad, dilation, tap in zip(image, op.pad, op.dilation, taps, strict=True)
    ]
    rows, columns = (
        range(-pad, end, stride) for pad, end, stride in zip(op.pad, ends, op.stride, strict=True)
    )
    yield from product(rows, columns)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_count_each_multiplication_and_addition(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_TO_MOVE", "_TO_TRANSFORM_FILTER"):  # so small ones take Winograd's
        monkeypatch.setattr(f"tandem.ops.conv.{name}", (0, 0))
    batch, channels, rows, columns, filters, taps, stride, pad, groups, dilation, suffix = case
    x, b = zeros(batch, channels, rows, columns), zeros(filters)
    w = zeros(filters, channels // groups, *taps)
    op = Conv2d(stride, pad, groups, dilation)
    y = op(x, w, b)
    settings = (stride, pad, groups, dilation)
    found = [*multiply_adds(batch, channels, filters, (rows, columns), taps, op)]
    assert len(set(found)) == len(found)
    forward = counted(node_of(y), 0, 1, 2)
    of_images = counted(node_of(Conv2dInputGrad(*settings)(x, w, y)), 1, 2)
    of_filters = counted(node_of(Conv2dWeightGrad(*settings)(x, w, y)), 0, 2)
    assert forward.flops == 2 * len(found) + prod(y.type.shape)
    assert of_images.flops == of_filters.flops == 2 * len(found)
    assert forward.kind == f"convolution{suffix}"
    assert of_images.kind == f"convolution input{suffix}"
    assert of_filters.kind == f"convolution weight{suffix}"
    without = op(x, w, pt.constant(np.zeros(filters, np.float32)))
    assert work_of(node_of(without)).flops == 2 * len(found)


def test_products_count_each_multiplication_and_addition() -> None:
    pairs = [
        (zeros(3, 4), zeros(4, 5)),
        (zeros(3, 4), zeros(4)),
        (zeros(4), zeros(4)),
        (zeros(2, 3, 4), zeros(2, 4, 5)),
        (zeros(2, 3, 4), zeros(4, 5)),
    ]
    for x, y in pairs:
        product_of = pytensor.function([x, y], pt.matmul(x, y), mode=device_mode()).maker.fgraph
        arrays = [np.ones(v.type.shape) for v in (x, y)]
        multiplied = 2 * int(np.matmul(*arrays).sum())  # a sum of ones for each multiplication
        works = [work_of(node) for node in product_of.apply_nodes]
        assert sum(work.flops for work in works if work.kind == "product") == multiplied
    f = counted(node_of(pt.dot(*pairs[0])), 0, 1)
    assert f == Work("product", 2 * 3 * 4 * 5, 4 * (12 + 20 + 15))


# Loops over elements


def pool_windows(op: Any, pooled: tuple[int, ...]) -> int:
    """Count the elements of all windows, those beyond the edge included."""
    return sum(1 for _ in np.ndindex(*pooled) for _ in np.ndindex(*op.size))


def test_pools_count_each_element_of_a_window() -> None:
    x = zeros(2, 3, 7, 6)
    maximum, average = MaxPool2d(3, 2), AveragePool2d(3, 2)
    y, argmax = maximum(x)
    z = average(x)
    assert argmax.type.dtype == "int64"
    size = pool_windows(maximum, y.type.shape)
    cases = [
        (y, [0], "pool", size),
        (MaxPool2dGrad(3, 2)(x, argmax, y), [1, 2], "pool gradient", prod(y.type.shape)),
        (z, [0], "pool", size),
        (AveragePool2dGrad(3, 2)(x, z), [1], "pool gradient", size),
    ]
    for variable, read, kind, flops in cases:
        work = counted(node_of(variable), *read)
        assert (work.kind, work.flops) == (kind, flops)


class Number:
    """A number that counts the operations on it and on what they give."""

    done = 0

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def _counted(self, other: Any = None) -> "Number":
        type(self).done += 1
        return Number()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _counted
    __pow__ = sqrt = maximum = _counted


def operations(formula: Callable[..., Any], *numbers: int) -> int:
    """Count the operations of a formula on so many numbers."""
    Number.done = 0
    formula(*(Number() for _ in range(*numbers or (formula.__code__.co_argcount,))))
    return Number.done


def lrn(*window: Any) -> Any:
    squares = window[0] * window[0]
    for x in window[1:]:
        squares = squares + x * x
    return window[0] * (2.0 + squares * 1e-4) ** -0.75


def lrn_gradient(g: Any, x: Any, scale: Any, *others: Any) -> Any:
    power = scale**-0.75
    terms = g * (x * power) * scale  # one for each element, of which those of a window are added
    for other in others:
        terms = terms + other
    return g * power - terms * x * 2e-4


def test_normalisation_across_channels_counts_its_formula() -> None:
    x = zeros(2, 6, 3, 4)
    for size in (3, 5):
        y, scale = LRN(size, 1e-4, 0.75, 2.0)(x)
        work = counted(node_of(y), 0)
        assert (work.kind, work.flops) == ("lrn", prod(x.type.shape) * operations(lrn, size))
        work = counted(node_of(LRNGrad(size, 1e-4, 0.75, 2.0)(x, scale, y)), 0, 1, 2)
        each = operations(lrn_gradient, 3 + size - 1)
        assert (work.kind, work.flops) == ("lrn gradient", prod(x.type.shape) * each)


def norm(x: Any, total: Any, mean: Any, squares: Any, factor: Any, shift: Any) -> Any:
    centred = x - mean
    return total + x, squares + centred * centred, x * factor + shift


def norm_relu(x: Any, total: Any, mean: Any, squares: Any, factor: Any, shift: Any) -> Any:
    return norm(x, total, mean, squares, factor, shift)[2].maximum(0)


def norm_gradient(x: Any, g: Any, mean: Any, inverse: Any, total: Any, along: Any) -> Any:
    normal = (x - mean) * inverse
    return total + g, along + g * normal, (g - total - normal * along) * inverse


def norm_relu_gradient(x: Any, g: Any, mean: Any, inverse: Any, total: Any, along: Any) -> Any:
    y = x * inverse + mean
    return norm_gradient(x, y.maximum(g), mean, inverse, total, along)


def test_batch_normalisation_counts_its_formula() -> None:
    x, vector = zeros(4, 3, 5, 2), zeros(3)
    elements = prod(x.type.shape)
    y = BatchNorm(2)(x, vector, vector)[0]
    statistics = zeros(2, 3)
    rectified = BatchNorm(2, relu=True)(x, vector, vector)[0]
    added = BatchNorm(2, relu=True, adds=True)(x, vector, vector, zeros(4, 3, 5, 2))[0]
    gradient = BatchNormGrad(2)(x, vector, zeros(4, 3, 5, 2), statistics, zeros(2, 3))[0]
    gated = BatchNormGrad(2, relu=True)(
        x, vector, zeros(3), zeros(4, 3, 5, 2), statistics, zeros(2, 3)
    )[0]
    expected = [
        (y, "norm", operations(norm)),
        (rectified, "norm", operations(norm_relu)),
        (added, "norm", operations(norm_relu) + 1),
        (gradient, "norm gradient", operations(norm_gradient)),
        (gated, "norm gradient", operations(norm_relu_gradient)),
        (batch_norm_inference(x, *[vector] * 4), "norm", 2),
    ]
    for variable, kind, each in expected:
        work = work_of(node_of(variable))
        assert (work.kind, work.flops) == (kind, each * elements)
    counted(node_of(added), 0, 1, 3)  # the same vector is scale and shift
    counted(node_of(gated), 0, 1, 2, 3, 4, 5)


def test_normalisation_over_ranks_counts_as_much() -> None:
    """What `BatchNorm` computes in one Op, apart from sums that ranks add up; as its gradient."""
    x, vector, sums = zeros(4, 3, 5, 2), zeros(3), zeros(2, 3, dtype="float64")
    count = zeros(dtype="float64")
    forward = [
        ChannelSums()(x, vector),
        BatchNormBySums(1e-5)(x, vector, vector, vector, sums, count)[0],
    ]
    backward = [
        ChannelGradientSums()(x, zeros(4, 3, 5, 2), vector, vector),
        BatchNormBySumsGrad()(x, x, vector, vector, vector, zeros(2, 3), count),
    ]
    for parts, kind, formula in (
        (forward, "norm", norm),
        (backward, "norm gradient", norm_gradient),
    ):
        works = [work_of(node_of(part)) for part in parts]
        assert {work.kind for work in works} == {kind}
        # The gradient normalises in both of its Ops.
        again = 2 * (kind == "norm gradient")
        assert sum(work.flops for work in works) == 120 * (operations(formula) + again)


@pytest.mark.parametrize("settings", [(5, 1e-4, 0.75, 2.0), None])
def test_a_fused_pool_counts_what_it_replaces(settings: Any) -> None:
    x, bias = zeros(2, 6, 7, 7), zeros(6)
    y, places, *_ = PoolNorm(3, 2, settings)(x, bias)
    g, argmax = MaxPool2d(3, 2)(x)
    apart = [g, Relu()(g), x + bias[:, None, None]]
    gradients = [MaxPool2dGrad(3, 2)(x, argmax, g), ReluGrad()(y, g), g.sum(axis=(0, 2, 3))]
    if settings:
        normed, scale = LRN(*settings)(g)
        apart.append(normed)
        gradients.append(LRNGrad(*settings)(g, scale, y))
    forward = counted(node_of(y), 0, 1)
    fused = PoolNormGrad(3, 2, settings, (7, 7))(y, places, g)
    backward = counted(node_of(*fused), 0, 1, 2)
    assert (forward.kind, backward.kind) == ("pool", "pool gradient")
    assert forward.flops == sum(work_of(node_of(v)).flops for v in apart)
    assert backward.flops == sum(work_of(node_of(v)).flops for v in gradients)


def momentum(w: Any, v: Any, g: Any, rate: Any) -> Any:
    v = 0.9 * v - rate * (g + 5e-4 * w)
    return w + v, v


def nesterov(w: Any, v: Any, g: Any, rate: Any) -> Any:
    step = rate * (g + 5e-4 * w)
    v = 0.9 * v - step
    return w + (0.9 * v - step)


def adam(w: Any, m: Any, v: Any, g: Any, factor: Any, epsilon: Any) -> Any:
    g = g + 1e-4 * w
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return w - factor * m / (v.sqrt() + epsilon)


def test_updates_count_their_formula() -> None:
    w, v, g, rate = zeros(3, 4), zeros(3, 4), zeros(3, 4), zeros()
    for is_nesterov, formula in ((False, momentum), (True, nesterov)):
        node = node_of(MomentumStep(0.9, 5e-4, is_nesterov)(w, v, g, rate)[0])
        work = counted(node, 0, 1, 2, 3)
        assert (work.kind, work.flops) == ("update", 12 * operations(formula))
    numbers = zeros(), zeros(), zeros()
    stepped = adam_step(
        w, (v, zeros(3, 4)), g, *numbers, betas=(0.9, 0.999), decay=1e-4, is_decoupled=False
    )
    work = counted(node_of(stepped[0]), *range(7))
    assert isinstance(node_of(stepped[0]).op, AdamStep)
    assert (work.kind, work.flops) == ("update", 12 * operations(adam))


def test_elementwise_work_is_an_operation_for_each_element() -> None:
    x, row = zeros(3, 4), zeros(1, 4)
    cases: list[tuple[Any, str, int]] = [
        (Relu()(x), "relu", 12),
        (ReluGrad()(x, zeros(3, 4)), "relu gradient", 12),
        (x + row, "elementwise", 12),
        (pt.add(x, row, zeros(3, 1)), "elementwise", 24),
        (pt.exp(x), "elementwise", 12),
        (pt.cast(x, "float64"), "move", 0),
        (x.sum(axis=0), "reduction", 12),
        (pt.argmax(x, axis=1), "reduction", 12),
        (pt.special.softmax(x, axis=1), "softmax", 60),
        (dropout(x, 3, 0, zeros(3, dtype="int64"), rate=0.5, layer=0), "dropout", 12),
    ]
    for variable, kind, flops in cases:
        node = node_of(variable)
        operands = range(len(node.inputs))
        work = counted(node, *operands)
        assert (work.kind, work.flops) == (kind, flops), node
    assert work_of(node_of(x * x)) == Work("elementwise", 12, 2 * 48)  # read once


def test_a_crop_subtracts_the_mean_and_adds_colours() -> None:
    pictures, mean = zeros(2, 8, 8, 3, dtype="uint8"), zeros(3, 8, 8)
    origins, mirrored = zeros(2, 2, dtype="int64"), zeros(2, dtype="uint8")
    for colours in ([], [zeros(2, 3)]):
        y = crop_mirror(pictures, mean, origins, mirrored, *colours, crop_size=5)
        work = counted(node_of(y), *range(4 + len(colours)))
        assert (work.kind, work.flops) == ("crop", (1 + len(colours)) * 2 * 3 * 25)


# Copies and views


def test_moves_and_views() -> None:
    x, images = zeros(3, 4), zeros(2, 3, 4, 5)
    positions = zeros(2, dtype="int64")
    joined = node_of(pt.concatenate([x, zeros(3, 4)]))
    assert counted(joined, 0, 1, 2).kind == "move"
    assert work_of(node_of(x[positions])) == Work("move", 0, 16 + 2 * 32)
    assert work_of(node_of(pt.alloc(np.float32(0), 3, 4))) == Work("move", 0, 48)
    assert work_of(node_of(images.reshape((2, 60)))) == Work("move", 0, 2 * 480)
    assert work_of(node_of(pt.inc_subtensor(x[0], 1))).kind == "move"
    whole = node_of(AllGather(0, 2, 1, (8, 4), 0)(zeros(4, 4), first_token())[0])
    assert counted(whole, 0, 1).kind == "move"
    for view in (
        x.T,
        x[1:],
        x.reshape((12,)),
        zeros(2, 3, 1, 1).reshape((2, 3)),
        pt.alloc(zeros(3, 1), 3, 4),
        pt.split(x, [1, 2], axis=0)[0],
        x.shape,
        x.shape[0],
    ):
        assert work_of(node_of(view)) == Work("view", 0, 0)


# Memory


def test_a_result_takes_memory_until_its_last_use() -> None:
    x = zeros(100)
    once = pt.exp(x)
    for y, results in (
        (pt.sin(once) + pt.cos(once), 3),  # twice the exponential and one of the others
        (pt.tanh(pt.sin(pt.cos(once))), 2),
        (pt.sin(once.reshape((10, 10)).T), 2),
        (once[:50] + once[50:], 1.5),
    ):
        assert most_nbytes(FunctionGraph([x], [y], clone=True)) == results * 400
    function = pytensor.function([x], pt.exp(x) * 2, mode="FAST_RUN")
    assert most_nbytes(function.maker.fgraph) == 400
    unknown = pt.vector("unknown", dtype="float32")
    assert most_nbytes(FunctionGraph([unknown], [pt.exp(unknown)], clone=True)) == 0


# Loops, and what is not known


def test_a_loop_is_its_steps() -> None:
    x, first, w = zeros(5, 3), zeros(3), zeros(3, 3)
    sums = pytensor.scan(lambda a, b, u: pt.dot(b, u) + a, x, [first], [w], return_updates=False)
    function = pytensor.function([x, first, w], sums, mode=device_mode())
    (node,) = (n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, Scan))
    work = work_of(node)
    assert (work.kind, work.flops) == ("product", 5 * (2 * 9 + 3))
    with pytest.raises(ValueError, match="number of steps of Scan"):
        work_of(node_of(*(v for v in sums.owner.inputs if v.owner)))


def test_lengths_that_are_not_known_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"shape of images is not known: \(None, 3\)"):
        work_of(node_of(pt.tensor("images", dtype="float32", shape=(None, 3)) * 2))
    mask = node_of(zeros(4, 1) < zeros(1, 3))
    mask.outputs[0].type = pt.TensorType("bool", (4, None))  # as rewrites leave it
    assert work_of(mask) == Work("elementwise", 12, 16 + 12 + 12)
    assert work_of(node_of(mask.outputs[0] & zeros(4, 3, dtype="bool"))).flops == 12
