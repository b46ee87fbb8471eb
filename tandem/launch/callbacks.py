"""The callbacks of a run, called from the reports of its trainers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from tandem.artifacts.epochs import epochs_of, logs_of
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records
from tandem.artifacts.run_folder import RECORD, list_checkpoints
from tandem.callbacks import METHODS
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.processes.heartbeat import HeartbeatTable
from tandem.processes.messages import Failed
from tandem.processes.supervisor import Outcome, ProgressReporter
from tandem.registry import find_class
from tandem.training.early_end import reason_to_end
from tandem.training.messages import Continuation, EpochEnded
from tandem.training.run_spec import RunSpec


def find_callbacks(names: Sequence[str]) -> list[type]:
    """Import the classes that the setting names; raise InputError where one is no callback."""
    found = []
    for name in names:
        kind = find_class("callbacks", name)
        if not any(hasattr(kind, method) for method in METHODS):
            raise InputError(
                f"callbacks: found {name} without methods of a callback, expected at least one of "
                f"{', '.join(METHODS)}"
            )
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            raise InputError(
                f"callbacks: found {name}, which is not made without arguments ({error}), expected "
                "a class that needs none"
            ) from error
        found.append(kind)
    return found


class Callbacks:
    """The callbacks of a program, in order, over all restarts of its run.

    They are `objects` with methods of `tandem.callbacks.Callback`, then those that the setting
    names. After one has failed, no more is called.
    """

    def __init__(self, objects: Sequence[Any] = ()) -> None:
        self.failure: Failed | None = None
        self.error: Exception | None = None  # that is the failure
        self._objects = objects
        self._each: list[tuple[str, Any]] | None = None  # None before training
        self._ended = 0  # epochs whose ends have been reported, or lie before this program
        self._record: dict[str, Any] | None = None  # of the last epoch

    def are_awaited(self, config: Config) -> bool:
        """Return whether there are any, for which trainers wait at the end of epochs."""
        return bool(self._objects or config.callbacks)

    def begin(self, spec: RunSpec) -> Outcome | None:
        """Make the callbacks and report the start of training, once.

        Returns a failure of one, or the outcome of a run that ends by what one has missed.
        """
        if self._each is not None:
            return None
        names = spec.config.callbacks
        self._each = [(type(each).__name__, each) for each in self._objects]
        for name, kind in zip(names, find_callbacks(names), strict=True):
            self._each.append((name, self._safely(name, "__init__", kind)))
        self._ended = epochs_done(spec)
        settings = TypeAdapter(dict[str, Any]).dump_python(dict(spec.config), mode="json")
        answers = self._call("on_train_begin", settings)
        return self._failed() or (Outcome(0) if any(each is True for each in answers) else None)

    def end_missed(self, spec: RunSpec) -> Outcome | None:
        """Report the end of the epoch that is resumed after a restart, if it has been missed.

        The checkpoint was written, and the run failed before its callbacks were called. Returns the
        outcome of a run that ends by that.
        """
        if self._each is None or epochs_done(spec) <= self._ended:
            return None
        done = epochs_of(read_records(spec.config.weights_path / RECORD))
        missed = [epoch for epoch in done if self._ended < epoch[0].epoch <= epochs_done(spec)]
        ends = [self.end_epoch(*epoch) for epoch in missed]
        return self._failed() or (Outcome(0) if any(ends) else None)

    def begin_epoch(self, epoch: int) -> None:
        """Report the start of an epoch, counted from 1."""
        self._call("on_epoch_begin", epoch)

    def end_epoch(self, record: ValidationRecord, train: Sequence[TrainRecord]) -> bool:
        """Report the end of an epoch, with its validation and the reports of its training.

        Returns whether one ends training by that, or has failed.
        """
        self._ended, self._record = record.epoch, summarised(record, train)
        answers = self._call("on_epoch_end", record.epoch, self._record)
        return self.failure is not None or any(answer is True for answer in answers)

    def rates(self) -> tuple[float, ...]:
        """The learning rates of the next epoch's steps that an object decides; else none."""
        return next((each.rates() for each in self._objects if hasattr(each, "rates")), ())

    def end(self, config: Config, outcome: Outcome) -> Outcome:
        """Report the end of training; return its outcome, or the failure of a callback."""
        if self._each is None or self.failure is not None:
            return outcome
        newest = next((str(path) for path in list_checkpoints(config.weights_path)[-1:]), None)
        self._call(
            "on_train_end", {"status": outcome.status, "weights": newest, "record": self._record}
        )
        return self._failed() or outcome

    def _call(self, method: str, *arguments: object) -> list[object]:
        return [
            self._safely(name, method, function, *arguments)
            for name, callback in self._each or ()
            if (function := getattr(callback, method, None))
        ]

    def _safely(
        self, name: str, method: str, function: Callable[..., Any], *arguments: object
    ) -> Any:
        """Call a function unless one has failed; an exception is the failure."""
        if self.failure is None:
            try:
                return function(*arguments)
            except Exception as error:
                self.error = error
                self.failure = Failed.of(f"callback {name}, {method}", error, "fault")
        return None

    def _failed(self) -> Outcome | None:
        """Log a failure that no process has ended with, and return it."""
        if self.failure is None:
            return None
        outcome = Outcome(1, self.failure)
        outcome.explain()
        return outcome


