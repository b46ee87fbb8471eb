"""Name what is in pictures, with the weights of a run.

Files and folders:      tandem classify --weights runs/demo/epoch-0016.safetensors cat.jpg pets/
The standard input:     tandem classify --weights FILE - < cat.jpg
A list of files:        xargs --arg-file list.txt tandem classify --weights FILE
JSON, for programs:     tandem classify --weights FILE --json pets/
Ten crops of each:      tandem classify --weights FILE --ten_crops pets/
A drawing of each:      tandem classify --weights FILE --show drawings pets/

The exit status is 1 if a picture could not be read; the others are classified.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.cli import CommandLine, Options, PathOption, option, run_program
from tandem.config.fields import Names
from tandem.data.decode import PICTURE_SUFFIXES, BadPictureError, keep_memory
from tandem.layers.network import ALEXNET

if TYPE_CHECKING:
    from tandem.classify.classifier import Classifier, Guess

log = logging.getLogger(__name__)

STDIN = "-"
_BARS = 5  # of a drawing
_SWITCH = "true or false"
# Names that people bring from other programs.
ANSWERS = {
    **dict.fromkeys(("gpu", "gpus", "devices", "cuda"), "device"),
    **dict.fromkeys(("checkpoint", "ckpt", "model", "resume", "pretrained"), "weights"),
    **dict.fromkeys(("arch", "net"), "network"),
    **dict.fromkeys(("topk", "top_k"), "top"),
    **dict.fromkeys(
        ("image", "images", "input", "picture", "pictures", "file", "data"),
        "pictures are named without an option, such as classify.py --weights FILE cat.jpg pets/",
    ),
}


class ClassifyOptions(Options):
    """Options of ``classify.py``."""

    pictures: tuple[str, ...] = option(
        ..., "files and folders, or - for the standard input", "files or folders", "arguments"
    )
    weights: PathOption = option(..., "checkpoint, or folder of a run", "a path", "text")
    mean: str | None = option(
        None, "mean image, .npy (default: that of the run's data set)", "a file", "text"
    )
    network: str = option(ALEXNET, "network of the checkpoint", "module:class", "text")
    layers: Names = option(
        (), "lowerings of your own layers", "a list such as [my_module:swish]", "list"
    )
    top: int = option(5, "guesses for each picture", "a whole number of at least 1", ge=1)
    ten_crops: bool = option(
        False, "average over corners, centre and their mirror images: ten times the work", _SWITCH
    )
    json_lines: bool = option(False, "one JSON object a line", _SWITCH, alias="json")
    show: PathOption | None = option(
        None,
        "folder for a drawing of each picture: its probabilities, and what mattered to them",
        "a folder",
        "text",
    )
    batch_size: int = option(64, "crops at a time", "a whole number of at least 1", ge=1)
    device: str = option("cpu", "where to compute", "cpu, cuda:0, cuda:1, ...", "text")


def run_classification(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Classify the pictures that the command line names; return the exit status.

    It is 0, also where the reader of the output stops early; 1 if a picture could not be read,
    though the others were; 2 after other bad input; 130 after Ctrl-C.
    """
    line = CommandLine(arguments, description, program, ANSWERS)
    return run_program(ClassifyOptions, classify, line)


def classify(options: ClassifyOptions) -> int:
    """Print what is in pictures; the exit status."""
    from tandem.classify.classifier import Classifier

    classifier = Classifier.load(
        options.weights,
        options.mean,
        options.ten_crops,
        options.device,
        options.network,
        options.layers,
    )
    keep_memory()
    at_once = max(1, options.batch_size // len(classifier.crops))
    report = _Report(options.json_lines)
    pictures = find_pictures(options.pictures)
    try:
        while batch := list(islice(pictures, at_once)):
            _classify(classifier, batch, options, report)
    except BrokenPipeError:
        # The reader, such as head, has enough; at exit nothing may be left to write to it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 1 if report.bad else 0


def find_pictures(given: Sequence[str]) -> Iterator[str]:
    """Yield the path of every picture, in order; those in a folder sorted by path.

    Given are files, with any suffix; folders, in which files with the suffix of a picture are
    found; or ``-``, the standard input. A path that does not exist, or a folder without a picture,
    is yielded as it is, to be reported.
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
    """Prints results as they come, and counts the pictures that could not be read."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._drawn: set[str] = set()  # names of drawings
        self.bad = 0

    def name(self, picture: str, guesses: "Sequence[Guess]") -> None:
        if self._as_json:
            self._write(json.dumps({"picture": picture, "guesses": [asdict(g) for g in guesses]}))
            return
        self._write(picture)
        for guess in guesses:
            wnid = "" if guess.wnid in (None, guess.name) else f"  ({guess.wnid})"
            self._write(f"  {100 * guess.probability:6.2f} %  {guess.name}{wnid}")

    def drawing(self, folder: Path, picture: str) -> Path:
        """Return the path of a picture's drawing, another one for each."""
        stem = "stdin" if picture == STDIN else Path(picture).stem
        names = chain([stem], (f"{stem}-{number}" for number in count(2)))
        name = next(name for name in names if name not in self._drawn)
        self._drawn.add(name)
        return folder / f"{name}.png"

    def refuse(self, picture: str, reason: str) -> None:
        self.bad += 1
        log.error("error: %s", reason)
        if self._as_json:
            self._write(json.dumps({"picture": picture, "error": reason}))

    def _write(self, line: str) -> None:
        # The name of a file may hold bytes that are not text.
        sys.stdout.write(line.encode("utf-8", "replace").decode("utf-8") + "\n")


def _classify(
    classifier: "Classifier", pictures: Sequence[str], options: ClassifyOptions, report: _Report
) -> None:
    """Classify a few pictures together, and report in their order."""
    prepared: dict[int, np.ndarray] = {}
    reasons: dict[int, str] = {}
    for number, picture in enumerate(pictures):
        try:
            prepared[number] = _prepare(classifier, picture)
        except BadPictureError as error:
            reasons[number] = str(error)
    guesses = iter(
        classifier.guesses(np.stack([*prepared.values()]), options.top) if prepared else ()
    )
    for number, picture in enumerate(pictures):
        if number in reasons:
            report.refuse(picture, reasons[number])
        else:
            report.name(picture, best := next(guesses))
            if options.show is not None:
                path = report.drawing(options.show, picture)
                _show(classifier, prepared[number], best, path, options.batch_size)
    sys.stdout.flush()


def _show(
    classifier: "Classifier", picture: np.ndarray, guesses: "Sequence[Guess]", path: Path, most: int
) -> None:
    from tandem.classify.explanation import draw, importance, write

    at_once = max(1, most // len(classifier.crops))
    lost = importance(classifier, picture, guesses[0].number, at_once)
    seen = picture[classifier.window, classifier.window]
    write(path, draw(seen, guesses[:_BARS], lost))
    log.info("wrote %s", path)


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
