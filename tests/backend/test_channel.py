"""A device mode's channel: which functions need one, and how they run by it."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import Channel, capture, check_capturable, device_mode, device_shared
from tandem.backend.channel import Label
from tandem.backend.lowering.collective import _reduced
from tandem.distributed import PeerLost, local_groups
from tandem.distributed.channel import HostChannel
from tandem.ops.collective import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Scatter,
    Slice,
    Vary,
    first_token,
)
from tests.support.collectives import check_channel, compiled
from tests.support.threads import run_threads


class Log:
    """A channel of rank 0 of 2, whose other rank sends what this one does; it notes its labels."""

    rank, size, received = 0, 2, 0

    def __init__(self) -> None:
        self.labels: list[Label] = []

    def all_gather(self, label: Label, block: torch.Tensor, shapes: Any) -> list[torch.Tensor]:
        self.labels.append(label)
        return [block, torch.ones(shapes[1], dtype=block.dtype)]

    def all_to_all(self, label: Label, blocks: Any, shapes: Any) -> list[torch.Tensor]:
        self.labels.append(label)
        return [blocks[0], torch.ones(shapes[1], dtype=blocks[0].dtype)]


def test_channels_are_what_the_mode_takes() -> None:
    channels: list[Channel] = [HostChannel(local_groups(1)[0]), Log()]
    assert [channel.size for channel in channels] == [1, 2]


@pytest.mark.parametrize("strict", [False, True])
def test_a_function_without_a_channel_is_refused(strict: bool) -> None:
    op = AllGather(5, 2, 0, (4, 3), 0)
    message = r"AllGather 5 of a tensor of shape \(4, 3\) needs the other ranks: .*channel="
    with pytest.raises(NotImplementedError, match=message):
        compiled([op], "float32", None, strict=strict)


def test_a_channel_of_other_ranks_is_refused() -> None:
    op = AllGather(5, 2, 1, (4, 3), 0)
    with pytest.raises(ValueError, match="is for rank 1 of 2, and the mode's channel is of rank 0"):
        compiled([op], "float32", Log())


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_unsigned_integers_are_reduced(dtype: str, op: str) -> None:
    large = np.iinfo(dtype).max
    blocks = [
        np.array(row, dtype) for row in ([large, 1, 0], [2, large - 1, 0], [3, 4, large // 2])
    ]
    expected = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op].reduce(blocks, dtype=dtype)
    found = _reduced([torch.from_numpy(block) for block in blocks], op)
    np.testing.assert_array_equal(found.numpy(), expected, strict=True)


def test_what_sends_nothing_needs_no_channel() -> None:
    function = compiled(
        [Vary(0, 3, 1, (5, 2)), Slice(1, 3, 1, (5, 2), 0)], "float32", None, strict=True
    )
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    varied, part, _ = function(x, x)
    np.testing.assert_array_equal(varied, x)
    np.testing.assert_array_equal(part, x[1:3])


def test_calls_are_labelled_and_in_the_order_of_their_tokens() -> None:
    x = pt.matrix("x", shape=(2, 3), dtype="float32")
    y, token = AllGather(4, 2, 0, (4, 3), 0)(x, first_token())
    z, token = AllReduce(9, 2, 0, (2, 3), "sum")(x * 2, token)
    w, token = AllGather(1, 2, 0, (4, 3), 0)(x + 1, token)
    channel = Log()
    # What is used says nothing about the order.
    function = pytensor.function([x], [w + y, z.sum(), token], mode=device_mode(channel=channel))
    function(np.zeros((2, 3), np.float32))
    rest = ("float32",)
    assert channel.labels == [
        ("AllGather", 4, (4, 3), *rest),
        ("AllReduce", 9, (2, 3), *rest),  # reduced
        ("AllReduce", 9, (2, 3), *rest),  # and gathered
        ("AllGather", 1, (4, 3), *rest),
    ]


def test_the_last_token_alone_makes_a_rank_come() -> None:
    x = pt.matrix("x", shape=(2, 3), dtype="float32")
    _, token = AllGather(4, 2, 0, (4, 3), 0)(x, first_token())
    channel, met = Log(), device_shared(np.zeros((), np.float32), "met")
    function = pytensor.function([x], [], updates={met: token}, mode=device_mode(channel=channel))
    function(np.zeros((2, 3), np.float32))
    assert len(channel.labels) == 1


def test_another_shape_than_the_static_one_is_named() -> None:
    x = pt.matrix("x", dtype="float32")
    y, _ = AllGather(4, 2, 0, (4, 3), 0)(x, first_token())
    function = pytensor.function([x], y, mode=device_mode(channel=Log()))
    with pytest.raises(ValueError, match=r"takes \(2, 3\) at rank 0, got \(3, 3\)"):
        function(np.zeros((3, 3), np.float32))


def test_results_of_a_root_are_its_own_memory() -> None:
    """A broadcast gives the root what it has: the caller's array is not what it gets back."""
    ops: list[Collective] = [Broadcast(0, 2, 0, (3,), 0), Scatter(1, 2, 0, (4,), 0, 0)]
    x, y = np.arange(3, dtype=np.float32), np.arange(4, dtype=np.float32)
    whole, part, _ = compiled(ops, "float32", Log())(x, y)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(part, y[:2])
    assert not np.may_share_memory(whole, x)
    assert not np.may_share_memory(part, y)


