"""Processes that begin as copies of one that has imported PyTorch and PyTensor.

Importing them takes a process seconds. The fork server of `multiprocessing` does it once; each
process is then a copy of it, made within milliseconds, and shares the memory of what was imported.
What a process would inherit of the program, a copy has from the server, as it was when that began.
So it is sent: environment, standard output and error, processor cores, limit of open files, blocked
signals. Libraries have read the environment by then: once it has changed, processes are started
anew, as on other systems than Linux.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import (
    forkserver,
    parent_process,
    popen_forkserver,
    reduction,
    set_start_method,
    util,
)
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any

from tandem.processes.spawn import OwnProcess, start_new

LIBRARIES = "tandem.training.libraries"
"""Module that the server imports."""

UNKNOWN = 256
"""Exit status, which no process has, of a copy whose server has ended before it."""

_TOLD_SECONDS = 1.0  # for the server to tell of a process that has ended
_UNREAD = ("PYTEST_CURRENT_TEST",)  # which changes, and is read by no library

# Until 3.11.1 every user of the machine could have had the server start processes.
_IS_SAFE = sys.platform == "linux" and sys.version_info >= (3, 11, 1)
_server = forkserver.ForkServer()  # not the one that others may use in this process
_changing = threading.RLock()


@dataclass(frozen=True)
class _Begun:
    server: int  # process id
    environment: Mapping[str, str]


_begun: _Begun | None = None
_asked = 0  # processes that could be copies


def begin() -> bool:
    """Start the server, unless it runs; return whether processes can be its copies.

    It inherits blocked signals: those of Ctrl-C have to be.
    """
    global _begun
    if not _IS_SAFE or parent_process() is not None:
        return False
    environment = {name: os.environ[name] for name in os.environ if name not in _UNREAD}
    with _changing:
        try:
            with searching_alike():
                _server.set_forkserver_preload([LIBRARIES])
                _server.ensure_running()
        except OSError:  # also in a child of `os.fork`, which can't wait for the server
            return False
        server: int = _server._forkserver_pid  # type: ignore[attr-defined]
        if _begun is None or _begun.server != server:
            _begun = _Begun(server, environment)
        return _begun.environment == environment


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
        with contextlib.suppress(OSError, EOFError):  # the server was killed
            process.start()
            return process
    return start_new(target, args, name)


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        with _changing:
            connect = forkserver.connect_to_new_process
            forkserver.connect_to_new_process = _server.connect_to_new_process
            try:
                super()._launch(process_obj)  # type: ignore[misc]
            finally:
                forkserver.connect_to_new_process = connect
        # The server reports when a process ends. The kernel does so even after the server's end.
        self._told = self.sentinel
        with contextlib.suppress(OSError):
            self.sentinel = os.pidfd_open(self.pid)
            util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            if not wait([self._told], _TOLD_SECONDS) and _begun is not None:
                with contextlib.suppress(OSError):
                    os.kill(_begun.server, signal.SIGCONT)  # it was stopped
            try:
                self.returncode = forkserver.read_signed(self._told)
            except (OSError, EOFError):
                self.returncode = UNKNOWN
        found: int | None = self.returncode
        return found


class _Copy(OwnProcess, ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to the copy, with what it is to inherit of this process."""
        return self.__dict__ | {"_inherited": _Inherited.of_this_process()}

    def run(self) -> None:
        self.__dict__.pop("_inherited").take()
        super().run()


@dataclass(frozen=True)
class _Inherited:
    """What a child has of its parent, and a copy is sent."""

    environment: Mapping[str, str]
    outputs: Mapping[int, Any]  # those that are open, by descriptor
    cores: frozenset[int]
    open_files: tuple[int, int]
    blocked: frozenset[int]  # signals

    @classmethod
    def of_this_process(cls) -> "_Inherited":
        import resource

        outputs = {}
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                outputs[descriptor] = reduction.DupFd(descriptor)
        return cls(
            dict(os.environ),
            outputs,
            frozenset(os.sched_getaffinity(0)),
            resource.getrlimit(resource.RLIMIT_NOFILE),
            frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        )

    def take(self) -> None:
        """Make it that of this process, a copy."""
        import resource

        import numpy as np

        # Held by the program alone, so that the server, and with it what the kernel does for its
        # copies then, ends with the program.
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(self.environment)
        for descriptor, sent in self.outputs.items():
            own = sent.detach()
            os.dup2(own, descriptor)
            os.close(own)
        os.sched_setaffinity(0, self.cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.open_files)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        np.random.seed()  # otherwise all copies would draw the same
        # As in new processes: else numba makes a semaphore, which one that is killed leaves behind.
        set_start_method("spawn", force=True)


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