class CallbackReporter(ProgressReporter):
    """Passes reports on to another reporter, and calls callbacks at their time."""

    def __init__(self, spec: RunSpec, reporter: ProgressReporter, callbacks: Callbacks) -> None:
        self._spec, self._reporter, self._callbacks = spec, reporter, callbacks
        self._train = reports_before(spec)  # of this epoch
        header = spec.header if spec.resumed is not None else None
        self._history = () if header is None else header.state.history
        self._validation: ValidationRecord | None = None  # the last
        self.stderr = reporter.stderr

    @property
    def failure(self) -> Failed | None:
        return self._callbacks.failure

    def begin(self, table: HeartbeatTable, pids: Mapping[str, int]) -> None:
        self._reporter.begin(table, pids)
        self._callbacks.begin_epoch(epochs_done(self._spec) + 1)

    def report(self, message: object) -> object:
        self._reporter.report(message)
        if isinstance(message, TrainRecord):
            self._train.append(message)
        elif isinstance(message, ValidationRecord):
            self._validation = message
        elif isinstance(message, EpochEnded) and self._validation is not None:
            ends = self._end_epoch(self._validation)
            return Continuation(ends, self._callbacks.rates())
        return None

    def _end_epoch(self, record: ValidationRecord) -> bool:
        """Call the callbacks at the end of an epoch, and the start of the next; whether it ends."""
        ends = self._callbacks.end_epoch(record, self._train)
        self._train = []
        self._history = (*self._history, record.monitored)
        config = self._spec.config
        goes_on = record.epoch < config.n_epochs and not reason_to_end(config, self._history)
        if goes_on and not ends:
            self._callbacks.begin_epoch(record.epoch + 1)
        return ends

    def close(self) -> None:
        self._reporter.close()


def reports_before(spec: RunSpec) -> list[TrainRecord]:
    """The reports of an epoch that is continued, up to the checkpoint."""
    path = spec.config.weights_path / RECORD
    if spec.resumed is None or spec.header is None or not path.exists():
        return []
    state = spec.header.state
    reports = [each for each in read_records(path) if isinstance(each, TrainRecord)]
    return [each for each in reports if each.epoch == state.epoch + 1 and each.step <= state.step]


def epochs_done(spec: RunSpec) -> int:
    """Whole epochs before the start of a run."""
    return 0 if spec.resumed is None or spec.header is None else spec.header.state.epoch


class EpochRecord(dict[str, Any]):
    """The record of an epoch for callbacks, and its `logs` under Keras's names."""

    logs: Mapping[str, float]


def summarised(record: ValidationRecord, train: Sequence[TrainRecord]) -> EpochRecord:
    """The record of an epoch: its validation, and means of its training reports."""

    def mean(key: str) -> float | None:
        values = [getattr(each, key) for each in train]
        return None if not values or None in values else fmean(values)

    found = {
        # Of crops there is one in training.
        **{key: v for key, v in asdict(record).items() if key not in ("crops", "metrics")},
        **record.metrics,
        "train_loss": mean("loss"),
        "train_top1_error": mean("top1_error"),
        "images_per_second": mean("images_per_second"),
        "learning_rate": train[-1].learning_rate if train else None,
    }
    summary = EpochRecord(found)
    summary.logs = logs_of(record, train)
    return summary
