"""Functions of several ranks that meet by a channel: in threads, in processes, and as ranks."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.distributed import LocalGroup, PeerLost, local_groups, make_channel
from tandem.distributed.channel import CheckedChannel, GroupChannel, HostChannel, OutOfStep
from tandem.distributed.group import Group
from tandem.ops.collective import AllGather, AllReduce, Broadcast, Collective
from tests.support.collectives import SHAPES, check_channel, compiled
from tests.support.threads import run_threads

KINDS = (HostChannel, GroupChannel)
LABEL = ("AllGather", 7, (4, 3), "float32")


def on_ranks(kind: Callable[[Any], Any], ranks: int, work: Callable[[Any], Any]) -> None:
    """Do the work of each rank in a thread of its own."""
    channels = [kind(group) for group in local_groups(ranks)]
    run_threads([lambda channel=channel: work(channel) for channel in channels])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_conversion_is_what_it_combines_to(kind: type[CheckedChannel], ranks: int) -> None:
    def work(channel: CheckedChannel) -> None:
        for shape in SHAPES:
            check_channel(channel, shape)

    on_ranks(kind, ranks, work)


@pytest.mark.parametrize("dtype", ["float64", "int64", "int8", "bool", "uint8"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_types_pass_too(kind: type[CheckedChannel], dtype: str) -> None:
    on_ranks(kind, 3, lambda channel: check_channel(channel, (5, 3), dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_pass_too(kind: type[CheckedChannel]) -> None:
    """Tensors without axes, which have no placeholder of their own."""

    def work(channel: CheckedChannel) -> None:
        rank = channel.rank
        ops: list[Collective] = [
            AllReduce(0, 3, rank, (), "sum"),
            Broadcast(1, 3, rank, (), 1),
        ]
        function = compiled(ops, "float64", channel)
        assert [float(value) for value in function(rank + 1.0, rank + 1.0)] == [6.0, 2.0, 0.0]
        assert channel.received == sum(op.received("float64") for op in ops)

    on_ranks(kind, 3, work)


# Steps and regions


class Slow(HostChannel):
    """The last rank waits before it reads: a region that is written too early would show."""

    def _read(self, *arguments: Any) -> torch.Tensor:
        if self.rank == self.size - 1:
            time.sleep(0.002)
        return super()._read(*arguments)


def spoiled(channel: CheckedChannel) -> int:
    """How many blocks are not as sent, of many calls of both kinds, with other lengths each."""
    size, count = channel.size, 0
    for turn in range(60):
        lengths = [(7 * turn + 3 * rank) % 50 * (1 + turn // 10) for rank in range(size)]
        label = ("AllGather", turn, (sum(lengths),), "float32")
        own = torch.full((lengths[channel.rank],), 100.0 * turn + channel.rank)
        found = channel.all_gather(label, own, [(length,) for length in lengths])
        for rank, block in enumerate(found):
            assert block.shape == (lengths[rank],)
            count += not bool((block == 100 * turn + rank).all())
        table = [[(turn * 5 + i + 2 * j) % 9 * 100 for j in range(size)] for i in range(size)]
        blocks = [
            torch.full((2, table[channel.rank][to]), 10 * channel.rank + to + turn)
            for to in range(size)
        ]
        shapes = [(2, table[rank][channel.rank]) for rank in range(size)]
        found = channel.all_to_all(label, blocks, shapes)
        for rank, block in enumerate(found):
            assert block.shape == shapes[rank]
            count += not bool((block == 10 * rank + channel.rank + turn).all())
    return count


@pytest.mark.parametrize("kind", [Slow, GroupChannel])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_reader_sees_what_was_meant_for_it(kind: type[CheckedChannel], ranks: int) -> None:
    found: list[int] = []
    on_ranks(kind, ranks, lambda channel: found.append(spoiled(channel)))
    assert found == [0] * ranks


def test_one_region_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HostChannel._publish

    def publish(self: HostChannel, *arguments: Any) -> Any:
        calls, self.calls = self.calls, 0
        try:
            return original(self, *arguments)
        finally:
            self.calls = calls + 1

    monkeypatch.setattr(HostChannel, "_publish", publish)
    found: list[int] = []
    on_ranks(Slow, 2, lambda channel: found.append(spoiled(channel)))
    assert any(found)


def test_a_region_grows_only_when_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = LocalGroup.shared_memory

    def shared_memory(self: LocalGroup, nbytes: int) -> list[np.ndarray]:
        made.append(nbytes)
        return original(self, nbytes)

    def work(channel: CheckedChannel) -> None:
        for length in (10, 20, 10, 40, 40, 1, 0, 30):  # of 4 bytes, in blocks of 64
            channel.all_gather(LABEL, torch.zeros(length), [(length,)] * 2)

    monkeypatch.setattr(LocalGroup, "shared_memory", shared_memory)
    on_ranks(HostChannel, 2, work)
    # By both ranks: each region for the first call on it, and for the first one of 40.
    assert sorted(made) == [64, 64, 128, 128, 192, 192, 192, 192]


def raised_at(channels: Sequence[CheckedChannel], calls: Sequence[Callable[[Any], Any]]) -> list:
    errors: list[Any] = [None] * len(channels)

    def work(rank: int) -> None:
        try:
            calls[rank](channels[rank])
        except Exception as error:
            errors[rank] = error

    run_threads([lambda rank=rank: work(rank) for rank in range(len(channels))])
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_at_different_conversions_are_told_so(kind: type[CheckedChannel]) -> None:
    channels = [kind(group) for group in local_groups(3)]
    other = ("AllReduce", 9, (2, 3), "int64")

    def gather(channel: CheckedChannel) -> None:
        channel.all_gather(LABEL, torch.zeros(1000), [(1000,)] * 3)

    def swap(channel: CheckedChannel) -> None:
        channel.all_to_all(other, [torch.zeros(2)] * 3, [(2,)] * 3)

    errors = raised_at(channels, [gather, swap, gather])
    assert {type(error) for error in errors} == {OutOfStep}
    assert {str(error) for error in errors} == {
        "the ranks have come to different conversions: "
        "rank 0: call 0, AllGather 7 of float32 (4, 3); "
        "rank 1: call 0, AllReduce 9 of int64 (2, 3); "
        "rank 2: call 0, AllGather 7 of float32 (4, 3)"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_at_different_steps_are_told_so(kind: type[CheckedChannel]) -> None:
    """In functions: the same conversion, one call later."""
    channels = [kind(group) for group in local_groups(2)]
    channels[1].calls = 1

    def work(channel: CheckedChannel) -> None:
        function = compiled([AllGather(3, 2, channel.rank, (4,), 0)], "float32", channel)
        function(np.zeros(2, np.float32))

    errors = raised_at(channels, [work, work])
    assert {type(error) for error in errors} == {OutOfStep}
    for error in errors:
        assert "rank 0: call 0, AllGather 3 of float32 (4,)" in str(error)
        assert "rank 1: call 1, AllGather 3 of float32 (4,)" in str(error)


# Processes


class Mortal(HostChannel):
    """The process is killed when it comes to its eleventh call."""

    def _pass(self, message: Any) -> Any:
        if self.calls == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._pass(message)


def function_of(channel: CheckedChannel) -> Any:
    rank, size = channel.rank, channel.size
    ops = [AllReduce(0, size, rank, (1000,), "sum"), AllGather(1, size, rank, (3 * size, 7), 0)]
    return compiled(ops, "float32", channel)


def run_until_killed(group: LocalGroup) -> None:
    function = function_of(channel := Mortal(group))
    while True:
        function(np.full(1000, channel.rank + 1, np.float32), np.ones((3, 7), np.float32))


def test_a_killed_peer_ends_the_function_of_the_others() -> None:
    context: Any = multiprocessing.get_context("spawn")
    mine, other = local_groups(2)
    process = context.Process(target=run_until_killed, args=(other,), daemon=True)
    process.start()
    other.close()
    channel = HostChannel(mine)
    function = function_of(channel)
    arguments = np.ones(1000, np.float32), np.zeros((3, 7), np.float32)
    for _ in range(3):  # of three calls each; it ends at the second of the fourth
        total, whole, _ = function(*arguments)
        assert set(total.tolist()) == {3.0}
        np.testing.assert_array_equal(whole, np.repeat([0, 1], 3)[:, None] * np.ones((1, 7)))
    with pytest.raises(PeerLost, match="trainer 1 ended while trainer 0 waited for it") as caught:
        function(*arguments)
    assert "AllReduce" in "".join(caught.value.__notes__)
    assert channel.received == 3 * sum(n.op.received("float32") for n in nodes_of(function)) + 2000
    process.join()


def nodes_of(function: Any) -> list[Any]:
    return [n for n in function.maker.fgraph.toposort() if isinstance(n.op, Collective)]


# Which channel


def test_trainers_of_one_launcher_share_memory() -> None:
    def work(group: Group) -> None:
        channel = make_channel(SimpleNamespace(), group)  # type: ignore[arg-type]
        assert type(channel) is HostChannel
        check_channel(channel, (5, 3))
        group.barrier()  # it has a group of its own
        channel.close()

    run_threads([lambda group=group: work(group) for group in local_groups(2)])


def test_ranks_send_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalGroup, "starter", "mpirun")

    def work(group: Group) -> None:
        channel = make_channel(SimpleNamespace(), group)  # type: ignore[arg-type]
        assert type(channel) is GroupChannel
        check_channel(channel, (5, 3))
        channel.close()

    run_threads([lambda group=group: work(group) for group in local_groups(2)])
