"""Rules for the Ops of `tandem.ops`: the parts of all ranks make the whole."""

import inspect
from typing import Any

import numpy as np
import pytest

import tandem.placement.rules.tandem_ops  # noqa: F401, which registers the rules
from tandem import ops
from tandem.placement.rules.registry import has_rule, rule
from tests.support.rule_checks import check_rule, compute, node_of

RNG = np.random.default_rng(0)
LR = np.asarray(0.1)
KEYS = np.asarray(2**62 + 5), np.asarray(3)
BATCH = 8


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def positive(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2, size=shape)


def with_gradient(op: Any, gradient: Any, *arrays: np.ndarray) -> list[tuple[Any, ...]]:
    """Cases of an Op of arrays, and of its gradient from its outputs."""
    node = node_of(op, arrays)
    outputs = compute(node.inputs, node.outputs, arrays)
    return [(op, *arrays), gradient(*outputs, normal(*outputs[0].shape))]


def pools() -> list[tuple[Any, ...]]:
    x = normal(BATCH, 3, 5, 6)
    largest, average = (3, 2, 1, True), (3, 2, 1, True, False)
    return [
        *with_gradient(
            ops.MaxPool2d(*largest),
            lambda y, argmax, g: (ops.MaxPool2dGrad(*largest), x, argmax, g),
            x,
        ),
        *with_gradient(
            ops.AveragePool2d(*average), lambda y, g: (ops.AveragePool2dGrad(*average), x, g), x
        ),
        *with_gradient(
            ops.LRN(3, 0.5, 0.75, 1.0),
            lambda y, scale, g: (ops.LRNGrad(3, 0.5, 0.75, 1.0), x, scale, g),
            x,
        ),
        *with_gradient(ops.Relu(), lambda y, g: (ops.ReluGrad(), y, g), x),
        (ops.Pad2d((1, 0, 2, 1)), x),
        *with_gradient(
            ops.PoolNorm(3, 2, (3, 0.5, 0.75, 1.0)),
            lambda y, places, z, g: (
                ops.PoolNormGrad(3, 2, (3, 0.5, 0.75, 1.0), x.shape[2:]),
                *(y, places, g),
            ),
            *(x, normal(3)),
        ),
    ]


def recurrent_steps() -> list[tuple[Any, ...]]:
    steps, units = 2, 3
    h0, c0, weight = normal(BATCH, units), normal(BATCH, units), normal(units, 4 * units)
    z = normal(steps, BATCH, 4 * units)
    return [
        *with_gradient(
            ops.LSTMSteps(),
            lambda h, c, gates, g: (ops.LSTMStepsGrad(), gates, weight, c0, c, g, h),
            *(z, weight, h0, c0),
        ),
        *with_gradient(
            ops.GRUSteps(),
            lambda h, gates, inner, g: (ops.GRUStepsGrad(), gates, weight[:, :9], inner, h0, h, g),
            *(z[:, :, :9], weight[:, :9], normal(9), h0),
        ),
    ]


