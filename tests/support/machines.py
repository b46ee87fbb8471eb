"""Two simulated machines: network namespaces joined by a virtual cable.

Ranks on both communicate by TCP, not through memory; MPI treats them as ranks of two machines. The
cable can be limited in speed and cut. Processor and memory are shared.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MACHINES = 2
CABLE = "cable0"  # the name of the network interface on both
# Without these UCX, MPICH's transport, recognises one machine and uses shared memory.
_BY_CABLE = ("UCX_TLS=tcp,self", f"UCX_NET_DEVICES={CABLE}")
_numbers = itertools.count()


@dataclass(frozen=True)
class Machines:
    """Two machines; made by `two_machines`."""

    names: tuple[str, ...]  # of the namespaces
    addresses: tuple[str, ...]  # on the cable
    login: Path  # a program that mpirun calls like ssh to run a command on one of them

    def mpirun(self, starter: str, ranks: int) -> list[str]:
        """Return the beginning of a command line by which MPICH starts `ranks` on each machine."""
        hosts = ",".join(f"{address}:{ranks}" for address in self.addresses)
        reach = ["-launcher", "ssh", "-launcher-exec", str(self.login), "-iface", CABLE]
        count = ["-hosts", hosts, "-n", str(ranks * len(self.names))]
        return [*self.on(0), "env", *_BY_CABLE, starter, *reach, *count]

    def on(self, machine: int) -> list[str]:
        """Return the beginning of a command line that runs on one machine."""
        return ["ip", "netns", "exec", self.names[machine]]

    def sent(self, machine: int) -> int:
        """Return the bytes sent over the cable by a machine, TCP and Ethernet headers included."""
        counter = f"/sys/class/net/{CABLE}/statistics/tx_bytes"
        return int(_ip(*self.on(machine)[1:], "cat", counter))

    def limit(self, bits_per_second: float) -> None:
        """Limit the speed of the cable, the same in both directions."""
        for machine in range(len(self.names)):
            rate = f"rate {bits_per_second:.0f}bit burst 256kb latency 50ms".split()
            qdisc = ["tc", "qdisc", "replace", "dev", CABLE, "root", "tbf", *rate]
            _ip(*self.on(machine)[1:], *qdisc)

    def cut(self) -> None:
        """Cut the cable."""
        _ip("-n", self.names[0], "link", "set", CABLE, "down")


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Make two machines, or raise PermissionError with the reason; kill all on them afterwards."""
    number = f"{os.getpid()}-{next(_numbers)}"
    names = tuple(f"tandem-{number}-{place}" for place in range(MACHINES))
    addresses = tuple(f"10.213.0.{place + 1}" for place in range(MACHINES))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-machines-")))
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_remove, name)
        ends = [["netns", name, "name", CABLE] for name in names]
        _ip("link", "add", *ends[0][2:], *ends[0][:2], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for device in (CABLE, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        _await_link(names)
        login = folder / "login"
        # mpirun calls: login -x ADDRESS COMMAND...
        lines = ["#!/bin/sh", "shift", f'name="tandem-{number}-$((${{1##*.}} - 1))"', "shift"]
        login.write_text("\n".join([*lines, 'exec ip netns exec "$name" sh -c "$*"\n']))
        login.chmod(0o755)
        yield Machines(names, addresses, login)


def missing_for_two_machines() -> str | None:
    """Return why two machines can't be simulated here, or None."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux and its program ip"
    try:
        with two_machines():
            return None
    except PermissionError as error:
        return str(error)


def _ip(*arguments: str) -> str:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        output = f"{result.stdout}{result.stderr}".strip()
        raise PermissionError(f"no network namespaces here: ip {' '.join(arguments)}: {output}")
    return result.stdout


def _await_link(names: Sequence[str]) -> None:
    """Wait until both ends are up, which the kernel reports after up to a second."""
    state, deadline = f"/sys/class/net/{CABLE}/operstate", time.monotonic() + 10
    for name in names:
        while _ip("netns", "exec", name, "cat", state).strip() != "up":
            if time.monotonic() > deadline:
                raise PermissionError("no network namespaces here: their cable does not come up")
            time.sleep(0.02)


def _remove(name: str) -> None:
    """Kill what runs in a namespace, and remove it."""
    with contextlib.suppress(PermissionError):
        for pid in map(int, _ip("netns", "pids", name).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "delete", name)
