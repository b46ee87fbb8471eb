"""A program on a pseudo-terminal, and what its screen shows."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterable
from typing import Self

import pyte

from tests.support.tiny import ROOT, group_members


class Terminal:
    """Runs a program of the project in a terminal of its own; use it in a ``with`` statement."""

    def __init__(
        self,
        program: str,
        arguments: Iterable[str],
        term: str = "xterm-256color",
        rows: int = 40,
        columns: int = 100,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        command = [sys.executable, program, *arguments]
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
            # Its size is the window's, not that of the terminal in which the tests run.
            kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            os.execve(command[0], command, {**kept, "TERM": term})
        self._set_size(rows, columns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in group_members(self.pid):
            os.kill(process, signal.SIGKILL)
        os.close(self._fd)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The screen and all that has scrolled off at the top, wrapped lines joined.

        A line as long as a row is joined to the next one, for the screen shows no difference.
        """
        width = self.screen.columns
        rows = ["".join(row[x].data for x in range(width)) for row in self.screen.history.top]
        rows += self.screen.display
        parts = [row if row.rstrip() == row else row.rstrip() + "\n" for row in rows]
        return "".join(parts)

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def resize(self, rows: int, columns: int) -> None:
        # pyte takes rows away at the top, and leaves the cursor where it is on the screen.
        row = self.screen.cursor.y - max(0, self.screen.lines - rows)
        self.screen.resize(rows, columns)
        self.screen.cursor.y = max(0, row)
        self._set_size(rows, columns)

    def wait_for(self, seen: Callable[[], bool], seconds: float = 90) -> None:
        """Wait until the screen shows something; fail if the program ends before."""
        deadline = time.monotonic() + seconds
        while not seen():
            if not self._read(deadline):
                raise AssertionError(f"the screen never showed it:\n{self.text}")

    def wait(self, seconds: float = 120) -> int:
        """Read until the program has ended; return its exit status."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"the program has not ended:\n{self.text}")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def hang_up(self, seconds: float = 60) -> int:
        """Close the terminal under the program; return its exit status."""
        os.close(self._fd)
        self._fd = os.open(os.devnull, os.O_RDONLY)
        deadline = time.monotonic() + seconds
        while (ended := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                raise AssertionError("the program has not ended")
            time.sleep(0.05)
        return os.waitstatus_to_exitcode(ended[1])

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self, deadline: float) -> bool:
        """Read the next output; return whether there can be more."""
        if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            found = os.read(self._fd, 1 << 16)
        except OSError:  # on Linux: the other side is closed
            return False
        self.raw += found
        self._stream.feed(found)
        return bool(found)
