"""The trainers of one launcher as a group: what they pass each other, and how it ends."""

import itertools
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from tandem.distributed import LocalGroup, PeerLost, local_groups
from tandem.memory import HostBuffer
from tests.support.fake_cuda import FakeDriver, FakeMachine
from tests.support.threads import run_threads


def attend_once(group: LocalGroup) -> None:
    group.barrier()
    signal.pause()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_trainer_is_noticed_at_once(victim: int) -> None:
    context = multiprocessing.get_context("spawn")
    groups = local_groups(3)
    mine = groups[1 if victim == 0 else 0]
    others = [group for group in groups if group is not mine]
    processes = {g.rank: context.Process(target=attend_once, args=(g,)) for g in others}
    for process in processes.values():
        process.start()
    for group in others:
        group.close()
    mine.barrier()
    pid = processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=f"trainer {victim} ended"):
        mine.barrier()
    for process in processes.values():
        process.kill()
        process.join()


def extents(lengths: list[int]) -> list[slice]:
    """The parts of a vector that have these lengths."""
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def check_operations(group: LocalGroup) -> None:
    """Messages, vectors and shared memory of a group, expectations computed from the rank."""
    rank, size = group.rank, group.size
    for turn in range(3):
        messages = group.all_gather_object(f"{rank} in turn {turn}")
        assert messages == tuple(f"{other} in turn {turn}" for other in range(size))
    parts = [slice(10 * r, 10 * r + 10) for r in range(size)]
    for dtype in (np.float32, np.float64, np.uint16):
        vector = np.arange(10 * size, dtype=dtype) + rank
        group.all_reduce(vector)
        assert (vector == size * np.arange(10 * size) + size * (size - 1) // 2).all()
        vector, received = np.full(10 * size, rank, dtype), np.zeros((size, 10), dtype)
        group.all_to_all(vector, received, parts)
        assert [set(row.tolist()) for row in received] == [{r} for r in range(size)]
        group.all_gather(vector, parts)
        assert (vector == np.repeat(np.arange(size), 10)).all()
    # Rank i sends i + j numbers to rank j, and none to itself.
    table = [[0 if i == j else i + j for j in range(size)] for i in range(size)]
    values = [[np.full(table[i][j], 10 * i + j) for j in range(size)] for i in range(size)]
    sent, wanted = np.concatenate(values[rank]), np.concatenate([v[rank] for v in values])
    received = np.zeros_like(wanted)
    columns = [row[rank] for row in table]
    group.all_to_all_parts(sent, extents(table[rank]), received, extents(columns))
    np.testing.assert_array_equal(received, wanted)
    shared, driver = group.shared_memory(100), FakeDriver(FakeMachine())
    for part in shared:
        driver.lock_pages(part)
    assert not any(part.any() for part in shared)
    group.barrier()
    shared[rank][:] = rank + 1
    group.barrier()
    assert [set(part.tolist()) for part in shared] == [{r + 1} for r in range(size)]
    group.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_and_vectors_pass_between_all(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.delattr(HostBuffer, "path")  # as where there is no /proc
    run_threads([lambda group=group: check_operations(group) for group in local_groups(size)])


def check_split(group: LocalGroup) -> None:
    """The halves of a group, and the same ranks once more, which work as it does."""
    half, again = group.split(group.rank % 2), group.split(0)
    expected = [rank for rank in range(group.size) if rank % 2 == group.rank % 2]
    assert list(half.all_gather_object(group.rank)) == expected
    assert (again.rank, again.size) == (group.rank, group.size)
    for each in (half, again, group.local):
        check_operations(each)
    group.barrier()
    half.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_group_is_split_by_color(size: int) -> None:
    run_threads([lambda group=group: check_split(group) for group in local_groups(size)])


def split_in_a_process(group: LocalGroup, report: Connection) -> None:
    check_split(group)
    report.send("checked")


def test_a_group_of_processes_is_split_and_shares_memory() -> None:
    context: Any = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    groups = local_groups(2)
    processes = [
        context.Process(target=split_in_a_process, args=(group, there), daemon=True)
        for group, (_, there) in zip(groups, pipes, strict=True)
    ]
    for process, group, (_, there) in zip(processes, groups, pipes, strict=True):
        process.start()
        group.close()
        there.close()
    for here, _ in pipes:
        assert here.poll(30)
        assert here.recv() == "checked"
    for process in processes:
        process.join(10)
