"""Faults at random moments, again and again; at the end the same bits as if nothing had happened.

python -m tests.soak --data data/demo --runs runs/soak --faults 50 --seed 1

Trains once undisturbed, then once with faults: any process is killed or stopped, the run is asked
to end, suspended as by Ctrl-Z, or finds the disk full. After each fault everything must be gone
within seconds, and the run is started again. Exit status 0 if weights, momenta and record are equal
at the end.
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
from typing import get_args

from tandem.artifacts.run_folder import list_checkpoints
from tandem.layers.network import ALEXNET, FullyConnected
from tandem.processes.heartbeat import PATIENCE_SECONDS
from tests.support.runs import assert_same_bits
from tests.support.tiny import (
    count_steps,
    find_process,
    group_members,
    is_gone,
    is_helper,
    read_record,
    settings,
    shared_memory,
    start_program,
    wait_until,
)

TIMEOUT = 3.0  # peer_timeout_seconds
GONE_SECONDS = 10.0  # after detection
START_SECONDS = 120.0
EARLY_STATUSES = (143, 130, -signal.SIGTERM, -signal.SIGINT)


class Broken(AssertionError):
    """The promise was not kept."""


@dataclass
class Fault:
    """What is done to a run, given the launcher's process."""

    name: str
    strike: Callable[[subprocess.Popen[str]], None]
    statuses: tuple[int, ...]  # that may follow
    seconds: float = GONE_SECONDS  # within which the run must have ended


def faults(trainers: int) -> list[Fault]:
    """Every kind of fault, on every process."""
    members = [f"{kind} {rank}" for rank in range(trainers) for kind in ("trainer", "loader")]
    found = [Fault(f"kill {name}", send(signal.SIGKILL, name), (1,)) for name in members]
    found += [
        Fault(f"stop {name}", send(signal.SIGSTOP, name), (1,), TIMEOUT + GONE_SECONDS)
        for name in members
    ]
    return [
        *found,
        Fault("kill libraries and SIGTERM", kill_libraries, (143,)),
        Fault("kill launcher", send(signal.SIGKILL), (-signal.SIGKILL,)),
        Fault("stop launcher", stop_launcher, (1,), 5.0),
        Fault("SIGTERM", send(signal.SIGTERM), (143,)),
        Fault("Ctrl-C", send_all(signal.SIGINT), (130,)),
        Fault("SIGTERM to all", send_all(signal.SIGTERM), (143,)),
        Fault("disk full", fill_disk, (2,), 60.0),
        Fault("Ctrl-Z and SIGTERM", suspend, (143,)),
    ]


def send(number: signal.Signals, name: str = "") -> Callable[[subprocess.Popen[str]], None]:
    """Send a signal to one process, the launcher if none is named."""

    def strike(launcher: subprocess.Popen[str]) -> None:
        kill(find_process(launcher.pid, name) if name else launcher.pid, number)

    return strike


def send_all(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    """Send a signal to every process, as a terminal and a cluster's scheduler do."""
    return lambda launcher: killpg(launcher.pid, number)


def stop_launcher(launcher: subprocess.Popen[str]) -> None:
    """Stop it alone; the others end by themselves, and it notices when it continues."""
    kill(launcher.pid, signal.SIGSTOP)

    def is_alone() -> bool:
        return [p for p in group_members(launcher.pid) if not is_helper(p)] == [launcher.pid]

    if not wait_until(is_alone, TIMEOUT + PATIENCE_SECONDS + GONE_SECONDS):
        raise Broken(f"{group_members(launcher.pid)} outlive a launcher that is stopped")
    kill(launcher.pid, signal.SIGCONT)


def kill_libraries(launcher: subprocess.Popen[str]) -> None:
    """End the process of which trainers are copies, which they can do without."""
    kill(find_process(launcher.pid, "libraries"), signal.SIGKILL)
    time.sleep(TIMEOUT)
    if launcher.poll() is not None:
        raise Broken(f"a run ended with {launcher.returncode}")
    kill(launcher.pid, signal.SIGTERM)


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
    """Forbid trainer 0 to write larger files, which fails as on a full disk."""
    writer = find_process(launcher.pid, "trainer 0")
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (4096, 4096))


@dataclass
class Soak:
    """One run that is disturbed."""

    run: Path
    arguments: Sequence[str]  # of train.py
    random: random.Random  # decides on the moments
    log: Callable[[str], None] = print
    # A fault comes before the record has grown by this many lines: a measure of time that is the
    # same on every machine.
    lines: int = 1
    struck: int = field(default=0, init=False)

    def disturb(self, fault: Fault) -> bool:
        """Start the run, strike and check the end; return whether the fault came before it."""
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
        """Train to the end."""
        process = self._start()
        _, errors = process.communicate(timeout=3600)
        if process.returncode != 0:
            raise Broken(f"undisturbed: exit status {process.returncode}\n{errors}")

    def _start(self) -> subprocess.Popen[str]:
        return start_program("train.py", [*self.arguments, "--resume_train", "true"])

    def _await_moment(self, process: subprocess.Popen[str]) -> str:
        """Wait until a random moment; describe it."""
        if self.random.random() < 0.15:
            seconds = self.random.uniform(0, 6)
            time.sleep(seconds)
            return f"{seconds:.1f} s after the start"
        wanted, deadline = self.random.randint(1, self.lines), time.monotonic() + START_SECONDS
        begin = count_steps(self.run)
        while count_steps(self.run) < begin + wanted and process.poll() is None:
            if time.monotonic() > deadline:
                raise Broken("a run was started again and made no progress")
            # A resumed run drops the lines beyond its checkpoint.
            begin = min(begin, count_steps(self.run))
            time.sleep(0.02)
        time.sleep(self.random.uniform(0, 0.3))
        return f"after {wanted} lines"

    def _strike(self, fault: Fault, process: subprocess.Popen[str]) -> bool:
        """Strike; if the victim has not started yet or has ended, end the run instead."""
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
        if not is_gone(group, GONE_SECONDS):
            left = group_members(group)
            killpg(group, signal.SIGKILL)
            raise Broken(f"{fault.name}: processes {left} are left")
        if partial := [path.name for path in self.run.glob(".*.partial*")]:
            raise Broken(f"{fault.name}: {partial} are left in {self.run}")
        if names := shared_memory() - shared:
            raise Broken(f"{fault.name}: {names} are left in shared memory")


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

    Strike at least `count` times, with the faults of the names in `kinds` or with all; `changes`
    are settings of the runs.
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
    assert_same_bits(parts.run, whole.run)
    log(f"{count} faults, and every bit as without them")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data/demo"))
    parser.add_argument("--runs", type=Path, default=Path("runs/soak"))
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--network", default=ALEXNET)
    parser.add_argument("--fully-connected", default="replicated", choices=get_args(FullyConnected))
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
        network=options.network,
        fully_connected=options.fully_connected,
        n_epochs=4 * options.faults,
        learning_rate=0.02,
        shuffle="images",
        rand_mirror=False,
        print_freq=5,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
