"""What trainers and ranks of a pool import, for the process of which they are copies.

`tandem.processes.fork_server` starts it. Nothing here may start a thread or ask for a GPU, which no
copy would have.
"""

import atexit
import contextlib
import importlib
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

import numpy as np

from tandem.garbage import uncollected
from tandem.processes.child import continue_when_parent_ends, show_name
from tandem.processes.fork_server import READY

_MODULES = (
    "tandem.training.worker",
    "tandem.training.compiled_network",
    "tandem.training.division",
    "tandem.training.shards",
    "tandem.parallel.rank",
    "tandem.loops",
)


def _nothing(_: np.ndarray) -> None:
    pass


def _end(server: int) -> None:
    """End with the program: remove what one that was killed leaves of the server's address."""
    if os.getpid() != server or hasattr(sys, "last_type"):  # a copy; by an error
        return
    if address := forkserver._forkserver._forkserver_address:  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            Path(address).unlink(missing_ok=True)
            Path(address).parent.rmdir()
    os._exit(0)


continue_when_parent_ends()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # of which the server has to hear
# What can't be imported, a copy tries again, and reports.
with uncollected(), contextlib.suppress(Exception):
    for _name in _MODULES:
        importlib.import_module(_name)
    importlib.import_module("tandem.loops").compile_loop(_nothing, np.zeros(1))  # numba's first
atexit.register(_end, os.getpid())  # last, and so called first
show_name(READY)
