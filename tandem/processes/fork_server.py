"""Processes that begin as copies of one that has imported PyTorch and PyTensor.

Importing them takes a process seconds. The fork server of `multiprocessing` does it once; each
process is then a copy of it, made within milliseconds, and shares the memory of what was imported.
What a process would inherit of the program, a copy has from the server, as it was when that began.
So it is sent: environment, standard output and error, processor cores, limits, blocked signals.
Libraries have read the environment and counted the cores by then: once it has changed, or there are
more, processes are started anew, as on other systems than Linux.
"""

import atexit
import contextlib
import ctypes
import importlib
import io
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import (
    forkserver,
    parent_process,
    popen_forkserver,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tandem.processes.signals import STOPPING
from tandem.processes.spawn import OwnProcess, start_new

LIBRARIES = "tandem.training.libraries"
"""Module that the server imports, and then shows the name `READY`."""

READY = "libraries"

UNKNOWN = 256
"""Exit status, which no process has, of a copy whose server has ended before it."""

_IMPORT_SECONDS = 120.0
_ANSWER_SECONDS = (1.0, 10.0)  # for the server's answers; for those of one that was stopped
_MOST_DESCRIPTORS = 240  # that a process can be sent
# Read by no library, but changed by pytest; the same, by `limit_spinning`, wherever PyTorch is.
_UNREAD = ("PYTEST_CURRENT_TEST", "GOMP_SPINCOUNT")

# Until 3.11.1 every user of the machine could have had the server start processes; since 3.14 it
# asks for a password, which `_request` does not give.
_IS_SAFE = sys.platform == "linux" and (3, 11, 1) <= sys.version_info < (3, 14)
_server = forkserver.ForkServer()  # not the one that others may use in this process
_changing = threading.RLock()


@dataclass(frozen=True)
class _Begun:
    server: int  # process id
    environment: Mapping[str, str]
    cores: frozenset[int]
    answers: bool = True


_begun: _Begun | None = None
_asked = 0  # processes that could be copies


def begin() -> bool:
    """Start the server, unless it runs; return whether processes can be its copies.

    Waits until it has imported what it is for, unless a signal's handler raises.
    """
    global _begun
    is_usual = all(isinstance(path, str) for path in sys.path)
    if not _IS_SAFE or not is_usual or parent_process() is not None:
        return False
    environment = {name: os.environ[name] for name in os.environ if name not in _UNREAD}
    cores = frozenset(os.sched_getaffinity(0))
    with _changing:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # for the server to inherit
        try:
            with searching_alike():
                _server.set_forkserver_preload([LIBRARIES])
                _server.ensure_running()
        except OSError:  # also in a child of `os.fork`, which can't wait for the server
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        server: int = _server._forkserver_pid  # type: ignore[attr-defined]
        if _begun is None or _begun.server != server:
            _begun = _Begun(server, environment, cores)
        begun = _begun
    if begun.environment != environment or not begun.cores >= cores:
        return False
    return begun.answers and _is_ready(begun)


def _is_ready(begun: _Begun) -> bool:
    end = time.monotonic() + _IMPORT_SECONDS
    while time.monotonic() < end:
        try:
            stat = Path(f"/proc/{begun.server}/stat").read_text()
        except OSError:
            return False
        if re.search(r"\) [ZX]", stat):
            return False
        if f"({READY})" in stat:
            return True
        time.sleep(0.005)
    _give_up()
    return False


def _give_up() -> None:
    global _begun
    _begun = _begun and replace(_begun, answers=False)


def pays(count: int) -> bool:
    """Return whether the next `count` processes should be copies.

    A program's first should not if it is alone: it would wait for the server's imports as long as
    for its own.
    """
    global _asked
    _asked += count
    return _asked > 1


def start_copy(target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Start a process, a copy of the server where that is possible."""
    if begin():
        process: BaseProcess = _Copy(target=target, args=args, name=name, daemon=True)
        with contextlib.suppress(OSError, EOFError):  # the server was killed, or does not answer
            process.start()
            return process
    return start_new(target, args, name)


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self._reading = threading.Lock()
        self._told, sender = _request(self._fds)  # type: ignore[attr-defined]
        # While it is open, the copy takes its parent to be alive.
        self.finalizer = util.Finalize(self, _close, (self._told, sender))
        if not _answered(self._told):
            _give_up()
            raise TimeoutError
        self.pid = forkserver.read_signed(self._told)
        with open(sender, "wb", closefd=False) as file:
            file.write(data.getbuffer())
        # The server reports when a process ends. The kernel does so even after the server's end.
        self.sentinel = self._told
        with contextlib.suppress(OSError):
            self.sentinel = os.pidfd_open(self.pid)
            util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            with self._reading:
                if self.returncode is None:
                    self.returncode = self._status()
        found: int | None = self.returncode
        return found

    def _status(self) -> int:
        with contextlib.suppress(OSError, EOFError):
            if _answered(self._told):
                return int(forkserver.read_signed(self._told))
        return UNKNOWN


def _request(descriptors: list[int]) -> tuple[int, int]:
    """Ask the server for a copy, which gets the descriptors.

    Returns the ends of two pipes: the server's, which tells the copy's process id and exit status,
    and the copy's, which reads what it is to do.
    """
    if len(descriptors) > _MOST_DESCRIPTORS:
        raise OSError("too many descriptors")
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        # First: the server would end if it were then sent nothing.
        told, tells = os.pipe()
        ours.callback(os.close, told)
        theirs.callback(os.close, tells)
        receiver, sender = os.pipe()
        ours.callback(os.close, sender)
        theirs.callback(os.close, receiver)
        alive: int = _server._forkserver_alive_fd  # type: ignore[attr-defined]
        tracker: int = resource_tracker.getfd()  # type: ignore[assignment]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(_server._forkserver_address)  # type: ignore[attr-defined]
            reduction.sendfds(client, [receiver, tells, alive, tracker, *descriptors])
        ours.pop_all()
    return told, sender


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _answered(descriptor: int) -> bool:
    """Wait until the server has answered, or has ended; continue one that was stopped."""
    for seconds in _ANSWER_SECONDS:
        if wait([descriptor], seconds):
            return True
        if _begun is not None:
            with contextlib.suppress(OSError):
                os.kill(_begun.server, signal.SIGCONT)
    return False


class _Copy(OwnProcess, ForkServerProcess):
    # Of its own children, as in new processes: else numba makes a semaphore, which one that is
    # killed leaves behind.
    _start_method = "spawn"

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to the copy, first what it is to inherit of this process."""
        return {"_inherited": _Inherited.of_this_process()} | self.__dict__

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        """Work, then do what other processes do as their interpreter ends."""
        status: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            util._flush_std_streams()  # type: ignore[attr-defined]
            ctypes.CDLL(None).fflush(None)
        return status


@dataclass(frozen=True)
class _Inherited:
    """What a child has of its parent, and a copy takes when it is sent."""

    environment: Mapping[str, str]
    outputs: Mapping[int, Any]  # those that are open, by descriptor
    cores: frozenset[int]
    limits: Mapping[int, tuple[int, int]]
    blocked: frozenset[int]  # signals
    umask: int
    niceness: int

    @classmethod
    def of_this_process(cls) -> "_Inherited":
        import resource

        outputs = {}
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                outputs[descriptor] = reduction.DupFd(descriptor)
        kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
        status = Path("/proc/self/status").read_text()  # another thread may make a file meanwhile
        return cls(
            dict(os.environ),
            outputs,
            frozenset(os.sched_getaffinity(0)),
            {kind: resource.getrlimit(kind) for kind in kinds},
            frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            int(re.findall(r"Umask:\s*(\d+)", status)[0], 8),
            os.getpriority(os.PRIO_PROCESS, 0),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _take, (type(self), tuple(vars(self).values()))


def _take(kind: type[_Inherited], values: tuple[Any, ...]) -> None:
    """Make it that of this process, a copy."""
    import resource

    import numpy as np

    sent = kind(*values)
    # Held by the program alone, so that the server, and with it what the kernel does for its
    # copies then, ends with the program.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(sent.environment)
    for descriptor, output in sent.outputs.items():
        own = output.detach()
        os.dup2(own, descriptor)
        os.close(own)
    os.sched_setaffinity(0, sent.cores)
    for limit, value in sent.limits.items():
        with contextlib.suppress(ValueError, OSError):  # raised since: only root may
            resource.setrlimit(limit, value)
    os.umask(sent.umask)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, sent.niceness)
    signal.pthread_sigmask(signal.SIG_SETMASK, sent.blocked)
    importlib.invalidate_caches()
    np.random.seed()  # otherwise all copies would draw the same


@contextlib.contextmanager
def searching_alike() -> Iterator[None]:
    """Let Python's processes that are started meanwhile find modules where this one does."""
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109
    changes = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    former = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
