"""The work of a process, as the kernel sees it: for one whose own threads cannot report it.

A call that keeps the interpreter's lock, such as the loading of a library or a page fault of a
mapped file, keeps every other thread of its process from running, the heartbeat too. Linux only.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Of one thread's time. A thread that waits for the lock looks for it every five milliseconds, which
# takes up to one per cent of a processor.
WORKING_SHARE = 0.05

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_STATE, _USER, _SYSTEM, _DISK = 0, 11, 12, 39  # after the name, which is the second; see proc(5)


@dataclass(frozen=True)
class ThreadSnapshot:
    """The work of a thread so far."""

    state: str  # the kernel's letter: R, S, D (waits for a disk), T (stopped), ...
    seconds: float  # of computing, and of waiting for disks where the kernel counts that


@dataclass(frozen=True)
class ProcessSnapshot:
    """The work of a process so far."""

    threads: Mapping[int, ThreadSnapshot]  # by thread id
    disk_bytes: int = 0  # read and written


def take_snapshot(pid: int, proc: Path = Path("/proc")) -> ProcessSnapshot | None:
    """Ask the kernel about a process; None if it does not exist or may not be inspected."""
    folder = proc / str(pid)
    try:
        threads = dict(_threads(folder / "task"))
    except OSError:
        return None
    return ProcessSnapshot(threads, _disk_bytes(folder / "io")) if threads else None


def has_worked(before: ProcessSnapshot, after: ProcessSnapshot, seconds: float) -> bool:
    """Decide whether a process computed, read or wrote in the `seconds` between two snapshots.

    One that waits for a disk counts as working, however long it waits. One that is stopped, or in
    which every thread sleeps, does not.
    """
    if after.disk_bytes > before.disk_bytes:
        return True
    for number, thread in after.threads.items():
        earlier = before.threads.get(number)
        computed = thread.seconds - (earlier.seconds if earlier else 0.0)
        if thread.state == "D" or computed > WORKING_SHARE * seconds:
            return True
    return False


def _threads(folder: Path) -> Iterator[tuple[int, ThreadSnapshot]]:
    for path in folder.iterdir():
        try:
            fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        ticks = sum(int(fields[n]) for n in (_USER, _SYSTEM, _DISK))
        yield int(path.name), ThreadSnapshot(fields[_STATE], ticks * _TICK_SECONDS)


def _disk_bytes(path: Path) -> int:
    """Bytes that a process has read from disks and written to them; 0 if that may not be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) + int(counts["write_bytes"])
