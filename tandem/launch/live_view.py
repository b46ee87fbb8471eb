"""Live view of a run on a terminal: all its processes, with log lines above.

Importing this module imports rich: only the launcher does, and only on a terminal.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.artifacts.metrics_log import describe_metrics
from tandem.launch.status import Status, duration
from tandem.processes.heartbeat import HeartbeatTable
from tandem.processes.supervisor import ProgressReporter
from tandem.training.messages import STAGES, Activity

WIDEST = 88  # columns: a line that is not wrapped when the window becomes a little narrower
PER_SECOND = 2  # refreshes, of about 3 ms of processor time each

_LABELS = {
    **{activity: (text, "cyan") for activity, text in STAGES.items()},
    Activity.STARTING: ("starting", "dim"),
    Activity.COMPUTING: ("computing", "green"),
    Activity.WAITING: ("waiting for loader", "yellow"),
    Activity.EXCHANGING: ("exchanging", "magenta"),
    Activity.VALIDATING: ("validating", "cyan"),
    Activity.SAVING: ("writing checkpoint", "blue"),
    Activity.READING: ("reading", "green"),
    Activity.IDLE: ("slot filled", "dim"),
    Activity.AWAITING_CALLBACKS: ("waiting for callbacks", "yellow"),
}


class LiveView(ProgressReporter):
    """Shows a run until it is closed, below log lines and the output of its processes.

    The cursor is never hidden, and no setting of the terminal is changed: however the program ends,
    by SIGKILL too, the terminal is as it was.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        self._names: Sequence[str] = ()
        self._pids: Mapping[str, int] = {}
        self._console = Console(file=sys.stderr, force_terminal=True, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._output, stderr = multiprocessing.Pipe(duplex=False)
        self.stderr: Connection = stderr
        self._reader = threading.Thread(target=self._print_output, name="output", daemon=True)
        self._redirected = _redirect_logging(_LineWriter(self.print))
        self._live.start()
        self._console.show_cursor(True)
        self._reader.start()

    def begin(self, table: HeartbeatTable, pids: Mapping[str, int]) -> None:
        self._activities = table.activities  # usable after the table is closed
        self._names, self._pids = table.names, pids
        self.stderr.close()  # so that the pipe ends with the processes

    def print(self, text: str) -> None:
        """Print lines above the view, unchanged and not wrapped."""
        with contextlib.suppress(OSError):  # of a terminal that was closed, while the run ends
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self.stderr.close()
        self._reader.join(1.0)  # the last output of the processes may be in the pipe still
        with contextlib.suppress(OSError):
            self._live.stop()
        for handler, stream in self._redirected:
            handler.setStream(stream)

    def _print_output(self) -> None:
        """Print what the processes write, line by line, until the last has ended."""
        rest = b""
        while chunk := os.read(self._output.fileno(), 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.print(line.decode(errors="replace"))
        if rest:
            self.print(rest.decode(errors="replace"))

    def _render(self) -> RenderableType:
        width = min(self._console.width, WIDEST)
        parts = [_bars(self._status, width), _figures(self._status)]
        if self._names:
            activities = dict(zip(self._names, self._activities.tolist(), strict=True))
            parts.append(_processes(activities, self._pids, self._status.saving, width))
        return Group(*parts)


def _bars(status: Status, width: int) -> RenderableType:
    now, spec = status.progress, status.spec
    if now is None:
        return Text(f"{spec.config.weights_dir}: {status.starting.strip()}")
    epoch = f"epoch {now.epoch} of {spec.config.n_epochs}, " if spec.job == "train" else ""
    part = "training" if now.mode == "train" else "validation"
    title = f"{spec.config.weights_dir}: {epoch}{part}"
    left = status.seconds_left
    table = Table.grid(padding=(0, 2))
    table.width = width
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    steps = f"{now.step:,} of {now.steps:,} steps"
    table.add_row("epoch", ProgressBar(total=now.steps, completed=now.step), steps)
    rest = f"{100 * status.done:.1f} %, {'?' if left is None else duration(left)} left"
    table.add_row("run", ProgressBar(total=1.0, completed=status.done), rest)
    return Group(Text(title, overflow="ellipsis", no_wrap=True), table)


def _figures(status: Status) -> Text:
    lines = []
    if (train := status.train) is not None:
        error = "" if train.top1_error is None else f"top-1 error {100 * train.top1_error:.1f} %   "
        lines.append(
            f"training    loss {train.loss:.4f}   {error}{_metrics(train.metrics)}"
            f"{train.images_per_second:.1f} images/s   rate {train.learning_rate:.3g}"
        )
    if (validation := status.validation) is not None and validation.images:
        both = {"top-1": validation.top1_error, "top-5": validation.top5_error}
        errors = (f"{n} error {100 * e:.1f} %   " for n, e in both.items() if not math.isnan(e))
        lines.append(
            f"validation  loss {validation.loss:.4f}   {''.join(errors)}"
            f"{_metrics(validation.metrics)}after epoch {validation.epoch}"
        )
    if train is not None:
        seconds = {
            "computing": train.compute_seconds,
            "waiting for loader": train.load_wait_seconds,
            "exchanging": train.exchange_seconds,
        }
        whole = sum(seconds.values()) or 1.0
        shares = [f"{name} {100 * part / whole:.0f} %" for name, part in seconds.items()]
        lines.append("time        " + "   ".join(shares))
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis", end="\n" if lines else "")


def _metrics(metrics: Mapping[str, float]) -> str:
    return f"{describe_metrics(metrics, '   ')}   " if metrics else ""


def _processes(
    activities: Mapping[str, int], pids: Mapping[str, int], saving: bool, width: int
) -> RenderableType:
    """Show a line for each trainer, with its loader beside it."""
    table = Table.grid(padding=(0, 2))
    table.width = width
    for ratio in (1, None):
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, ratio=ratio, overflow="ellipsis")
        table.add_column(no_wrap=True, justify="right")
    table.add_row("", "", "memory", *(["", "", "memory"] if "loader 0" in pids else []))
    trainers = sum(name.startswith("trainer") for name in pids)
    for rank in range(trainers):
        cells: list[RenderableType] = []
        for name in (f"trainer {rank}", f"loader {rank}"):
            if name in pids:
                label, style = _LABELS[Activity(activities[name])]
                if saving and name == "trainer 0" and activities[name] != Activity.SAVING:
                    label += ", checkpoint"
                cells += [name, Text(label, style), memory(pids[name])]
        table.add_row(*cells)
    return table


def memory(pid: int) -> str:
    """Format the resident memory of a process, shared memory included."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return f"{pages * os.sysconf('SC_PAGE_SIZE') / 1e9:.2f} GB"
    return "-"


class _LineWriter:
    """A stream of log lines that prints each by a function."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line

    def write(self, text: str) -> None:
        self._print_line(text.removesuffix("\n"))

    def flush(self) -> None:
        """Do nothing: lines are printed at once."""


def _redirect_logging(stream: _LineWriter) -> list[tuple[logging.StreamHandler[Any], Any]]:
    """Redirect what would be logged to the terminal; return handlers with their former streams."""
    return [
        (handler, handler.setStream(stream))
        for name in (None, "tandem")
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.stderr, sys.__stderr__)
    ]
