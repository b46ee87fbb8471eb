"""The command ``tandem VERB``, also ``python -m tandem VERB``: one program for each verb."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tandem import __version__


@dataclass(frozen=True)
class Verb:
    """A program of the command.

    The `entry`, "module:function", is called with the arguments, a description and the name of the
    program, and returns an exit status. The description is the docstring of its module, whose
    commands are those of ``tandem VERB``. The module is imported only when its program is called.
    """

    entry: str
    summary: str


VERBS = {
    "train": Verb("tandem.launch.train:run_training", "train a network, or continue a run"),
    "validate": Verb("tandem.launch.validate:run_validation", "loss and errors of saved weights"),
    "classify": Verb("tandem.classify.cli:run_classification", "name what is in pictures"),
    "preprocess": Verb(
        "tandem.preprocessing.program:run_preprocessing", "make batch files of pictures"
    ),
    "datasets": Verb(
        "tandem.datasets.program:run_datasets", "prepare MNIST, CIFAR and their like, or arrays"
    ),
    "models": Verb("tandem.catalogue:run_models", "list the networks"),
    "recipes": Verb("tandem.catalogue:run_recipes", "list the files of published settings"),
    "export": Verb("tandem.export.cli:run_export", "write weights as an ONNX file"),
    "convert": Verb("tandem.convert.cli:run_conversion", "read weights of other programs"),
    "demo": Verb("tandem.demo:run_demo", "train on handwritten digits, in a few minutes"),
    "plot": Verb("tandem.plot:run_plot", "draw one run or compare several"),
    "report": Verb("tandem.report:run_report", "write one page of a run"),
    "look": Verb("tandem.look:run_look", "draw pictures as the network gets them, count classes"),
    "trace": Verb("tandem.trace.program:run_trace", "where the time of a traced run goes"),
    "cost": Verb("tandem.cost.program:run_cost", "predict the time of a step, and how it scales"),
    "placement": Verb(
        "tandem.placement_program:run_placement", "explain how trainers divide a network"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names; return the exit status."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if verb in VERBS:
        # As for python -m tandem: a network may be a module in the current folder.
        if (here := os.getcwd()) not in sys.path:  # noqa: PTH109
            sys.path.append(here)
        return run_verb(verb, rest)
    if verb in ("-h", "--help", "--version"):
        sys.stdout.write(f"tandem {__version__}\n" if verb == "--version" else _help())
        return 0
    from tandem.validation import unknown

    is_option = verb.startswith("-")
    known = ["help", "version"] if is_option else VERBS
    message = unknown(verb, known, kind="option" if is_option else "verb")
    sys.stderr.write(f"error: {message}\n")
    return 2


def run_verb(verb: str, arguments: Sequence[str] | None, program: str | None = None) -> int:
    """Run the program of a verb; return its exit status.

    `program` is how it was started, by default ``tandem VERB``.
    """
    name, _, function = VERBS[verb].entry.partition(":")
    try:
        from tandem.cli import launch_commands

        module = importlib.import_module(name)
    except KeyboardInterrupt:  # imports take seconds; later the program sees to it
        sys.stderr.write("stopped by SIGINT\n")
        return 130
    program = program or f"tandem {verb}"
    description = launch_commands(module.__doc__, verb, program)
    return int(getattr(module, function)(arguments, description, program))


def _help() -> str:
    width = max(map(len, VERBS)) + 3
    lines = [f"  {verb:{width}}{VERBS[verb].summary}" for verb in VERBS]
    return "\n".join(
        [
            "usage: tandem VERB [--key VALUE ...]",
            "",
            "Train AlexNet with several processes, and use the trained network.",
            "",
            "verbs:",
            *lines,
            "",
            "'tandem VERB --help' describes one; 'tandem --version' prints the version.",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
