"""The record of a run: one JSON object a line, appended and flushed as things happen.

Everywhere that a user sees them (records, log lines, names of checkpoints) epochs and steps count
from 1: ``epoch`` is the one being trained, or just validated, and ``step`` the number of steps of
the whole run that are done. Errors are fractions. JSON has no NaN and no infinity, so a loss that
is no longer finite is written as null, and read back as NaN.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tandem.artifacts.checkpoint import RunState
from tandem.errors import InputError
from tandem.files import replacing


@dataclass(frozen=True)
class TrainRecord:
    """How training went since the last such record, over all trainers.

    Attributes
    ----------
    epoch, step : int
        From 1.
    loss : float
        Mean cross-entropy of the training pictures, in nats.
    top1_error : float or None
        A fraction; None where it is not asked for (``print_train_error: false``).
    learning_rate : float
        Of the last step.
    images_per_second : float
        Of all trainers together.
    compute_seconds, load_wait_seconds, exchange_seconds : float
        Where the time of trainer 0 went.
    """

    event: ClassVar[str] = "train"
    epoch: int
    step: int
    loss: float
    top1_error: float | None
    learning_rate: float
    images_per_second: float
    compute_seconds: float
    load_wait_seconds: float
    exchange_seconds: float


@dataclass(frozen=True)
class ValidationRecord:
    """Loss and errors over every validation picture.

    Attributes
    ----------
    epoch, step : int
        Whole epochs and steps done.
    loss : float
        Mean cross-entropy, in nats.
    top1_error, top5_error : float
        Fractions.
    images : int
        How many pictures were counted.
    """

    event: ClassVar[str] = "validation"
    epoch: int
    step: int
    loss: float
    top1_error: float
    top5_error: float
    images: int


@dataclass(frozen=True)
class NotFiniteRecord:
    """A minibatch whose loss or gradient is infinite or not a number.

    Attributes
    ----------
    epoch, step : int
        From 1; the step that it would have been.
    minibatch : int
        Its number in the epoch, from 1.
    action : str
        What was done: ``stop``, ``skip`` or ``rollback``.
    pictures : tuple of str
        Names of the pictures, as the manifest has them, of the trainers where it happened.
    """

    event: ClassVar[str] = "not_finite"
    epoch: int
    step: int
    minibatch: int
    action: str
    pictures: tuple[str, ...]


Record = TrainRecord | ValidationRecord | NotFiniteRecord

_KINDS: dict[str, type[Record]] = {
    kind.event: kind for kind in (TrainRecord, ValidationRecord, NotFiniteRecord)
}


def to_json(record: Record) -> str:
    """One line, without its end: the event, then the fields in their order."""
    values = {
        field.name: _plain(field.type, getattr(record, field.name)) for field in fields(record)
    }
    return json.dumps({"event": record.event, **values}, allow_nan=False)


def from_json(line: str | bytes) -> Record:
    """Read what `to_json` wrote.

    Raises
    ------
    ValueError
        `line` is not a record; the message says why.
    """
    try:
        values = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    event = values.pop("event", None)
    kind = _KINDS.get(event) if isinstance(event, str) else None
    if kind is None:
        raise ValueError(f"event is {event!r}, expected one of {', '.join(_KINDS)}")
    names = [field.name for field in fields(kind)]
    if sorted(values) != sorted(names):
        raise ValueError(f"a {event} record has {', '.join(names)}; found {', '.join(values)}")
    return kind(**{field.name: _checked(field, values[field.name]) for field in fields(kind)})


class MetricsLog:
    """A record that is open for appending; use it in a ``with`` statement, or close it.

    A line that an earlier process left unfinished at the end is removed first, so that nothing is
    appended to it.

    Parameters
    ----------
    path : Path
        Is created where it is missing; its folder must exist.

    Raises
    ------
    InputError
        The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: the record cannot be written ({error.strerror})") from error
        _end_last_line(self._file.fileno(), path.read_bytes())

    def append(self, record: Record) -> None:
        """Write one line and hand it to the operating system.

        Raises
        ------
        InputError
            It can't be written; the disk is full, say.
        """
        line = to_json(record).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written ({error.strerror})") from error

    def sync(self) -> None:
        """Flush all lines to the disk.

        Raises
        ------
        InputError
            The disk does not take them.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written ({error.strerror})") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_records(path: Path) -> list[Record]:
    """Read a record; a last line that was never finished is left out.

    Raises
    ------
    InputError
        The file cannot be read, or a line of it is not a record.
    """
    return [record for _, record in _lines(path)]


def truncate_after(path: Path, state: RunState) -> None:
    """Drop what was recorded after a checkpoint, whole or not at all.

    A run that is resumed from a checkpoint goes through the later steps once more, and no step is
    to stand in the record twice.

    Parameters
    ----------
    path : Path
        The record.
    state : RunState
        Of the checkpoint.

    Raises
    ------
    InputError
        As `read_records`.
    """
    kept = [line + b"\n" for line, record in _lines(path) if _lies_before(record, state)]
    with replacing(path) as partial:
        partial.write_bytes(b"".join(kept))


def _lies_before(record: Record, state: RunState) -> bool:
    """Whether a run that goes on from `state` won't come to write this line."""
    if isinstance(record, ValidationRecord):
        # A checkpoint that was written in the middle of a validation has all steps before it.
        return record.epoch <= state.epoch
    return record.step <= state.step


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a record ({error.strerror})") from error
    for number, line in enumerate(whole, 1):
        try:
            yield line, from_json(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not a record of a run: {error}") from error
    if _is_record(rest):
        yield rest, from_json(rest)


def _end_last_line(descriptor: int, content: bytes) -> None:
    """Complete or remove what follows the last line end."""
    rest = content[content.rfind(b"\n") + 1 :]
    if _is_record(rest):
        os.write(descriptor, b"\n")
    elif rest:
        os.ftruncate(descriptor, len(content) - len(rest))


def _is_record(line: bytes) -> bool:
    try:
        from_json(line)
    except ValueError:
        return False
    return True


def _plain(kind: Any, value: Any) -> Any:
    """A value that JSON can hold: Python's numbers where NumPy's were given."""
    if kind is int:
        return int(value)
    if kind in (str, tuple[str, ...]):
        return value
    return float(value) if value is not None and math.isfinite(value) else None


def _checked(field: Any, value: Any) -> Any:
    if field.type is int:
        if type(value) is int and value >= 0:
            return value
        raise ValueError(f"{field.name} is {value!r}, expected a whole number")
    if field.type is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{field.name} is {value!r}, expected text")
    if field.type == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            return tuple(value)
        raise ValueError(f"{field.name} is {value!r}, expected a list of text")
    if value is None:
        return None if field.type == (float | None) else math.nan
    if (type(value) is int and abs(value) < 2**63) or type(value) is float:
        return float(value)
    raise ValueError(f"{field.name} is {value!r}, expected a number or null")
