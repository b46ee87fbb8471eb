"""What ``classify.py`` does. Importing this module is cheap."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from tandem.data.decode import PICTURE_SUFFIXES, BadPictureError, keep_memory
from tandem.errors import InputError
from tandem.launch.console import configure_logging
from tandem.launch.programs import interrupted, refuse
from tandem.layers.network import ALEXNET

if TYPE_CHECKING:
    from tandem.classify.classifier import Classifier, Guess

log = logging.getLogger(__name__)

STDIN = "-"


def run_classification(arguments: Sequence[str] | None, description: str | None) -> int:
    """Name what is in the pictures that the command line names.

    Parameters
    ----------
    arguments : sequence of str or None
        The command line; None is the process's own.
    description : str or None
        For ``--help``.

    Returns
    -------
    int
        Exit status: 0, also where nobody reads on; 1 if a picture could not be read, and the rest
        was; 2 after other bad input; 130 after Ctrl-C.
    """
    configure_logging()
    options = _parser(description).parse_intermixed_args(arguments)
    try:
        from tandem.classify.classifier import Classifier

        classifier = Classifier.load(
            options.weights, options.mean, options.ten_crops, options.device, options.network
        )
        keep_memory()
        at_once = max(1, options.batch_size // len(classifier.crops))
        report = _Report(options.json, sys.stdout)
        pictures = find_pictures(options.pictures)
        while batch := list(islice(pictures, at_once)):
            _classify(classifier, batch, options.top, report)
    except InputError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:
        # Who has read enough, as head does; nor is there anything left to be written at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 1 if report.bad else 0


def find_pictures(given: Sequence[str]) -> Iterator[str]:
    """The pictures that files and folders name, in order; those of a folder by their paths.

    Parameters
    ----------
    given : sequence of str
        Files, whatever they are called, folders, of which the files count whose suffix is that of a
        picture, or ``-`` for the standard input. What is not there, and a folder without a
        picture, is handed on, to be reported.

    Yields
    ------
    str
        Paths, and ``-``.
    """
    for name in given:
        if name == STDIN or not Path(name).is_dir():
            yield name
            continue
        found = False
        for folder, folders, files in os.walk(name):
            folders.sort()
            for file in sorted(files):
                if Path(file).suffix.lower() in PICTURE_SUFFIXES and not file.startswith("."):
                    found = True
                    yield str(Path(folder) / file)
        if not found:
            yield name


class _Report:
    """Tells results as they come.

    Attributes
    ----------
    bad : int
        How many pictures could not be read.
    """

    def __init__(self, as_json: bool, output: TextIO) -> None:
        self._as_json, self._output = as_json, output
        self.bad = 0

    def tell(self, picture: str, guesses: "Sequence[Guess]") -> None:
        """Name what is in a picture."""
        if self._as_json:
            self._write(json.dumps({"picture": picture, "guesses": [asdict(g) for g in guesses]}))
            return
        self._write(picture)
        for guess in guesses:
            wnid = "" if guess.wnid in (None, guess.name) else f"  ({guess.wnid})"
            self._write(f"  {100 * guess.probability:6.2f} %  {guess.name}{wnid}")

    def refuse(self, picture: str, reason: str) -> None:
        """Say why a picture could not be read."""
        self.bad += 1
        log.error("error: %s", reason)
        if self._as_json:
            self._write(json.dumps({"picture": picture, "error": reason}))

    def flush(self) -> None:
        """Show what has been told so far."""
        self._output.flush()

    def _write(self, line: str) -> None:
        # A file's name may hold bytes that are no text.
        self._output.write(line.encode("utf-8", "replace").decode("utf-8") + "\n")


def _classify(classifier: "Classifier", pictures: Sequence[str], top: int, report: _Report) -> None:
    """Name what is in some pictures, all at once, and report in their order."""
    prepared: dict[int, np.ndarray] = {}
    reasons: dict[int, str] = {}
    for place, picture in enumerate(pictures):
        try:
            prepared[place] = _prepare(classifier, picture)
        except BadPictureError as error:
            reasons[place] = str(error)
    guesses = iter(classifier.guesses(np.stack([*prepared.values()]), top) if prepared else ())
    for place, picture in enumerate(pictures):
        if place in reasons:
            report.refuse(picture, reasons[place])
        else:
            report.tell(picture, next(guesses))
    report.flush()


def _prepare(classifier: "Classifier", picture: str) -> np.ndarray:
    if Path(picture).is_dir():
        raise BadPictureError(f"{picture}: no picture is in this folder")
    if picture != STDIN:
        return classifier.prepare(picture)
    from tandem.classify.classifier import MOST_BYTES

    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    try:
        if len(content) > MOST_BYTES:
            raise BadPictureError(f"more than {MOST_BYTES} bytes")
        return classifier.prepare(content)
    except BadPictureError as error:
        raise BadPictureError(f"standard input: {error}") from None


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pictures", nargs="+", metavar="PICTURE", help="file or folder, or - for the standard input"
    )
    parser.add_argument("--weights", required=True, metavar="FILE", help="checkpoint to read")
    parser.add_argument(
        "--mean", metavar="FILE", help="mean image, .npy (default: that of the run's data set)"
    )
    parser.add_argument(
        "--network",
        default=ALEXNET,
        metavar="CLASS",
        help=f"network of the checkpoint, module:class (default: {ALEXNET})",
    )
    parser.add_argument("--top", type=_count, default=5, metavar="N", help="guesses (default: 5)")
    parser.add_argument(
        "--ten_crops",
        action="store_true",
        help="average over corners, centre and their mirror images, ten times the work",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--batch_size", type=_count, default=64, metavar="N", help="crops at a time (default: 64)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu, cuda:0, ... (default: cpu)"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
