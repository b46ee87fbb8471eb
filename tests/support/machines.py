"""Two machines made of one: network namespaces that are joined by a virtual cable.

Ranks on both talk by TCP, as between machines, and not by memory; MPI takes them for ranks of two
machines. The cable can be given a speed, and be cut. Processor and memory are shared, of course.
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
# Or UCX, by which MPICH talks, finds out that it is one machine, and goes by its memory.
_BY_CABLE = ("UCX_TLS=tcp,self", f"UCX_NET_DEVICES={CABLE}")
_numbers = itertools.count()


@dataclass(frozen=True)
class Machines:
    """Two machines; made by `two_machines`.

    Attributes
    ----------
    names : tuple of str
        Of the namespaces.
    addresses : tuple of str
        Theirs on the cable.
    login : Path
        A program that runs a command on one of them, called as mpirun calls ssh.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    login: Path

    def mpirun(self, starter: str, ranks: int) -> list[str]:
        """The beginning of a command line that starts so many ranks on each machine.

        Parameters
        ----------
        starter : str
            MPICH's mpirun.
        ranks : int
            On each machine.
        """
        hosts = ",".join(f"{address}:{ranks}" for address in self.addresses)
        reach = ["-launcher", "ssh", "-launcher-exec", str(self.login), "-iface", CABLE]
        count = ["-hosts", hosts, "-n", str(ranks * len(self.names))]
        return [*self.on(0), "env", *_BY_CABLE, starter, *reach, *count]

    def on(self, machine: int) -> list[str]:
        """The beginning of a command line that runs on one machine."""
        return ["ip", "netns", "exec", self.names[machine]]

    def sent(self, machine: int) -> int:
        """Bytes that have left a machine by the cable, those of TCP and Ethernet included."""
        counter = f"/sys/class/net/{CABLE}/statistics/tx_bytes"
        return int(_ip(*self.on(machine)[1:], "cat", counter))

    def limit(self, bits_per_second: float) -> None:
        """Give the cable a speed, the same in both directions."""
        for machine in range(len(self.names)):
            rate = f"rate {bits_per_second:.0f}bit burst 256kb latency 50ms".split()
            qdisc = ["tc", "qdisc", "replace", "dev", CABLE, "root", "tbf", *rate]
            _ip(*self.on(machine)[1:], *qdisc)

    def cut(self) -> None:
        """Cut the cable."""
        _ip("-n", self.names[0], "link", "set", CABLE, "down")


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Two machines, which are gone afterwards, with every process on them.

    Raises
    ------
    PermissionError
        This system does not let this user make them; why.
    """
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
    """Why there can't be two machines here; None where there can."""
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
        told = f"{result.stdout}{result.stderr}".strip()
        raise PermissionError(f"no network namespaces here: ip {' '.join(arguments)}: {told}")
    return result.stdout


def _await_link(names: Sequence[str]) -> None:
    """Wait until both see that they are connected, which the kernel tells after up to a second."""
    state, deadline = f"/sys/class/net/{CABLE}/operstate", time.monotonic() + 10
    for name in names:
        while _ip("netns", "exec", name, "cat", state).strip() != "up":
            if time.monotonic() > deadline:
                raise PermissionError("no network namespaces here: their cable does not come up")
            time.sleep(0.02)


def _remove(name: str) -> None:
    """End what runs in a namespace, and remove it."""
    with contextlib.suppress(PermissionError):
        for pid in map(int, _ip("netns", "pids", name).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "delete", name)


def main(arguments: Sequence[str]) -> int:
    """Run a command as ranks: ranks on each machine, speed of the cable in bit/s, command."""
    ranks, speed, *command = arguments
    with two_machines() as pair:
        pair.limit(float(speed))
        starter = Path(sys.executable).parent / "mpirun"
        return subprocess.run([*pair.mpirun(str(starter), int(ranks)), *command]).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
