"""Communicating Ops of all kinds, with what each rank gives, and what they mean in NumPy."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.backend import device_mode
from tandem.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    Slice,
    Vary,
    first_token,
)

Make = Callable[[int], Collective]
"""From a rank to its Op."""

_compiling = threading.Lock()

SHAPES = ((5, 3), (8, 4), (1, 7), (2, 3, 7), (0, 4))  # uneven, even, and with empty parts


def kinds(ranks: int, shape: tuple[int, ...], dtype: str = "float32") -> Iterator[Make]:
    """Each kind of Op for a tensor, along each axis."""
    number, root = len(shape), ranks - 1
    reductions = ("max", "min") if dtype == "bool" else ("sum", "max", "min")
    for op in reductions:
        yield lambda rank, op=op: AllReduce(number, ranks, rank, shape, op)
        yield lambda rank, op=op: Reduce(number, ranks, rank, shape, op, root)
    yield lambda rank: Broadcast(number, ranks, rank, shape, root)
    if dtype.startswith("float"):  # a Vary is for a gradient
        yield lambda rank: Vary(number, ranks, rank, shape)
    for axis in range(len(shape)):
        other = (axis + 1) % len(shape)
        yield lambda rank, axis=axis: AllGather(number, ranks, rank, shape, axis)
        yield lambda rank, axis=axis: Scatter(number, ranks, rank, shape, axis, root)
        yield lambda rank, axis=axis: Gather(number, ranks, rank, shape, axis, root)
        yield lambda rank, axis=axis: Slice(number, ranks, rank, shape, axis)
        for op in reductions[:2]:
            yield lambda rank, axis=axis, op=op: ReduceScatter(number, ranks, rank, shape, axis, op)
        if other != axis:
            yield lambda rank, axis=axis, other=other: AllToAll(
                number, ranks, rank, shape, axis, other
            )


def parts_for(make: Make, ranks: int, dtype: str = "float32", turn: int = 0) -> list[np.ndarray]:
    """What each rank gives to an Op, the same wherever it is made."""
    rng = np.random.default_rng([ranks, turn])
    shapes = [make(rank).input_shape for rank in range(ranks)]
    if isinstance(make(0), Slice | Vary):  # all ranks have the same
        return [rng.normal(size=shapes[0]).astype(dtype)] * ranks
    return [(8 * rng.normal(size=shape)).astype(dtype) for shape in shapes]


def cut(whole: np.ndarray, axis: int, ranks: int) -> list[np.ndarray]:
    """The parts of an array, by rank."""
    ends = [whole.shape[axis] * rank // ranks for rank in range(ranks + 1)]
    return [np.take(whole, range(a, b), axis) for a, b in itertools.pairwise(ends)]


def combined(op: Any, parts: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank gets: the meaning of an Op, in NumPy."""
    ranks, kind = len(parts), type(op).__name__
    if kind == "Vary":
        return parts
    if kind in ("AllGather", "Gather"):
        whole = np.concatenate(parts, op.axis)
    elif kind == "AllToAll":
        return cut(np.concatenate(parts, op.source), op.target, ranks)
    elif kind in ("AllReduce", "ReduceScatter", "Reduce"):
        whole = parts[0].copy()
        for part in parts[1:]:
            ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op.op]
            whole = ufunc(whole, part)
    else:
        whole = parts[getattr(op, "root", 0)]
    if kind in ("ReduceScatter", "Scatter", "Slice"):
        return cut(whole, op.axis, ranks)
    empty = np.zeros((0,) * whole.ndim, whole.dtype)
    at_one = kind in ("Gather", "Reduce")
    return [empty if at_one and rank != op.root else whole for rank in range(ranks)]


def chain(ops: list[Collective], dtype: str) -> tuple[list[Any], list[Any]]:
    """Return inputs, and the results of Ops that run one after another, with the last token."""
    inputs, outputs, token = [], [], first_token()
    for op in ops:
        x = pt.tensor(dtype=dtype, shape=op.input_shape)
        y, token = op(x, token)
        inputs.append(x)
        outputs.append(y)
    return inputs, [*outputs, token]


def compiled(ops: list[Collective], dtype: str, channel: Any, **mode: Any) -> Any:
    """Return the function of a rank's Ops."""
    with _compiling:  # PyTensor compiles in one thread at a time
        inputs, outputs = chain(ops, dtype)
        return pytensor.function(inputs, outputs, mode=device_mode("cpu", channel=channel, **mode))


def check_channel(
    channel: Any, shape: tuple[int, ...], dtype: str = "float32", **mode: Any
) -> None:
    """Every kind of Op at one rank, twice: results have NumPy's bits, bytes are as predicted."""
    makes = list(kinds(channel.size, shape, dtype))
    ops = [make(channel.rank) for make in makes]
    function = compiled(ops, dtype, channel, **mode)
    for turn in range(2):
        every = [parts_for(make, channel.size, dtype, turn) for make in makes]
        before = channel.received
        *found, token = function(*(parts[channel.rank] for parts in every))
        for op, parts, result in zip(ops, every, found, strict=True):
            expected = combined(op, parts)[channel.rank]
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(result, expected, err_msg=str(op))
        assert token == 0
        assert channel.received - before == sum(op.received(dtype) for op in ops)
