"""Lists of networks, with parameters, operations and papers, and of recipes of their settings.

All networks:  tandem models
For programs:  tandem models --json
All recipes:   tandem recipes
For programs:  tandem recipes --json

Any other of `keras.applications` is a network too, as `keras.applications:Xception`.

A network is trained by `--network NAME`, with a recipe by `--config RECIPE`. Parameters are those
that are trained; operations are those of one picture's forward pass, a multiplication and an
addition being two. Both are of the published size.
"""

import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import tandem.models
from tandem.cli import CommandLine, Options, option, run_program
from tandem.config.command_line import RECIPES
from tandem.layers.network import ALEXNET, COLOURS, Network, NetworkDescription, build_network
from tandem.text_table import aligned
from tandem.validation import read_yaml

_SMALL = 32  # pixels, of CIFAR with its ten classes
_SIZE = re.compile(r"published for (\d+)")
_SOURCE = re.compile(r"References\n\s*-+\n\s*(.*?\d{4})\b(?:.*?(arXiv\s+[\d.]+\d))?", re.DOTALL)


class ListOptions(Options):
    """Options of ``tandem models`` and ``tandem recipes``."""

    as_json: bool = option(False, "one JSON object a line", "true or false", alias="json")


@dataclass(frozen=True)
class Recipe:
    """A file of published settings."""

    name: str
    network: str
    summary: str  # of its first comment


@dataclass(frozen=True)
class NetworkEntry:
    """A network at its published size."""

    name: str  # for --network
    recipes: tuple[str, ...]
    pixels: int
    classes: int
    parameters: int
    operations: float  # of one picture's forward pass
    source: str  # authors, year, and arXiv's number


FROM_KERAS = (
    NetworkEntry(
        "keras.applications:InceptionV3",
        (),
        299,
        1000,
        23_817_352,
        11_477_868_136,
        "Szegedy et al. 2016, arXiv 1512.00567",
    ),
    NetworkEntry(
        "keras.applications:MobileNet",
        (),
        224,
        1000,
        4_231_976,
        1_157_703_656,
        "Howard et al. 2017, arXiv 1704.04861",
    ),
)
"""Networks of other systems that `tandem.models` lacks; Keras itself is not imported."""


def run_models(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """List the networks; return the exit status."""

    def show(options: ListOptions) -> None:
        rows = [("network", "recipe", "pixels", "classes", "parameters", "operations", "source")]
        found = [*networks(), *FROM_KERAS]
        for each in found:
            sizes = f"{each.pixels}", f"{each.classes}", f"{each.parameters:,}"
            work = f"{each.operations / 1e9:.2f} G"
            rows.append((each.name, ", ".join(each.recipes), *sizes, work, each.source))
        _show(options, found, rows, (0, 1, 6))

    return run_program(ListOptions, show, CommandLine(arguments, description, program))


def run_recipes(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """List the recipes; return the exit status."""

    def show(options: ListOptions) -> None:
        found = recipes()
        rows = [("recipe", "network", "settings"), *(tuple(vars(each).values()) for each in found)]
        _show(options, found, rows, (0, 1, 2))

    return run_program(ListOptions, show, CommandLine(arguments, description, program))


def _show(
    options: ListOptions, found: Sequence[Any], rows: Sequence[tuple[str, ...]], left: Sequence[int]
) -> None:
    lines = [json.dumps(asdict(each)) for each in found] if options.as_json else []
    sys.stdout.write("\n".join(lines or aligned(rows, left=left)) + "\n")


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    found = []
    for path in sorted(RECIPES.glob("*.yaml")):
        comment = " ".join(
            line.removeprefix("#").strip()
            for line in path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        )
        summary = re.split(r"[,.:](?: |$)", comment)[0]
        found.append(Recipe(path.stem, str(read_yaml(path)["network"]), summary))
    return found


def networks() -> Iterator[NetworkEntry]:
    """All networks of this project: `alex_net` first, then those of `tandem.models`."""
    by_network: dict[str, list[str]] = {}
    for recipe in recipes():
        by_network.setdefault(recipe.network, []).append(recipe.name)
    modules = [m.name for m in pkgutil.iter_modules([str(Path(tandem.models.__file__).parent)])]
    for module in (ALEXNET.partition(":")[0], *(f"tandem.models.{name}" for name in modules)):
        for kind in vars(importlib.import_module(module)).values():
            is_own = inspect.isclass(kind) and kind.__module__ == module
            if is_own and issubclass(kind, Network) and not inspect.isabstract(kind):
                name = f"{module}:{kind.__name__}"
                yield _entry(name, kind, tuple(by_network.get(name, ())))


def _entry(name: str, kind: type[Network], recipes: tuple[str, ...]) -> NetworkEntry:
    import pytensor.tensor as pt
    from pytensor.graph.traversal import applys_between

    from tandem.ops.work import work_of

    pixels = int(_documented(kind, _SIZE)[1])
    classes = 10 if pixels == _SMALL else 1000
    width = max((read_yaml(RECIPES / f"{r}.yaml").get("width", 1.0) for r in recipes), default=1.0)
    network = build_network(NetworkDescription(pixels, classes, width, network=name))
    images = pt.tensor("images", dtype="float32", shape=(1, COLOURS, pixels, pixels))
    nodes = applys_between([images], [network.logits(images, None)])
    declared = network.parameters.declared.values()
    authors, arxiv = _documented(kind, _SOURCE).groups()
    return NetworkEntry(
        name,
        recipes,
        pixels,
        classes,
        sum(prod(parameter.shape) for parameter in declared if parameter.trainable),
        sum(work_of(node).flops for node in nodes),
        " ".join(", ".join(filter(None, (authors, arxiv))).split()),
    )


def _documented(kind: type, pattern: re.Pattern[str]) -> re.Match[str]:
    """Match the docstring of a class, or else that of the class it is derived from."""
    found = (pattern.search(inspect.cleandoc(base.__doc__ or "")) for base in kind.__mro__)
    match = next(filter(None, found), None)
    if match is None:
        raise LookupError(f"{kind.__name__}: its docstring has no {pattern.pattern!r}")
    return match
