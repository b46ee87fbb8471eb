"""Batch normalisation over all rows of a minibatch, of which ranks have some each."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode

from tandem.ops import global_batch_norm
from tandem.placement import Partial, Replicate, Shard, partition, simulate
from tests.support.norm_oracles import (
    EPSILON,
    batch_norm_by_loops,
    gradients_by_loops,
    norm_arrays,
)

MODE = Mode("py", None)


def graph(shape, has_valid):
    """Inputs and outputs of two passes, and their placements."""
    images = {name: pt.tensor(name, shape=shape) for name in ("x", "g")}
    vectors = {name: pt.tensor(name, shape=shape[1:2]) for name in ("scale", "shift", "pivot")}
    last = {"valid": pt.tensor("valid", dtype="int64", shape=())} if has_valid else {}
    x, g = images.values()
    y, mean, variance = global_batch_norm(x, *vectors.values(), last.get("valid"), EPSILON)
    gradients = pytensor.grad((g * y).sum(), [x, vectors["scale"], vectors["shift"]])
    outputs = dict(
        zip(
            ("y", "mean", "variance", "dx", "dscale", "dshift"),
            (y, mean, variance, *gradients),
            strict=True,
        )
    )
    given = dict.fromkeys(images.values(), Shard(0))
    wanted = {v: Shard(0) if n in ("y", "dx") else Partial() for n, v in outputs.items()}
    return images | vectors | last, outputs, given, wanted


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("valid", [None, 0, 5])
@pytest.mark.parametrize("shape", [(7, 3, 2, 2), (7, 4)])
def test_ranks_with_some_rows_each_compute_what_one_does(shape, valid, ranks):
    inputs, outputs, given, wanted = graph(shape, valid is not None)
    x, scale, shift, g = norm_arrays(shape)
    arrays = {"x": x, "g": g, "scale": scale, "shift": shift, "pivot": shift + 1}
    values = {v: arrays.get(n, np.int64(valid or 0)) for n, v in inputs.items()}
    found = simulate([*outputs.values()], given, wanted, ranks, values, strict=True, mode=MODE)
    count = len(x) if valid is None else valid
    expected = [
        *batch_norm_by_loops(x, scale, shift, len(x), count),
        *gradients_by_loops(x, scale, g, len(x), count),
    ]
    for variable, whole, *parts in zip(outputs.values(), expected, *found, strict=True):
        is_rows = wanted[variable] == Shard(0)
        united = np.concatenate(parts) if is_rows else sum(parts)
        np.testing.assert_allclose(united, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("united", [False, True])
def test_ranks_add_up_two_numbers_of_each_channel_in_each_pass(united):
    _, outputs, given, wanted = graph((8, 3, 2, 2), True)
    if united:
        wanted = {v: Replicate() if p == Partial() else p for v, p in wanted.items()}
    part = partition([*outputs.values()], given=given, wanted=wanted, ranks=4, rank=1, strict=True)
    found = [(c.kind, c.shape, c.dtype) for c in part.conversions]
    assert found == [("all-reduce", (2, 3), "float64")] * 2
