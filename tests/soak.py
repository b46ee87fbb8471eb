"""Faults at random moments, again and again; in the end the same bits as if nothing had happened.

python -m tests.soak --data data/demo --runs runs/soak --faults 50 --seed 1

Trains once undisturbed, then once with faults: any process is killed or stopped, the run is asked
to end, suspended as by Ctrl-Z, or finds the disk full. After each fault everything must be gone
within seconds, and the run is started again. Exit status 0 if weights, momenta and record are equal
in the end.
"""

import argparse
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import kill, killpg
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tandem.artifacts.run_folder import list_checkpoints
from tandem.processes.heartbeat import PATIENCE_SECONDS
from tests.support.tiny import (
    find_process,
    group_members,
    read_record,
    settings,
    shared_memory,
    start_program,
    without_times,
)

TIMEOUT = 3.0  # peer_timeout_seconds
GONE_SECONDS = 10.0  # after detection
START_SECONDS = 120.0
EARLY_STATUSES = (143, 130, -signal.SIGTERM, -signal.SIGINT)


class Broken(AssertionError):
    """The promise was not kept."""


@dataclass
class Fault:
    """What is done to a run.

    Attributes
    ----------
    name : str
        For people.
    strike : callable
        Does it, given the launcher's process.
    statuses : tuple of int
        Exit statuses that may follow.
    seconds : float
        Within which the run must have ended.
    """

    name: str
    strike: Callable[[subprocess.Popen[str]], None]
    statuses: tuple[int, ...]
    seconds: float = GONE_SECONDS


def faults(trainers: int) -> list[Fault]:
    """Every kind of fault, on every process."""
    members = [f"{kind} {rank}" for rank in range(trainers) for kind in ("trainer", "loader")]
    found = [Fault(f"kill {name}", Signal(signal.SIGKILL, name), (1,)) for name in members]
    found += [
        Fault(f"stop {name}", Signal(signal.SIGSTOP, name), (1,), TIMEOUT + GONE_SECONDS)
        for name in members
    ]
    return [
        *found,
        Fault("kill launcher", Signal(signal.SIGKILL), (-signal.SIGKILL,)),
        Fault("stop launcher", stop_launcher, (1,), 5.0),
        Fault("SIGTERM", Signal(signal.SIGTERM), (143,)),
        Fault("Ctrl-C", interrupt, (130,)),
        Fault("SIGTERM to all", terminate_all, (143,)),
        Fault("disk full", fill_disk, (2,), 60.0),
        Fault("Ctrl-Z and SIGTERM", suspend, (143,)),
    ]


@dataclass
class Signal:
    """Sends a signal to one process, the launcher if none is named."""

    number: signal.Signals
    name: str = ""

    def __call__(self, launcher: subprocess.Popen[str]) -> None:
        kill(find_process(launcher.pid, self.name) if self.name else launcher.pid, self.number)


def interrupt(launcher: subprocess.Popen[str]) -> None:
    """As a terminal does."""
    killpg(launcher.pid, signal.SIGINT)


def terminate_all(launcher: subprocess.Popen[str]) -> None:
    """As a cluster's scheduler does."""
    killpg(launcher.pid, signal.SIGTERM)


