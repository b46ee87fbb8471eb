"""The group of torchrun's ranks, by real ones, which run `check_ranks`."""

import os
import pathlib
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tandem.config.schema import Config
from tandem.distributed import gloo
from tandem.distributed.allreduce import NcclAllReduce
from tandem.distributed.gloo import VARIABLES, GlooGroup, agree, is_started_by_torchrun, machine
from tandem.distributed.group import PeerLost
from tandem.files import write_text
from tandem.memory import RowType
from tests.support.ranks import run_ranks
from tests.support.tiny import shared_memory


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), False),
        (("TORCHELASTIC_RUN_ID",), True),
        (VARIABLES, True),
        (VARIABLES[:-1], False),
        (("PMI_SIZE", "SLURM_PROCID"), False),
    ],
)
def test_a_rank_knows_that_it_is_one(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], expected: bool
) -> None:
    for name in names:
        monkeypatch.setenv(name, "1")
    assert is_started_by_torchrun() is expected


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)],  # mpirun's are quick
)
def test_every_collective_agrees_with_numpy(ranks: int) -> None:
    before = shared_memory()
    result = run_ranks(ranks, "tests/support/check_ranks.py", by="torchrun")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"checked {ranks}\n"
    assert shared_memory() <= before


class Bomb:
    """Pickled, a call of os.mkdir."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def test_a_message_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the store may pass for a rank."""
    group = GlooGroup(HashStore(), 0, 1, "test")
    record = RowType("float32", (3,))
    array = np.arange(3.0)
    settings = Config(network_options={"depth": 3})
    sent = (None, True, 2**70, 1j, "a", b"b", [1], {2}, {"k": record}, tmp_path, np.int8(3))
    sent += (settings,)
    assert group.all_gather_object(sent) == (sent,)
    (found,) = group.all_gather_object(array)
    np.testing.assert_array_equal(found, array, strict=True)
    with monkeypatch.context() as patch:  # as in Python 3.13
        patch.setattr(PosixPath, "__module__", "pathlib._local")
        patch.setitem(sys.modules, "pathlib._local", pathlib)
        assert group.all_gather_object(tmp_path) == (tmp_path,)
    marker = tmp_path / "exploded"
    bombs = [pickle.dumps(Bomb(marker)), b"ctandem.files\npath.os.mkdir\n.", b"\x80\x04junk"]
    bombs += [pickle.dumps(f) for f in (write_text, pickle.loads, subprocess.Popen, eval)]
    for bomb in bombs:
        with monkeypatch.context() as patch:
            patch.setattr("tandem.distributed.group.pickle.dumps", lambda _, bomb=bomb: bomb)
            with pytest.raises(PeerLost, match="a message was no rank's"):
                group.all_gather_object(None)
    assert not marker.exists()
    pickle.loads(bombs[0])  # it would have gone off
    assert marker.exists()


SLOW_STORE = """
import time
from torch.distributed import HashStore
from tandem.distributed.gloo import GlooGroup

class SlowStore(HashStore):
    def clone(self):
        return self
    def add(self, key, number):
        time.sleep(0.3)
        found = super().add(key, number)
        print("answered", flush=True)
        return found

group = GlooGroup(SlowStore(), 0, 1, "slow")
group.beat(0)
time.sleep(0.1)
"""


def test_a_program_ends_after_the_stores_last_answer() -> None:
    command = [sys.executable, "-c", SLOW_STORE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (0, ["answered"] * 2)


class Nccl:
    """What stands for NCCL, of two ranks with the same vectors; it notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if options is not None and options.reduceOp == dist.ReduceOp.AVG:
            self.calls.append("average")
        else:
            self.calls.append("sum")
            tensors[0].mul_(2)
        return SimpleNamespace(wait=lambda: None)

    def shutdown(self) -> None: ...


@pytest.mark.parametrize(
    ("shares", "call", "expected"),
    [
        ([0.5, 0.5], "average", [1.0, 2.0]),
        ([0.25, 0.75], "sum", [0.5, 1.0]),  # 2 (1/4) v
        ([0.0, 1.0], "sum", [0.0, 0.0]),
        ([1 / 3, 1 / 3, 1 / 3], "sum", [2 / 3, 4 / 3]),  # 1/3 is rounded: 2 (1/4) v / (3/4)
        ([0.25] * 4, "average", [1.0, 2.0]),
    ],
)
def test_nccl_weighs_where_that_is_exact(
    shares: list[float], call: str, expected: list[float]
) -> None:
    group = GlooGroup(HashStore(), 0, 1, "test")
    group.size, nccl = len(shares), Nccl()
    vars(group)["_nccl"] = nccl
    vector = torch.tensor([1.0, 2.0])
    NcclAllReduce(group).average(vector, shares)
    assert nccl.calls == [call]
    assert vector.tolist() == pytest.approx(expected)


def test_one_rank_of_nccl_keeps_its_vector() -> None:
    group, nccl = GlooGroup(HashStore(), 0, 1, "test"), Nccl()
    vars(group)["_nccl"] = nccl
    vector = torch.tensor([1.0, 2.0])
    NcclAllReduce(group).average(vector, [1.0])
    assert vector.tolist() == [1.0, 2.0]
    assert not nccl.calls


def test_a_machine_is_identified_by_more_than_its_name() -> None:
    assert machine() == machine()
    assert all(machine())


def test_ranks_that_are_started_again_do_not_join_those_before() -> None:
    """At a store that keeps everything, of which one has called and come no further."""
    store, names = HashStore(), []
    store.set("tandem/call/2", "of a rank that was killed")
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            names.append(set(pool.map(lambda rank: agree(store, rank, 3), range(3))))
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]


def test_ranks_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_JOIN_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="2 of 3 ranks have not come"):
        agree(HashStore(), 0, 3)
    with pytest.raises(RuntimeError):
        agree(HashStore(), 1, 3)
