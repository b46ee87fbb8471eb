"""The frame of the three programs of preprocessing."""

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool

from tandem.cli import configure_logging, exit_status, log
from tandem.errors import InputError
from tandem.preprocessing.settings import Settings, read_settings
from tandem.validation import one_line


def run_program(
    description: str | None,
    work: Callable[[Settings], None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Read the settings and do `work`; return the exit status.

    It is 0; 1 when a process died; 2 after bad input or a full disk; 130 after Ctrl-C.
    """

    def read_and_work() -> int:
        try:
            work(read_settings(arguments, description))
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            raise InputError(f"{where}{error.strerror or one_line(error)}") from error
        except BrokenProcessPool:
            log.error(
                "error: a process that decodes pictures died, perhaps for lack of memory; the same "
                "command continues from there, with fewer --workers if necessary"
            )
            return 1
        return 0

    configure_logging()
    return exit_status(read_and_work, "stopped; the same command continues from there")
