"""What counts as work of a process, on made-up and on real snapshots."""

import os
import time
from pathlib import Path

import pytest

from tandem.processes.activity import (
    ProcessSnapshot,
    ThreadSnapshot,
    has_worked,
    take_snapshot,
)

SECONDS = 10.0


def process(*threads: tuple[str, float], disk_bytes: int = 0) -> ProcessSnapshot:
    return ProcessSnapshot(
        {number: ThreadSnapshot(*thread) for number, thread in enumerate(threads)}, disk_bytes
    )


@pytest.mark.parametrize(
    ("after", "works"),
    [
        (process(("S", 5.0), ("S", 1.0)), False),
        (process(("T", 5.0), ("T", 1.0)), False),
        (process(("R", 5.0), ("S", 1.0)), False),
        # Threads that wait for the interpreter's lock look for it often.
        (process(("S", 5.1), ("S", 1.1), ("S", 0.1)), False),
        (process(("S", 5.0), ("R", 2.0)), True),
        (process(("S", 5.0), ("S", 1.0), ("R", 1.0)), True),
        (process(("S", 5.0), ("D", 1.0)), True),
        (process(("S", 5.0), ("S", 1.0), disk_bytes=4096), True),
        (process(("S", 5.0)), False),
    ],
)
def test_a_process_works_if_a_thread_computes_or_waits_for_a_disk(
    after: ProcessSnapshot, works: bool
) -> None:
    assert has_worked(process(("S", 5.0), ("S", 1.0)), after, SECONDS) == works


def stat(name: str, state: str, user: int, system: int, disk: int) -> str:
    fields = [state, *["0"] * 49]
    fields[11], fields[12], fields[39] = str(user), str(system), str(disk)
    return f"7 ({name}) {' '.join(fields)}\n"


def test_a_snapshot_adds_up_what_the_kernel_reports(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for thread, text in {
        7: stat("trainer 0", "S", ticks, ticks, 0),
        8: stat("a) R (b", "D", 0, 0, 3 * ticks),
    }.items():
        folder = tmp_path / "7" / "task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(text)
    (tmp_path / "7" / "task" / "9").mkdir()  # a thread that ends while it is looked at
    (tmp_path / "7" / "io").write_text("rchar: 9\nread_bytes: 30\nwrite_bytes: 12\n")
    assert take_snapshot(7, tmp_path) == ProcessSnapshot(
        {7: ThreadSnapshot("S", 2.0), 8: ThreadSnapshot("D", 3.0)}, 42
    )


def test_io_may_be_secret(tmp_path: Path) -> None:
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(stat("trainer", "S", 0, 0, 0))
    assert take_snapshot(7, tmp_path) == ProcessSnapshot({7: ThreadSnapshot("S", 0.0)}, 0)


def test_there_is_none_of_a_process_that_is_gone_or_without_proc(tmp_path: Path) -> None:
    assert take_snapshot(7, tmp_path) is None
    assert take_snapshot(7, tmp_path / "no folder") is None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux only")
def test_this_process_works_while_it_computes() -> None:
    before, begin = take_snapshot(os.getpid()), time.monotonic()
    while time.monotonic() < begin + 0.3:
        pass
    after = take_snapshot(os.getpid())
    assert before is not None
    assert after is not None
    assert has_worked(before, after, time.monotonic() - begin)
