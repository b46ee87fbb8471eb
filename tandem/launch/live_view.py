"""A run on a terminal: one view of all its processes. What is to be said stands above it.

Importing this module imports rich: only the launcher does, and only on a terminal.
"""

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.data.order import minibatch_count
from tandem.processes.heartbeat import Activity, HeartbeatTable
from tandem.training.messages import CheckpointBegun, CheckpointWritten, Progress
from tandem.training.run_spec import RunSpec

WIDEST = 88  # columns: a line that is not wrapped when the window becomes a little narrower
PER_SECOND = 2  # each takes a processor some 3 ms

_WORDS = {
    Activity.STARTING: ("starting", "dim"),
    Activity.COMPUTING: ("computing", "green"),
    Activity.WAITING: ("waiting for loader", "yellow"),
    Activity.EXCHANGING: ("exchanging", "magenta"),
    Activity.VALIDATING: ("validating", "cyan"),
    Activity.SAVING: ("writing checkpoint", "blue"),
    Activity.READING: ("reading", "green"),
    Activity.IDLE: ("slot filled", "dim"),
}

Clock = Callable[[], float]


class Pace:
    """Seconds per step: the mean of a hundred steps, later one that follows changes slowly."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._count = 0

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self._count += 1
        before = seconds if self.seconds is None else self.seconds
        self.seconds = before + max(1 / self._count, 0.01) * (seconds - before)


class Status:
    """What is known of how a run goes.

    Parameters
    ----------
    spec : RunSpec
        The run.
    clock : callable
        Seconds that never go back.
    """

    def __init__(self, spec: RunSpec, clock: Clock = time.monotonic) -> None:
        self.spec = spec
        self.progress: Progress | None = None
        self.train: TrainRecord | None = None
        self.validation: ValidationRecord | None = None
        self.saving = False
        self._clock, self._since = clock, clock()
        self._paces = {"train": Pace(), "validation": Pace()}

    def note(self, message: object) -> None:
        """Trainer 0 has reported something."""
        if isinstance(message, Progress):
            self._note_progress(message)
        elif isinstance(message, TrainRecord):
            self.train = message
        elif isinstance(message, ValidationRecord):
            self.validation = message
        elif isinstance(message, CheckpointBegun | CheckpointWritten):
            self.saving = isinstance(message, CheckpointBegun)

    def _note_progress(self, new: Progress) -> None:
        now, old = self._clock(), self.progress
        # The first step of all compiles; between the parts of an epoch lies other work.
        if old is not None and (old.mode, old.epoch, old.step + 1) == (
            new.mode,
            new.epoch,
            new.step,
        ):
            self._paces[new.mode].add(now - self._since)
        self._since, self.progress = now, new

    @property
    def done(self) -> float:
        """The part of all steps of training that is done, a fraction."""
        now, epochs = self.progress, self.spec.config.n_epochs
        if now is None:
            return 0.0
        if self.spec.job == "validate":
            return now.step / now.steps
        within = now.step / now.steps if now.mode == "train" else 1.0
        return (now.epoch - 1 + within) / epochs

    @property
    def seconds_left(self) -> float | None:
        """Until the end of the run, as it has gone so far; None is unknown."""
        now, spec = self.progress, self.spec
        train, validation = (self._paces[mode].seconds for mode in ("train", "validation"))
        if now is None or (train is None and validation is None):
            return None
        if spec.job == "validate":
            return None if validation is None else validation * (now.steps - now.step)
        if train is None:
            return None
        to_train = minibatch_count(spec.train.size, spec.global_batch)
        to_validate = minibatch_count(spec.validation.size, spec.global_batch)
        epochs = spec.config.n_epochs - now.epoch
        steps, checks = epochs * to_train, epochs * to_validate
        if now.mode == "train":
            steps, checks = steps + now.steps - now.step, checks + to_validate
        else:
            checks += now.steps - now.step
        return steps * train + checks * (train if validation is None else validation)


class LiveView:
    """Shows a run until it is closed. Log lines, and what its processes write, go above it.

    The cursor is never hidden, and no setting of the terminal is changed: however the program ends,
    by SIGKILL too, the terminal is as it was.

    Parameters
    ----------
    spec : RunSpec
        The run.

    Attributes
    ----------
    stderr : Connection or None
        Where the processes of the run are to write, instead of the terminal; None once they have
        been started.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._status = Status(spec)
        self._board: HeartbeatTable | None = None
        self._processes: Mapping[str, int] = {}
        self._console = Console(file=sys.stderr, force_terminal=True, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._words, stderr = multiprocessing.Pipe(duplex=False)
        self.stderr: multiprocessing.connection.Connection | None = stderr
        self._reader = threading.Thread(target=self._pass_on, name="words", daemon=True)
        self._handlers = _replace_handlers(self.say)
        self._live.start()
        self._console.show_cursor(True)
        self._reader.start()

    def begin(self, table: HeartbeatTable, processes: Mapping[str, int]) -> None:
        """The processes have been started.

        Parameters
        ----------
        table : HeartbeatTable
            Where they show what they are doing.
        processes : mapping of str to int
            Their names and numbers.
        """
        self._board, self._processes = table, processes
        self._give_up_stderr()

    def note(self, message: object) -> None:
        """Trainer 0 has reported something."""
        self._status.note(message)

    def say(self, text: str) -> None:
        """Print lines above the view, whole, as they are."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Take the view away."""
        self._give_up_stderr()
        self._reader.join(1.0)  # what the processes have said last is in the pipe
        self._live.stop()
        for old, new in self._handlers:
            logging.getLogger().removeHandler(new)
            logging.getLogger().addHandler(old)

    def _give_up_stderr(self) -> None:
        if self.stderr is not None:
            self.stderr.close()
            self.stderr = None

    def _pass_on(self) -> None:
        """Print what the processes write, line by line, until the last has ended."""
        rest = b""
        while chunk := os.read(self._words.fileno(), 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.say(line.decode(errors="replace"))
        if rest:
            self.say(rest.decode(errors="replace"))

    def _render(self) -> RenderableType:
        width = min(self._console.width, WIDEST)
        parts = [_bars(self._status, width), _figures(self._status)]
        if self._board is not None:
            parts.append(_processes(self._board, self._processes, self._status.saving, width))
        return Group(*parts)


def _bars(status: Status, width: int) -> RenderableType:
    now, spec = status.progress, status.spec
    if now is None:
        return Text(f"{spec.config.weights_dir}: starting")
    part = {"train": "training", "validation": "validation"}[now.mode]
    title = f"{spec.config.weights_dir}: {part}"
    if spec.job == "train":
        title = f"{spec.config.weights_dir}: epoch {now.epoch} of {spec.config.n_epochs}, {part}"
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
            f"training    loss {train.loss:.4f}   {error}"
            f"{train.images_per_second:.1f} images/s   rate {train.learning_rate:.3g}"
        )
    if (validation := status.validation) is not None:
        lines.append(
            f"validation  loss {validation.loss:.4f}   "
            f"top-1 error {100 * validation.top1_error:.1f} %   "
            f"top-5 error {100 * validation.top5_error:.1f} %   after epoch {validation.epoch}"
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


def _processes(
    beats: HeartbeatTable, processes: Mapping[str, int], saving: bool, width: int
) -> RenderableType:
    """A line for each trainer, with its loader beside it."""
    table = Table.grid(padding=(0, 2))
    table.width = width
    for ratio in (1, None):
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, ratio=ratio, overflow="ellipsis")
        table.add_column(no_wrap=True, justify="right")
    table.add_row("", "", "memory", *(["", "", "memory"] if "loader 0" in processes else []))
    activities = dict(zip(beats.names, beats.activities.tolist(), strict=True))
    trainers = sum(name.startswith("trainer") for name in processes)
    for rank in range(trainers):
        cells: list[RenderableType] = []
        for name in (f"trainer {rank}", f"loader {rank}"):
            if name in processes:
                word, style = _WORDS[Activity(activities[name])]
                if saving and name == "trainer 0" and activities[name] != Activity.SAVING:
                    word += ", checkpoint"
                cells += [name, Text(word, style), memory(processes[name])]
        table.add_row(*cells)
    return table


def memory(process: int) -> str:
    """How much memory a process has resident, what it shares with others included."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return f"{pages * os.sysconf('SC_PAGE_SIZE') / 1e9:.2f} GB"
    return "-"


def duration(seconds: float) -> str:
    """As 5:07, 3:12:45 or 2 d 03:12:45."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class _Above(logging.Handler):
    """Says each log record by a function."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            self._say(self.format(record))
        except Exception:
            self.handleError(record)


def _replace_handlers(say: Callable[[str], None]) -> list[tuple[logging.Handler, logging.Handler]]:
    """Have what would be logged to the terminal said; the old handlers and the new ones."""
    root = logging.getLogger()
    replaced: list[tuple[logging.Handler, logging.Handler]] = []
    for old in [*root.handlers]:
        if isinstance(old, logging.StreamHandler) and old.stream in (sys.stderr, sys.__stderr__):
            new = _Above(say)
            new.setFormatter(old.formatter)
            new.setLevel(old.level)
            root.removeHandler(old)
            root.addHandler(new)
            replaced.append((old, new))
    return replaced
