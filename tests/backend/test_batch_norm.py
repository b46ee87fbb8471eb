"""Batch normalisation: kernels for GPUs, deterministic loops, and folding into weights."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem import layers
from tandem.backend import device_mode
from tandem.backend.dropout_loops import dropout
from tandem.backend.lowering import lower
from tandem.backend.norm_loops import batch_norm, batch_norm_gradient
from tandem.layers import Parameters
from tandem.ops import (
    BatchNorm,
    BatchNormBySums,
    BatchNormBySumsGrad,
    BatchNormGrad,
    BatchNormInference,
    ChannelGradientSums,
    ChannelSums,
    Conv2d,
    Dropout,
    DropoutMask,
)
from tests.support.check_function import PYTHON
from tests.support.norm_oracles import EPSILON, norm_arrays

CPU = torch.device("cpu")


def compute(op: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    node = op.make_node(*map(pt.as_tensor_variable, arrays))
    cells: list[list[Any]] = [[None] for _ in node.outputs]
    op.perform(node, arrays, cells)
    return [cell[0] for cell in cells]


def compute_as_for_gpus(op: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """By the calls that a GPU or ``torch.compile`` gets, which take tensors on any device."""
    node = op.make_node(*map(pt.as_tensor_variable, arrays))
    lowering = lower(op, node, device=CPU, compiled=True)
    return _arrays(lowering.call(*(torch.from_numpy(np.asarray(array)) for array in arrays)))


def compute_by_loops(op: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """By the calls that a CPU gets, of tensors with gaps in memory."""
    node = op.make_node(*map(pt.as_tensor_variable, arrays))
    lowering = lower(op, node, device=CPU, compiled=False)
    apart = [np.repeat(v, 2, axis=-1)[..., ::2] if v.ndim else v for v in map(np.asarray, arrays)]
    return _arrays(lowering.call(*map(torch.from_numpy, apart)))


def _arrays(found: Any) -> list[np.ndarray]:
    return [y.numpy() for y in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("shape", [(7, 3, 4, 2), (6, 3), (4, 2, 1, 1)])
@pytest.mark.parametrize("rows", [1, 2, 4, 32])
@pytest.mark.parametrize("computed", [compute_as_for_gpus, compute_by_loops])
def test_kernels_compute_what_the_op_does(
    shape: tuple[int, ...], rows: int, computed: Callable[..., list[np.ndarray]]
) -> None:
    x, scale, shift, g = norm_arrays(shape)
    for valid in (None, 0, 1, 2, len(x)):
        more = [] if valid is None else [np.array(valid)]
        if valid is not None:
            x[valid:] = g[valid:] = np.nan
        norm = BatchNorm(rows, EPSILON), x, scale, shift, *more
        expected = compute(*norm)
        gradient = BatchNormGrad(rows), x, scale, g, *expected[3:], *more
        for found, exact in (
            (computed(*norm), expected),
            (computed(*gradient), compute(*gradient)),
        ):
            for one, other in zip(found, exact, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
        x, _, _, g = norm_arrays(shape)


@pytest.mark.parametrize(
    ("computed", "valid"),
    [(compute_by_loops, []), (compute_by_loops, [0]), (compute_as_for_gpus, [0])],
)
def test_a_rank_may_have_no_rows(
    computed: Callable[..., list[np.ndarray]], valid: list[int]
) -> None:
    x, scale, shift, _ = (v[:0] if v.ndim == 4 else v for v in norm_arrays((4, 3, 2, 2)))
    more = map(np.array, valid)
    norm = BatchNorm(2), x, scale, shift, *more
    found = computed(*norm)
    assert [y.shape for y in found] == [(0, 3, 2, 2), (3,), (3,), (0, 3), (0, 3)]
    gradient = BatchNormGrad(2), x, scale, x, *found[3:], *map(np.array, valid)
    assert [y.tolist() for y in computed(*gradient)] == [[], [0] * 3, [0] * 3]


def test_the_number_of_valid_rows_stays_on_the_device() -> None:
    """A step that is captured reads it in each replay, and cannot wait for it."""
    x, scale, shift, _ = (torch.from_numpy(v) for v in norm_arrays((6, 3, 2, 2)))
    op = BatchNorm(2)
    node = op.make_node(*(v.numpy() for v in (x, scale, shift)), pt.lscalar())
    call = lower(op, node, device=CPU, compiled=True).call
    meta = [v.to("meta") for v in (x, scale, shift, torch.tensor(3))]  # has no values to read
    assert [y.shape for y in call(*meta)] == [(6, 3, 2, 2), (3,), (3,), (3, 3), (3, 3)]
    gradient = BatchNormGrad(2)
    node = gradient.make_node(
        *(v.numpy() for v in (x, scale, x)), *[np.ones((3, 3))] * 2, pt.lscalar()
    )
    call = lower(gradient, node, device=CPU, compiled=True).call
    found = call(meta[0], meta[1], meta[0], *[torch.ones(3, 3, device="meta")] * 2, meta[3])
    assert [y.shape for y in found] == [(6, 3, 2, 2), (3,), (3,)]


@pytest.mark.parametrize("shape", [(40, 3, 4, 5), (9, 3)])
@pytest.mark.parametrize("computed", [compute_as_for_gpus, compute_by_loops])
def test_kernels_of_all_rows_compute_what_the_ops_do(
    shape: tuple[int, ...], computed: Callable[..., list[np.ndarray]]
) -> None:
    x, scale, shift, g = norm_arrays(shape)
    count, sums = np.array(float(2 * len(x))), np.stack([scale, 9 + shift**2])
    for valid in (None, 0, 1, 5, len(x)):
        more = [] if valid is None else [np.array(valid)]
        if valid is not None:
            x[valid:] = g[valid:] = np.nan
        for operands in (
            (ChannelSums(), x, shift, *more),
            (BatchNormBySums(EPSILON), x, scale, shift, shift, sums, count, *more),
            (ChannelGradientSums(), x, g, shift, scale, *more),
            (BatchNormBySumsGrad(), x, g, scale, shift, scale, sums, count, *more),
        ):
            for one, other in zip(computed(*operands), compute(*operands), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_dropout_for_gpus_keeps_the_same_units() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 3, 7)).astype(np.float32)
    operands = Dropout(0.3, 2, 1.5), x, np.array(2**62 + 5), np.array(3), np.array([0, 7, 2**31])
    np.testing.assert_array_equal(compute_as_for_gpus(*operands)[0], compute(*operands)[0])


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("computed", [compute_as_for_gpus, compute_by_loops])
def test_a_part_of_a_layer_keeps_the_units_of_the_whole(
    first: int, computed: Callable[..., list[np.ndarray]]
) -> None:
    keys = np.array(2**62 + 5), np.array(3), np.array([0, 7, 2**31])
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    (whole,) = compute(Dropout(0.3, 2, 1.5), x, *keys)
    for units in (0, 1, 2, 5, 7):
        part = slice(first, first + units)
        (found,) = computed(Dropout(0.3, 2, 1.5, first), x[:, part], *keys)
        np.testing.assert_array_equal(found, whole[:, part])
        (found,) = computed(DropoutMask(0.3, 2, units, "float32", first), *keys)
        np.testing.assert_array_equal(found, (whole != 0)[:, part])


# Loops


@pytest.mark.parametrize("offset", [0, 1e3])
def test_float32_loops_round_little(offset: float) -> None:
    """Also where the mean is large, which sums of squares would not survive."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(32, 7, 28, 28)) + offset).astype(np.float32)
    scale, shift = np.ones(7, np.float32), np.zeros(7, np.float32)
    exact = compute(BatchNorm(16), x.astype(float), scale.astype(float), shift.astype(float))
    found = batch_norm(*map(torch.from_numpy, (x, scale, shift)), None, 16, 1e-5)
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[2], exact[2], rtol=1e-5)
    np.testing.assert_allclose(found[0], exact[0], atol=1e-5 + 1e-7 * offset)