def convolutions(groups: int, channels: int, filters: int) -> list[tuple[Any, ...]]:
    x, w = normal(BATCH, channels, 5, 6), normal(filters, channels // groups, 3, 2)
    props = (2, 1, groups)
    node = node_of(ops.Conv2d(*props), [x, w, w[:, 0, 0, 0]])
    g = normal(*node.outputs[0].type.shape)
    return [
        (ops.Conv2d(*props), x, w, normal(filters)),
        (ops.Conv2dInputGrad(*props), x, w, g),
        (ops.Conv2dWeightGrad(*props), x, w, g),
    ]


def normalizations(rows: int, shape: tuple[int, ...], *valid: np.ndarray) -> list[tuple[Any, ...]]:
    x, scale, shift = normal(*shape), positive(shape[1]), normal(shape[1])
    g = normal(*shape)

    def gradients(*outputs: np.ndarray) -> list[tuple[Any, ...]]:
        saved = outputs[3:5]
        return [
            (ops.BatchNormGrad(rows), x, scale, g, *saved, *valid),
            (ops.BatchNormGrad(rows, relu=True), x, scale, shift, g, *saved, *valid),
        ]

    norm = ops.BatchNorm(rows, 1e-3)
    arrays = (x, scale, shift, *valid)
    node = node_of(norm, arrays)
    return [
        (norm, *arrays),
        *gradients(*compute(node.inputs, node.outputs, arrays)),
        (ops.BatchNorm(rows, 1e-3, relu=True), *arrays),
        (ops.BatchNorm(rows, 1e-3, relu=True, adds=True), x, scale, shift, g, *valid),
    ]


def global_normalizations(shape: tuple[int, ...], *valid: np.ndarray) -> list[tuple[Any, ...]]:
    x, g, scale = normal(*shape), normal(*shape), positive(shape[1])
    vectors, sums = (scale, normal(shape[1]), normal(shape[1])), positive(2, shape[1])
    count = np.asarray(float(valid[0] if valid else shape[0]) * np.prod(shape[2:]))
    sums[1] += sums[0] ** 2
    return [
        (ops.ChannelSums(), x, vectors[1], *valid),
        (ops.BatchNormBySums(1e-3), x, *vectors, sums, count, *valid),
        (ops.ChannelGradientSums(), x, g, vectors[1], scale, *valid),
        (ops.BatchNormBySumsGrad(), x, g, *vectors, sums, count, *valid),
    ]


def others() -> list[tuple[Any, ...]]:
    indices = np.arange(BATCH) + 2**31
    vectors = normal(3), normal(3), normal(3), positive(3)
    pictures = RNG.integers(0, 256, size=(BATCH, 6, 7, 3)).astype(np.uint8)
    origins, mirrored = RNG.integers(0, 2, (BATCH, 2)), RNG.integers(0, 2, BATCH).astype(np.uint8)
    crops = (pictures, normal(3, 6, 7), origins, mirrored)
    weights = [positive(7, 5) for _ in range(4)]
    return [
        (ops.Conv2dBiasGrad(), normal(BATCH, 5, 2, 3)),
        (ops.BatchNormInference(), normal(BATCH, 3, 2, 2), *vectors),
        (ops.BatchNormInference(), normal(BATCH, 3), *vectors),
        (ops.CropMirror(4, dtype="float64"), *crops),
        (ops.CropMirror(4, dtype="float64"), *crops, normal(BATCH, 3).astype(np.float32)),
        (ops.Dropout(0.3, 1, 1.5), normal(BATCH, 13), *KEYS, indices),
        (ops.Dropout(0.3, 1, 1.5, 3), normal(BATCH, 2), *KEYS, indices),
        (ops.Dropout(0.3, 1), normal(BATCH, 3, 2, 3), *KEYS, indices),
        (ops.DropoutMask(0.3, 1, 13, "float64"), *KEYS, indices),
        (ops.DropoutMask(0.3, 1, 3, "float64", 5), *KEYS, indices),
        (ops.MomentumStep(0.9, 0.1, True), *weights[:3], LR),
        (ops.MomentumStep(0.9, 0.1, True), *(w[0, :3] for w in weights[:3]), LR),
        (ops.AdamStep(0.9, 0.99, 0.1, True), *weights, LR, LR, LR),
    ]


CASES = [
    *pools(),
    *(case for groups in ((1, 4, 6), (1, 2, 3)) for case in convolutions(*groups)),
    *(case for groups in ((2, 4, 6), (3, 6, 3), (5, 5, 5)) for case in convolutions(*groups)),
    *normalizations(2, (8, 5, 2, 2)),
    *normalizations(2, (8, 3), np.asarray(3)),
    *normalizations(1, (8, 3), np.asarray(8)),
    *normalizations(4, (8, 3, 2, 1), np.asarray(0)),
    *normalizations(3, (7, 3), np.asarray(5)),
    *global_normalizations((8, 3, 2, 2)),
    *global_normalizations((8, 2), np.asarray(3)),
    *others(),
]


def with_few_rows(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """A case with 2 rows, of which a third rank has none."""
    op, *arrays = case
    return op, *(a[:2] if np.shape(a)[:1] == (BATCH,) else a for a in arrays)


FEW = [with_few_rows(case) for case in CASES if not hasattr(case[0], "rows")]


@pytest.mark.parametrize(
    "ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
@pytest.mark.parametrize("case", CASES + FEW + recurrent_steps(), ids=lambda case: str(case[0]))
def test_the_parts_of_all_ranks_make_the_whole(case: tuple[Any, ...], ranks: int) -> None:
    op, *arrays = case
    assert check_rule(op, *arrays, ranks=ranks)


@pytest.mark.parametrize("case", normalizations(1, (2, 3), np.asarray(1)), ids=str)
def test_ranks_may_have_no_group(case: tuple[Any, ...]) -> None:
    op, *arrays = case
    assert "shard(0) partial(sum) partial(sum)" in check_rule(op, *arrays, ranks=4)[0]


def test_every_op_has_a_rule() -> None:
    for name, kind in inspect.getmembers(ops, inspect.isclass):
        # A partitioned graph, which has these, is not partitioned again.
        if not issubclass(kind, ops.Collective):
            assert has_rule(kind.__new__(kind)), name


def placements(case: tuple[Any, ...], ranks: int) -> list[str]:
    """The placements of a node's first output."""
    op, *arrays = case
    return [str(choice.outputs[0]) for choice in rule(op, node_of(op, arrays), ranks)]


def test_filters_are_shared_out_and_channels_contracted() -> None:
    whole = ["shard(0)", "shard(1)", "partial(sum)", "partial(sum)", "partial(sum)"]
    assert placements(convolutions(1, 4, 6)[0], 2) == whole
    # By whole groups, of which two ranks have one each, as in AlexNet of 2012; not three ranks.
    assert placements(convolutions(2, 4, 6)[0], 2)[:2] == ["shard(0)", "shard(1)"]
    assert placements(convolutions(2, 4, 6)[0], 3)[:2] == ["shard(0)", "partial(sum)"]


def test_rows_are_normalised_by_whole_groups() -> None:
    norm, *_ = normalizations(2, (8, 3))
    assert placements(norm, 4) == ["shard(0)", "shard(1)"]
    assert placements(norm, 3) == ["shard(1)"]
    norm, *_ = normalizations(4, (12, 3))
    assert placements(norm, 3) == ["shard(0)", "shard(1)"]
    assert placements(norm, 2) == ["shard(1)"]
