"""What every child process of a run does first."""

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InputError
from tandem.files import remove_partials
from tandem.run.heartbeat import Board, Heart, wake_when_parent_ends


@dataclass(frozen=True)
class Membership:
    """What a process needs to be a member of a run.

    Attributes
    ----------
    board : Board
        The signs of life.
    place : int
        This process's on the board.
    folder : Path or None
        Where it writes, if it does: what it leaves half written there when it has to end at once is
        removed.
    """

    board: Board
    place: int
    folder: Path | None = None


def enter(membership: Membership, target: Callable[..., None], *arguments: object) -> None:
    """Make this process a member of a run, then do its work: the target of every child process."""
    settle(membership)
    target(*arguments)


def settle(membership: Membership) -> None:
    """Make this process a member of a run.

    Ctrl-C reaches the whole group of processes, and a cluster's SIGTERM all of a job, but the
    launcher alone decides what follows. The process takes its name, as ``trainer-0``, where the
    system shows it (``ps -o comm``).
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    wake_when_parent_ends()
    folder = membership.folder
    clean = None if folder is None else lambda: remove_partials(folder)
    Heart(membership.board, membership.place, clean).start()
    comm = Path("/proc/self/comm")
    if comm.exists():
        comm.write_text(multiprocessing.current_process().name.replace(" ", "-"))


def describe(error: BaseException) -> str:
    """An exception in one line: its message where the user can put it right, else its type too."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