def results() -> list[bytes]:
    values = (torch.from_numpy(v.astype(np.float32)) for v in norm_arrays((12, 70, 19, 17)))
    x, scale, shift, g = values
    found = []
    for valid in (None, torch.tensor(7)):
        y, mean, variance, *saved = batch_norm(x, scale, shift, valid, 4, 1e-5)
        gradients = batch_norm_gradient(x, scale, None, g, saved[0], saved[1], valid, 4)
        rectified = batch_norm(x, scale, shift, valid, 4, 1e-5, True, g)[0]
        gated = batch_norm_gradient(x, scale, shift, g, saved[0], saved[1], valid, 4)
        found += [y, mean, variance, *saved, *gradients, rectified, *gated]
    keys = torch.tensor(5), torch.tensor(2), torch.arange(12)
    found.append(dropout(x, keys, 256, 2**31, 2.0))
    return [tensor.numpy().tobytes() for tensor in found]


_BITS = """
import torch
from tests.backend.test_batch_norm import results
found = []
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    found += [results(), results()]
assert all(one == found[0] for one in found)
"""


@pytest.mark.slow
def test_neither_threads_nor_runs_change_a_bit() -> None:
    env = os.environ | {"NUMBA_NUM_THREADS": "3"}
    result = subprocess.run([sys.executable, "-c", _BITS], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr


def test_loops_refuse_what_does_not_fit() -> None:
    """A loop checks no bounds."""
    x, scale, shift, g = (torch.from_numpy(v) for v in norm_arrays((4, 3, 2, 2)))
    with pytest.raises(ValueError, match=r"scale has 2 numbers, expected 3"):
        batch_norm(x, scale[:2], shift, None, 2, 1e-5)
    saved = batch_norm(x, scale, shift, None, 2, 1e-5)[3:]
    with pytest.raises(ValueError, match=r"g has shape \(4, 3, 2, 1\), expected \(4, 3, 2, 2\)"):
        batch_norm_gradient(x, scale, None, g[..., :1], saved[0], saved[1], None, 2)
    with pytest.raises(ValueError, match=r"means has shape \(1, 3\), expected \(2, 3\)"):
        batch_norm_gradient(x, scale, None, g, saved[0][:1], saved[1], None, 2)
    with pytest.raises(ValueError, match=r"other has shape \(3, 3, 2, 2\), expected \(4, 3, 2"):
        batch_norm(x, scale, shift, None, 2, 1e-5, True, g[:3])
    with pytest.raises(ValueError, match="x has 4 rows, indices has 2"):
        dropout(x, (torch.tensor(1), torch.tensor(1), torch.arange(2)), 256, 1, 1.0)


# Folding


def parameters() -> Parameters:
    declared = Parameters(
        "float64",
        [
            layers.weight("conv", (6, 3, 3, 3), 0.1),
            layers.bias("conv", 6),
            layers.weight("dense", (8, 6), 0.1),
            layers.bias("dense", 6),
            *layers.norm("bn", 6),
        ],
    )
    rng = np.random.default_rng(0)
    for value in declared.values():
        value.set_value(rng.uniform(0.5, 1.5, value.get_value().shape))
    return declared


def compiled(inputs: list[Any], outputs: Any) -> tuple[Any, list[type]]:
    function = pytensor.function(inputs, outputs, mode=device_mode(strict=True))
    return function, [type(node.op) for node in function.maker.fgraph.apply_nodes]


@pytest.mark.parametrize("kind", ["convolution", "no bias", "dense", "product"])
def test_validation_has_no_normalisation_left(kind: str) -> None:
    p = parameters()
    x = pt.dmatrix("x") if kind in ("dense", "product") else pt.dtensor4("x")
    y = {
        "convolution": lambda: layers.convolution(x, p["conv.weight"], p["conv.bias"], 2, 1),
        "no bias": lambda: layers.convolution(x, p["conv.weight"], pad=1),
        "dense": lambda: layers.fully_connected(x, *p.of("dense")),
        "product": lambda: pt.dot(x, p["dense.weight"]),
    }[kind]()
    y = layers.relu(layers.batch_norm(y, p, "bn", None))
    function, found = compiled([x], y)
    assert BatchNormInference not in found
    value = np.random.default_rng(1).normal(size=(4, 8) if x.type.ndim == 2 else (4, 3, 7, 7))
    expected = pytensor.function([x], y, mode=PYTHON)(value)
    np.testing.assert_allclose(function(value), expected, rtol=1e-10, atol=1e-12)


def test_weights_that_change_are_folded_anew() -> None:
    p, x = parameters(), pt.dtensor4("x")
    y = layers.batch_norm(layers.convolution(x, p["conv.weight"]), p, "bn", None)
    function, _ = compiled([x], y)
    value = np.random.default_rng(1).normal(size=(2, 3, 5, 5))
    before = function(value)
    p["bn.weight"].set_value(2 * p["bn.weight"].get_value())
    shift = p["bn.bias"].get_value()[:, None, None]
    np.testing.assert_allclose(function(value), 2 * (before - shift) + shift, rtol=1e-10)


@pytest.mark.parametrize("kind", ["convolution", "dense", "product"])
def test_an_output_that_is_read_elsewhere_keeps_its_weights(kind: str) -> None:
    p = parameters()
    x = pt.dtensor4("x") if kind == "convolution" else pt.dmatrix("x")
    if kind == "convolution":
        read = before = layers.convolution(x, p["conv.weight"], p["conv.bias"])
    else:
        read = pt.dot(x, p["dense.weight"])
        before = read + p["dense.bias"]
        read = before if kind == "dense" else read
    y = layers.batch_norm(before, p, "bn", None)
    function, found = compiled([x], [y, pt.exp(read)])
    assert BatchNormInference in found
    value = np.random.default_rng(1).normal(size=(4, 8) if x.type.ndim == 2 else (4, 3, 7, 7))
    expected = pytensor.function([x], [y, pt.exp(read)], mode=PYTHON)(value)
    for one, other in zip(function(value), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


def test_a_frozen_layer_is_folded_in_training_too() -> None:
    p, x = parameters(), pt.dtensor4("x")
    w = pt.dtensor4("w")
    y = layers.convolution(x, w, stride=2, pad=1)
    y = layers.relu(layers.batch_norm(y, p, "bn", None))
    function, found = compiled([x, w], pytensor.grad((y**2).sum(), w))
    assert BatchNormInference not in found
    assert found.count(Conv2d) == 1
    values = np.random.default_rng(1).normal(size=(4, 3, 7, 7)), p["conv.weight"].get_value()
    expected = pytensor.function([x, w], pytensor.grad((y**2).sum(), w), mode=PYTHON)(*values)
    np.testing.assert_allclose(function(*values), expected, rtol=1e-9, atol=1e-10)