def stop_launcher(launcher: subprocess.Popen[str]) -> None:
    """Stop it alone; the others end by themselves, and it notices when it goes on."""
    kill(launcher.pid, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT + PATIENCE_SECONDS + GONE_SECONDS
    while [pid for pid in group_members(launcher.pid) if is_ours(pid)] != [launcher.pid]:
        if time.monotonic() > deadline:
            raise Broken(f"{group_members(launcher.pid)} outlive a launcher that is stopped")
        time.sleep(0.1)
    kill(launcher.pid, signal.SIGCONT)


def is_ours(pid: int) -> bool:
    """Whether it is a process of the run, and not the one in which Python tracks resources."""
    try:
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def suspend(launcher: subprocess.Popen[str]) -> None:
    """Ctrl-Z for longer than a process may be silent, `fg`, and some time later the end.

    Ctrl-Z's own signal has no effect on a group that no shell controls.
    """
    killpg(launcher.pid, signal.SIGSTOP)
    time.sleep(TIMEOUT + 2)
    killpg(launcher.pid, signal.SIGCONT)
    time.sleep(TIMEOUT + 1)
    if launcher.poll() is not None:
        raise Broken(f"a run that was suspended ended with {launcher.returncode}")
    kill(launcher.pid, signal.SIGTERM)


def fill_disk(launcher: subprocess.Popen[str]) -> None:
    """No file of trainer 0 may grow any more: the system says so as of a disk that is full."""
    writer = find_process(launcher.pid, "trainer 0")
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (4096, 4096))


@dataclass
class Soak:
    """One run that is disturbed.

    Parameters
    ----------
    run : Path
        Its folder.
    arguments : sequence of str
        Of train.py.
    random : Random
        Decides on the moments.
    log : callable
        Told of each fault.
    lines : int
        It strikes before the record has grown by so many lines: a measure of time that is the same
        on every machine.
    """

    run: Path
    arguments: Sequence[str]
    random: random.Random
    log: Callable[[str], None] = print
    lines: int = 1
    struck: int = field(default=0, init=False)

    def disturb(self, fault: Fault) -> bool:
        """Start the run, strike, see what follows. Whether it came to the fault before the end."""
        shared = shared_memory()
        process = self._start()
        accepted = fault.statuses
        try:
            moment = self._await_moment(process)
            if process.poll() is None and not self._strike(fault, process):
                accepted = EARLY_STATUSES
            _, errors = process.communicate(timeout=fault.seconds + 5)
        except subprocess.TimeoutExpired:
            raise Broken(f"{fault.name}: the run did not end in {fault.seconds} s") from None
        finally:
            self._clear(process)
        status = process.returncode
        # In its first moment a program has no handlers yet: the signal itself ends it.
        if "after the start" in moment:
            accepted += EARLY_STATUSES
        if status not in (0, *accepted):
            raise Broken(f"{fault.name} {moment}: exit status {status}\n{errors}")
        self._check_nothing_left(fault, process.pid, shared)
        self.struck += status in fault.statuses
        where = [path.name for path in list_checkpoints(self.run)[-1:]]
        self.log(f"{self.struck}: {fault.name} {moment}: exit status {status}; {where}")
        return status != 0

    def finish(self) -> None:
        """Let it go to its end."""
        process = self._start()
        _, errors = process.communicate(timeout=3600)
        if process.returncode != 0:
            raise Broken(f"undisturbed: exit status {process.returncode}\n{errors}")

    def _start(self) -> subprocess.Popen[str]:
        return start_program("train.py", [*self.arguments, "--resume_train", "true"])

    def _await_moment(self, process: subprocess.Popen[str]) -> str:
        """Wait until some random moment; say which."""
        if self.random.random() < 0.15:
            seconds = self.random.uniform(0, 6)
            time.sleep(seconds)
            return f"{seconds:.1f} s after the start"
        wanted, deadline = self.random.randint(1, self.lines), time.monotonic() + START_SECONDS
        begin = self._recorded()
        while self._recorded() < begin + wanted and process.poll() is None:
            if time.monotonic() > deadline:
                raise Broken("a run was started again and made no progress")
            # What the run had beyond its checkpoint is dropped from the record when it goes on.
            begin = min(begin, self._recorded())
            time.sleep(0.02)
        time.sleep(self.random.uniform(0, 0.3))
        return f"after {wanted} lines"

    def _recorded(self) -> int:
        record = self.run / "record.jsonl"
        return record.read_bytes().count(b"\n") if record.exists() else 0

    def _strike(self, fault: Fault, process: subprocess.Popen[str]) -> bool:
        """Strike; if the victim is not there yet, or not any more, end the run instead."""
        try:
            fault.strike(process)
        except (ProcessLookupError, LookupError):
            process.terminate()
            return False
        return True

    def _clear(self, process: subprocess.Popen[str]) -> None:
        """Leave nothing behind when a check has failed."""
        if sys.exc_info()[0] is not None and group_members(process.pid):
            killpg(process.pid, signal.SIGKILL)

    def _check_nothing_left(self, fault: Fault, group: int, shared: set[str]) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while left := group_members(group):
            if time.monotonic() > deadline:
                killpg(group, signal.SIGKILL)
                raise Broken(f"{fault.name}: processes {left} are left")
            time.sleep(0.05)
        if partial := [path.name for path in self.run.glob(".*.partial*")]:
            raise Broken(f"{fault.name}: {partial} are left in {self.run}")
        if names := shared_memory() - shared:
            raise Broken(f"{fault.name}: {names} are left in shared memory")


