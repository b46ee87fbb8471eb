"""Errors that a user can put right, and the failure of a run."""


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
