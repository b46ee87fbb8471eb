"""What the trainers of a long run note of themselves, and what is made of it."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import long_run
from tandem.distributed.allreduce import SharedMemoryAllReduce


@pytest.mark.parametrize("averages", [True, False])
def test_trainers_note_whether_they_are_equal(
    averages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(long_run.NOTES, str(tmp_path))
    monkeypatch.setattr(long_run, "EVERY", 1)
    if not averages:
        monkeypatch.setattr(long_run, "_plain_average", lambda *operands: None)
    barrier = threading.Barrier(2, timeout=20)
    vectors = [np.zeros(1 << 18, np.uint8).view("float32") for _ in range(2)]
    vectors[1][10], vectors[1][-10] = 3, -4

    def average(rank: int) -> None:
        group: Any = SimpleNamespace(rank=rank, size=2, barrier=barrier.wait)
        reduce = SharedMemoryAllReduce(group, vectors)
        long_run._average(reduce, vectors[rank], [0.5, 0.5])

    threads = [threading.Thread(target=average, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notes = [np.loadtxt(tmp_path / f"{rank}.txt") for rank in range(2)]
    assert [row[:3].tolist() for row in notes] == [[1, 3, averages], [1, 4, averages]]
    assert all(row[3] > 10 and row[4] > 2 for row in notes)


@pytest.mark.parametrize("equal", [1, 0])
def test_a_run_fails_where_its_trainers_differed(
    equal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(long_run.subprocess, "run", lambda command, **_: commands.append(command))
    rows = [f"250 0.5 {equal} {100 + step} 20\n" for step in range(40)]
    for rank in range(2):
        (tmp_path / f"{rank}.txt").write_text("".join(rows))
    assert long_run.main(["data", str(tmp_path)]) == 1 - equal
    assert "trainer 1: 10000 steps, equal after" in (out := capsys.readouterr().out)
    assert "memory grew by 37.0 MB and 0 files" in out
    assert (tmp_path / "long-run.png").stat().st_size > 1000
    (tmp_path / "epoch-0001-step-000001.safetensors").touch()
    long_run.main(["data", str(tmp_path)])
    assert ["--resume_train" in command for command in commands] == [False, True]


def test_averages_that_are_not_noted_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(long_run, "_plain_average", lambda *operands: calls.append(operands))
    monkeypatch.setattr(long_run, "_count", 0)
    reduce: Any = object()
    long_run._average(reduce, np.zeros(1), [0.5, 0.5])
    assert calls == [(reduce, np.zeros(1), [0.5, 0.5])]
