"""Progress of `fit` as Keras shows it: a bar for each epoch, or a line."""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.artifacts.epochs import logs_of
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.errors import InputError
from tandem.nn.callbacks.base import renamed
from tandem.processes.supervisor import ProgressReporter
from tandem.training.messages import Notice, Progress
from tandem.training.run_spec import RunSpec
from tandem.validation import shown

Verbose = Literal["auto"] | int

_WIDTH = 20  # characters of a bar
_SECONDS = 0.1  # least time between two drawings


def chosen(verbose: Verbose) -> int:
    """Choose how progress is shown: 0 not at all, 1 by bars, 2 by lines.

    "auto" is bars on a terminal or in a notebook, else lines.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise InputError(f"verbose: found {shown(verbose)}, expected auto, 0, 1 or 2")
    if verbose != "auto":
        return int(verbose)
    # A notebook's stdout is of ipykernel; it shows a bar as a terminal does.
    return 1 if sys.stdout.isatty() or "ipykernel" in sys.modules else 2


@dataclass
class _Epoch:
    """An epoch on its way."""

    number: int
    begun: float
    steps: int = 0
    step: int = 0


class EpochProgress(ProgressReporter):
    """Prints the progress of a run.

    Parameters
    ----------
    spec : RunSpec
    verbose : int
        0, 1 or 2, see `chosen`.
    metrics : mapping of str to str
        The names of metrics in records, by those in Keras.
    """

    def __init__(self, spec: RunSpec, verbose: int, metrics: Mapping[str, str]) -> None:
        self._spec, self._verbose, self._metrics = spec, verbose, metrics
        self._epoch: _Epoch | None = None
        self._records: list[TrainRecord] = []
        self._drawn = 0.0

    def report(self, message: object) -> None:
        if not self._verbose:
            return
        if isinstance(message, Progress) and message.mode == "train":
            self._step(message)
        elif isinstance(message, TrainRecord):
            self._records.append(message)
        elif isinstance(message, ValidationRecord):
            self._end(message)
        elif isinstance(message, Notice):
            _write(f"{message.text}\n")

    def _step(self, message: Progress) -> None:
        if self._epoch is None or self._epoch.number != message.epoch:
            self._epoch = _Epoch(message.epoch, time.monotonic())
            self._records = [r for r in self._records if r.epoch == message.epoch]
            _write(f"Epoch {message.epoch}/{self._spec.config.n_epochs}\n")
        self._epoch.step, self._epoch.steps = message.step, message.steps
        now = time.monotonic()
        if self._verbose == 1 and (now - self._drawn >= _SECONDS or message.step == message.steps):
            self._drawn = now
            _write(f"\r{self._line(self._epoch, None)}\033[K")

    def _end(self, record: ValidationRecord) -> None:
        if self._epoch is None:
            return
        line = self._line(self._epoch, record)
        _write(f"\r{line}\033[K\n" if self._verbose == 1 else f"{line}\n")
        self._epoch, self._records = None, []

    def _line(self, epoch: _Epoch, record: ValidationRecord | None) -> str:
        seconds = time.monotonic() - epoch.begun
        done = epoch.step / max(epoch.steps, 1)
        filled = round(_WIDTH * done)
        bar = "━" * filled + "╺" * (filled < _WIDTH) + "─" * (_WIDTH - filled - 1)
        each = 1000 * seconds / max(epoch.step, 1)
        timing = f"{seconds:.0f}s {each:.0f}ms/step"
        parts = [f"{epoch.step}/{epoch.steps}"]
        parts += [bar, timing] if self._verbose == 1 else ["-", timing]
        so_far = record or ValidationRecord(epoch.number, 0, math.nan, math.nan, math.nan, 0)
        values = renamed(logs_of(so_far, self._records), self._metrics)
        values.pop("learning_rate", None)
        return " ".join(parts) + "".join(f" - {name}: {v:.4f}" for name, v in values.items())

    def close(self) -> None:
        if self._epoch is not None and self._verbose == 1:
            _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