def test_a_rank_may_update_what_it_broadcasts() -> None:
    w = device_shared(np.ones(3, np.float32), "w")
    y, _ = Broadcast(0, 2, 0, (3,), 0)(w, first_token())
    function = pytensor.function([], y * 1, updates={w: y + w}, mode=device_mode(channel=Log()))
    for power in range(3):
        assert set(function().tolist()) == {2.0**power}
    assert set(w.get_value().tolist()) == {8.0}


@pytest.mark.parametrize("compile", [False, True])
def test_a_function_that_meets_others_is_not_recorded(compile: bool) -> None:
    w = device_shared(np.ones(4, np.float32), "w")
    total, _ = AllReduce(0, 2, 0, (4,), "sum")(w, first_token())
    mode = device_mode(channel=Log(), compile=compile)
    function = pytensor.function([], [], updates={w: total}, mode=mode, name="step")
    assert function.vm.program.breaks
    for refuse in (check_capturable, lambda function: capture([function])):
        with pytest.raises(ValueError, match="step can't be recorded: it computes on the host"):
            refuse(function)


def test_segments_meet_too() -> None:
    """With reports in the middle, the function is cut: all conversions are in its first part."""
    w, v = (device_shared(np.ones(4, np.float32), name) for name in "wv")
    whole, token = AllGather(1, 2, 0, (8,), 0)(w * v, first_token())
    other, _ = Broadcast(2, 2, 0, (4,), 1)(np.zeros((0,), np.float32), token)
    ready: list[str] = []
    mode = device_mode(channel=Log(), on_gradient_ready=ready.append)
    pytensor.function([], [], updates={w: w + whole[:4], v: v - 3 * other}, mode=mode)()
    assert sorted(ready) == ["v", "w"]
    assert set(w.get_value().tolist()) == {2.0}
    assert set(v.get_value().tolist()) == {-2.0}


@pytest.mark.slow
def test_compiled_functions_meet() -> None:
    x = pt.matrix("x", shape=(2, 3), dtype="float32")
    y, _ = AllReduce(9, 2, 0, (2, 3), "sum")(pt.tanh(x), first_token())
    channel = Log()
    function = pytensor.function([x], [y * 2], mode=device_mode(channel=channel, compile=True))
    assert function.vm.program.breaks
    for turn in range(2):
        value = np.full((2, 3), turn, np.float32)
        (found,) = function(value)
        # The other rank's term of the first half, and its sum of the second, are ones.
        np.testing.assert_allclose(found[0], 2 * (np.tanh(value[0]) + 1), rtol=1e-6)
        np.testing.assert_allclose(found[1], 2)
    assert len(channel.labels) == 4


class Lost(Log):
    """The other rank is gone when this one comes."""

    def all_to_all(self, label: Label, blocks: Any, shapes: Any) -> list[torch.Tensor]:
        raise PeerLost("trainer 1 ended while trainer 0 waited for it")


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_end_of_a_peer_keeps_its_type(compile: bool) -> None:
    x = pt.vector("x", shape=(3,), dtype="float32")
    y, _ = AllReduce(9, 2, 0, (3,), "sum")(pt.tanh(x), first_token())
    function = pytensor.function([x], y * 2, mode=device_mode(channel=Lost(), compile=compile))
    with pytest.raises(PeerLost, match="trainer 1 ended") as caught:
        function(np.zeros(3, np.float32))
    assert "AllReduce" in "".join(caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_functions_of_ranks_meet(ranks: int) -> None:
    channels = [HostChannel(group) for group in local_groups(ranks)]
    calls = [lambda c=channel: check_channel(c, (5, 3), compile=True) for channel in channels]
    run_threads(calls, seconds=250)
