"""JPEGs -> batch files, mean image, labels and manifest. Interrupted, the same command continues.

ImageNet in any known layout:   tandem preprocess --source DIR --tar-root-dir data/imagenet
Folders with one for a class:   tandem preprocess --train-img-dir pets/train --val-img-dir pets/val
Smaller pictures:               tandem preprocess --source DIR --image-size 128
The first 2,560 of each split:  tandem preprocess --source DIR --subset 2560
Settings in a file:             tandem preprocess --config paths.yaml
"""

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool

from tandem.cli import configure_logging, exit_status, log
from tandem.errors import InputError
from tandem.preprocessing.settings import Settings, read_settings
from tandem.validation import one_line


def run_preprocessing(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Make batch files, text files and labels; return the exit status, as `run_program` does."""

    def work(settings: Settings) -> None:
        # Not at the top: programs that only show their --help need none of it.
        from tandem.preprocessing.derive import write_labels, write_txt
        from tandem.preprocessing.prepare import prepare

        for step in (prepare, write_txt, write_labels):
            step(settings)

    return run_program(description, work, arguments, program)


def run_program(
    description: str | None,
    work: Callable[[Settings], None],
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> int:
    """Read the settings and do `work`; return the exit status.

    It is 0; 1 when a process died; 2 after bad input or a full disk; 130 after Ctrl-C.
    """

    def read_and_work() -> int:
        try:
            work(read_settings(arguments, description, program))
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
