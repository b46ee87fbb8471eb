"""Messages between a worker and its launcher: small frozen dataclasses."""

import traceback
from dataclasses import dataclass
from typing import Literal, Self

from tandem.errors import InputError

Kind = Literal["input", "agreed", "fault", "death", "consequence"]


@dataclass(frozen=True)
class Stop:
    """Request to end: finish the work in hand, save it, report `Finished`."""


@dataclass(frozen=True)
class Ready:
    """The worker is set up: from now on it has something to save when it is asked to stop."""


@dataclass(frozen=True)
class Finished:
    """The worker has done its work, or has stopped on request."""


@dataclass(frozen=True)
class Failed:
    """A worker cannot go on.

    The kinds: bad input; a failure on which all workers have agreed, so that each ends in good
    order; a fault of the program; an end seen from outside; a consequence of another worker's end.
    """

    who: str  # such as "trainer 0"
    kind: Kind
    message: str  # one sentence
    traceback: str  # the worker's own, or ""

    @classmethod
    def of(cls, who: str, error: BaseException, kind: Kind | None = None) -> Self:
        """Describe an exception; without a `kind` it is bad input or a fault, by its type."""
        kind = kind or ("input" if isinstance(error, InputError) else "fault")
        return cls(who, kind, describe(error), "".join(traceback.format_exception(error)))


def describe(error: BaseException) -> str:
    """Describe an exception in one line: its message, and its type unless the user can fix it."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
