"""What trainers and ranks of a pool import, for the process of which they are copies.

`tandem.processes.fork_server` starts it. Nothing here may start a thread or ask for a GPU, which no
copy would have.
"""

import atexit
import contextlib
import importlib
from multiprocessing import forkserver
from pathlib import Path

import numpy as np

from tandem.garbage import uncollected
from tandem.processes.child import continue_when_parent_ends, show_name

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


def _remove_address() -> None:
    """Remove what a program that was killed leaves of the server's address."""
    if address := forkserver._forkserver._forkserver_address:  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            Path(address).unlink(missing_ok=True)
            Path(address).parent.rmdir()


atexit.register(_remove_address)
continue_when_parent_ends()
show_name("libraries")
# What can't be imported, a copy tries again, and reports.
with uncollected(), contextlib.suppress(Exception):
    for _name in _MODULES:
        importlib.import_module(_name)
    importlib.import_module("tandem.loops").compile_loop(_nothing, np.zeros(1))  # numba's first
