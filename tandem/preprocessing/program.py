"""What the three programs share: settings in, one clear message and an exit status out."""

import logging
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

from tandem.errors import InputError
from tandem.preprocessing.settings import Settings, read_settings


def run_program(
    description: str, work: Callable[[Settings], None], argv: list[str] | None = None
) -> int:
    """Read the settings and do `work`.

    Returns
    -------
    int
        The exit status: 0; 2 after an error that the user can mend; 130 after Ctrl-C; 1 when a
        process died.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        work(read_settings(argv, description))
    except InputError as error:
        return _fail(f"error: {error}", 2)
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(f"error: {where}{reason}", 2)
    except BrokenProcessPool:
        return _fail(
            "error: a process that decodes pictures died, perhaps for want of memory; the same"
            " command goes on from there, with fewer --workers if need be",
            1,
        )
    except KeyboardInterrupt:
        return _fail("stopped; the same command goes on from there", 130)
    return 0


def _fail(message: str, status: int) -> int:
    sys.stderr.write(message + "\n")
    return status
