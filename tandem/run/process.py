"""What every child process of a run does first."""

import multiprocessing
import signal
from pathlib import Path

from tandem.errors import InputError


def settle() -> None:
    """Make this process a member of a run.

    Ctrl-C reaches the whole group of processes, but the launcher alone decides what follows. The
    process takes its name, as ``trainer-0``, where the system shows it (``ps -o comm``).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    comm = Path("/proc/self/comm")
    if comm.exists():
        comm.write_text(multiprocessing.current_process().name.replace(" ", "-"))


def describe(error: BaseException) -> str:
    """An exception in one line: its message where the user can put it right, else its type too."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
