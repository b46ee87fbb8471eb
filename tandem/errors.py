"""Errors that a user can put right, as opposed to faults of the program."""


class InputError(Exception):
    """Something that the user gave cannot be used: a file, a folder, a setting, a device.

    The message names what was given, what was found and what was expected, in one sentence or two.
    A program prints it without a traceback and exits with status 2.
    """
