"""Errors that a user can put right, and the failure of a run."""

import contextlib
from collections.abc import Iterator


class InputError(Exception):
    """Something that the user gave cannot be used: a file, a folder, a setting, a device.

    The message names what was given, what was found and what was expected, in one sentence or two.
    A program prints it without a traceback and exits with status 2.
    """


class RunError(RuntimeError):
    """A run has ended before it was done.

    The message is the root cause in one line, with the process in which it lay, such as "trainer 0:
    was killed by SIGKILL"; a note has that process's traceback, if it left one.
    """


@contextlib.contextmanager
def explained(what: object, fault: str, *others: type[Exception]) -> Iterator[None]:
    """Context manager: turn an OSError, or one of `others`, into InputError "WHAT: FAULT: why"."""
    caught: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except caught as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what}: {fault}: {reason}") from error
