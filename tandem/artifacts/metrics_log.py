"""The record of a run: one JSON object a line, appended and flushed as things happen.

Wherever a user sees them (records, log lines, names of checkpoints) epochs and steps count from 1:
``epoch`` is the one being trained, or just validated, and ``step`` the number of steps of the whole
run that are done. Errors are fractions. JSON has no NaN and no infinity, so a loss that is not
finite is written as null, and read back as NaN.
"""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, ConfigDict, Field

from tandem.artifacts.checkpoint import RunState
from tandem.errors import InputError, explained
from tandem.files import replacing
from tandem.validation import parse_json, shown, validated

Count = Annotated[int, Field(strict=True, ge=0)]
Real = Annotated[float, Field(strict=True)]
# Null is read as NaN.
Loss = Annotated[Real, BeforeValidator(lambda value: math.nan if value is None else value)]


class _Strict:
    """Base of records: other keys than the fields are refused."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class TrainRecord(_Strict):
    """Means over all trainers since the last such record."""

    event: ClassVar[str] = "train"
    epoch: Count
    step: Count
    loss: Loss  # mean cross-entropy, in nats
    top1_error: Real | None  # None with print_train_error: false
    learning_rate: Loss  # of the last step
    images_per_second: Loss  # of all trainers together
    compute_seconds: Loss  # this and the next two of trainer 0
    load_wait_seconds: Loss
    exchange_seconds: Loss
    metrics: Mapping[str, Loss] = field(default_factory=dict)  # those chosen, by name
    images: Count = 0  # over which these are means, counted where each epoch is reported


@dataclass(frozen=True)
class ValidationRecord(_Strict):
    """Loss and errors over all validation pictures."""

    event: ClassVar[str] = "validation"
    epoch: Count
    step: Count
    loss: Loss
    top1_error: Loss
    top5_error: Loss
    images: Count
    metrics: Mapping[str, Loss] = field(default_factory=dict)  # those chosen, by name
    crops: Count = 1  # of each image, whose probabilities are averaged

    @property
    def monitored(self) -> dict[str, float]:
        """Values that decisions may follow from; NaN for what is not finite, as in checkpoints."""
        if not self.images:
            return {}
        found = {
            "validation_loss": self.loss,
            "top1_error": self.top1_error,
            "top5_error": self.top5_error,
            **self.metrics,
        }
        return {key: value if math.isfinite(value) else math.nan for key, value in found.items()}


@dataclass(frozen=True)
class NotFiniteRecord(_Strict):
    """A minibatch whose loss or gradient is infinite or not a number."""

    event: ClassVar[str] = "not_finite"
    epoch: Count
    step: Count  # its number if it had been done
    minibatch: Count  # in the epoch, from 1
    action: str  # stop, skip or rollback
    pictures: tuple[str, ...]  # names in the manifest, of the trainers concerned


Record = TrainRecord | ValidationRecord | NotFiniteRecord

_KINDS: dict[str, type[Record]] = {
    kind.event: kind for kind in (TrainRecord, ValidationRecord, NotFiniteRecord)
}


def describe_metrics(metrics: Mapping[str, float], between: str = ", ") -> str:
    """Metrics with their values, in a line."""
    return between.join(f"{name} {value:.4f}" for name, value in metrics.items())


def to_json(record: Record) -> str:
    """Format as one line, without its end: the event, then the fields in their order.

    A field at its default is left out.
    """
    values = {
        each.name: _plain(each.type, value)
        for each in fields(record)
        if (value := getattr(record, each.name)) not in (each.default, {})
    }
    return json.dumps({"event": record.event, **values}, allow_nan=False)


def from_json(line: str | bytes) -> Record:
    """Read what `to_json` wrote; raises InputError where `line` is not a record."""
    try:
        values = parse_json(line)
    except ValueError as error:
        raise InputError(str(error)) from error
    if not isinstance(values, dict):
        raise InputError(f"holds {shown(values)}, expected a JSON object")
    event = values.pop("event", None)
    kind = _KINDS.get(event) if isinstance(event, str) else None
    if kind is None:
        raise InputError(f"event is {shown(event)}, expected one of {', '.join(_KINDS)}")
    return validated(kind, values)


class MetricsLog:
    """A record open for appending; a context manager.

    The file is created if it is missing; an unfinished last line of an earlier process is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained(path, "the record cannot be written"):
            self._file = path.open("ab+", buffering=0)
        _end_last_line(self._file.fileno(), path.read_bytes())

    def append(self, record: Record) -> None:
        """Write one line and flush it to the system; raises InputError, e.g. for a full disk."""
        line = to_json(record).encode() + b"\n"
        with explained(self._path, "cannot be written"):
            while line:
                line = line[self._file.write(line) :]

    def complete(self, latest: Sequence[Record]) -> None:
        """Append those of the latest records, a few, that are not among the last lines."""
        lines = self._path.read_bytes().splitlines()[-2 * len(latest) :] if latest else []
        there = {_place(from_json(line)) for line in lines}
        for record in latest:
            if _place(record) not in there:
                self.append(record)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager: wait for other processes that have locked the file."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def sync(self) -> None:
        """Flush all lines to the disk; raises InputError where that fails."""
        with explained(self._path, "cannot be written"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


Place = tuple[str, int, int, int]


def _place(record: Record) -> Place:
    """By what a line is known; steps that are left out in a row have one number."""
    return record.event, record.epoch, record.step, getattr(record, "minibatch", 0)


def read_records(path: Path) -> list[Record]:
    """Read a record without an unfinished last line; raises InputError for other bad lines."""
    return [record for _, record in _lines(path)]


def truncate_after(path: Path, state: RunState) -> None:
    """Drop the lines after a checkpoint, whole or not at all.

    A resumed run repeats these steps, and each step is recorded only once: a trainer that was
    slow may have written what another had added for it.
    """
    kept: dict[Place, bytes] = {}
    for line, record in _lines(path):
        if _lies_before(record, state):
            kept.setdefault(_place(record), line + b"\n")
    with replacing(path) as partial:
        partial.write_bytes(b"".join(kept.values()))


def _lies_before(record: Record, state: RunState) -> bool:
    """Return whether a run that resumes from `state` will not write this line again."""
    if isinstance(record, ValidationRecord):
        # A checkpoint written during a validation has the same step as the validation.
        return record.epoch <= state.epoch
    return record.step <= state.step


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    with explained(path, "cannot be read as a record"):
        *whole, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            yield line, from_json(line)
        except InputError as error:
            reason = "; ".join(str(error).splitlines())
            raise InputError(f"{path}, line {number}: not a record of a run: {reason}") from error
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
    except InputError:
        return False
    return True


def _plain(kind: Any, value: Any) -> Any:
    """Convert to what JSON can hold: Python's numbers for NumPy's."""
    if kind is Count:
        return int(value)
    if kind in (str, tuple[str, ...]):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(Loss, each) for name, each in value.items()}
    return float(value) if value is not None and math.isfinite(value) else None