def compare(ours: Path, theirs: Path) -> None:
    """Compare the last checkpoints and the records of two runs.

    Raises
    ------
    Broken
        They differ.
    """
    names = [list_checkpoints(run)[-1].name for run in (ours, theirs)]
    if names[0] != names[1]:
        raise Broken(f"the runs end with {names[0]} and {names[1]}")
    left, right = (load_file(run / names[0]) for run in (ours, theirs))
    for name in sorted(left.keys() | right.keys()):
        if not np.array_equal(left[name].view(np.uint32), right[name].view(np.uint32)):
            raise Broken(f"{name} differs")
    lines = [[without_times(line) for line in read_record(run)] for run in (ours, theirs)]
    if lines[0] != lines[1]:
        differing = [pair for pair in zip(*lines, strict=False) if pair[0] != pair[1]][:2]
        raise Broken(f"records of {[len(part) for part in lines]} lines differ: {differing}")


def endless(kinds: Sequence[Fault], chance: random.Random) -> Iterator[Fault]:
    """All faults in random order, again and again."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def soak(
    data: Path,
    runs: Path,
    count: int,
    seed: int,
    log: Callable[[str], None] = print,
    kinds: Sequence[str] = (),
    **changes: object,
) -> None:
    """Train undisturbed and disturbed, and compare.

    Parameters
    ----------
    data : Path
        A preprocessed data set.
    runs : Path
        Where the two run folders go.
    count : int
        Faults, at least.
    seed : int
        Of the order of the faults and of their moments.
    log : callable
        Told of each fault.
    kinds : sequence of str
        Which faults, by name; none is all.
    **changes
        Settings of the runs.
    """
    common = {"peer_timeout_seconds": TIMEOUT, "snapshot_minutes": 0.02, **changes}
    devices = common["devices"]
    assert isinstance(devices, list)
    chance = random.Random(seed)
    whole = Soak(runs / "whole", settings(data, runs / "whole", **common), chance, log)
    parts = Soak(runs / "parts", settings(data, runs / "parts", **common), chance, log)
    whole.finish()
    parts.lines = max(1, len(read_record(whole.run)) // count)
    chosen = [fault for fault in faults(len(devices)) if not kinds or fault.name in kinds]
    for fault in endless(chosen, chance):
        if parts.struck == count:
            break
        if not parts.disturb(fault):
            raise Broken(f"the run was over after {parts.struck} of {count} faults; train longer")
    parts.finish()
    compare(parts.run, whole.run)
    log(f"{count} faults, and every bit as without them")


def main() -> int:
    """Soak as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data/demo"))
    parser.add_argument("--runs", type=Path, default=Path("runs/soak"))
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    shutil.rmtree(options.runs, ignore_errors=True)
    soak(
        options.data,
        options.runs,
        options.faults,
        options.seed,
        log=lambda line: print(line, flush=True),
        devices=["cpu"] * 3,
        batch_size=16,
        width=0.1,
        n_epochs=4 * options.faults,
        learning_rate=0.02,
        shuffle="images",
        rand_mirror=False,
        print_freq=5,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
