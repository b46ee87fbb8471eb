"""Make the pictures of the demo again: train it in a terminal, and draw the run and its data.

demo/prepare.sh && python -m docs.make_pictures
python -m docs.make_pictures --only trace cost rates placement
python -m docs.make_pictures --only terminals --pages keras models

The run takes a few minutes, and runs/demo must not exist before. The picture of its live view is
the terminal's screen in the middle of an epoch; the others are what ``tandem plot`` and
``tandem look`` draw, with fewer colours. The trace, of a shorter run, is shown by Perfetto's page.
The prediction is of machines like that of machine.yaml; this one is measured if there is no such
file. Learning rates and the bytes that trainers receive are computed. terminals.yaml has the
commands of guides whose result is what a terminal shows.
"""

import argparse
import io
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from matplotlib.pyplot import figure as new_figure
from matplotlib.pyplot import subplots
from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tandem.__main__ import main as tandem
from tandem.artifacts.run_folder import list_checkpoints
from tandem.classify import Classifier
from tandem.cost.program import MACHINE
from tandem.optim import SCHEDULES, Moment
from tandem.placement_program import DividedNetwork, PlacementOptions
from tandem.plot import draw, read_run
from tandem.trace.chrome import read_trace
from tandem.trace.merge import MERGED
from tandem.trace.spans import STEP, spans_of
from tandem.validation import read_yaml
from tests.support.pages import code_blocks, copy_project, in_shell
from tests.support.perfetto import perfetto_screenshot
from tests.support.terminal import Terminal

HERE = Path(__file__).resolve().parent
COMMAND = "python train.py --config demo/config.yaml"
PREDICTION = (
    "tandem cost --ranks 1 2 4 8 16 --ranks_each 1 --network_bw 1e9 --network_lat 5e-5"
    " --exchange gradients --bucket_mb 25"
)
ROWS, COLUMNS = 16, 90
MOST_BYTES = 60_000  # of a picture
WIDEST, HIGHEST = 110, 100  # columns and rows of what is no screen
SHOWN = 8  # the first of two steps of the trace that are drawn
PAGE = 1200, 820  # pixels
PAGE_END = 735  # of what is drawn of it: to the end of a selected span's details
RANKS = 2, 4, 8
EPOCHS = 60
RATES: dict[str, dict[str, Any]] = {
    "step": {},
    "every": {},
    "poly": {},
    "cosine": {},
    "onecycle": {},
    "table": {"lr_table": {0: 0.005, 10: 0.01, 50: 0.002}},
}
MOMENT = re.compile(r"epoch 11 of 16, training\s.* 1\d of 23 steps", re.DOTALL)
_NAMES = {"brown": "yellow", "default": None}  # of colours, where pyte and rich differ


def main() -> None:
    """Write the pictures beside this file."""
    parser = argparse.ArgumentParser(
        "python -m docs.make_pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    makers = {
        "run": draw_run,
        "learned": draw_learned,
        "classified": draw_classified,
        "trace": draw_trace,
        "cost": draw_cost,
        "rates": draw_rates,
        "placement": draw_placement,
    }
    pages = read_yaml(HERE / "terminals.yaml")
    parser.add_argument("--only", nargs="+", choices=[*makers, "terminals"])
    parser.add_argument("--pages", nargs="+", choices=pages, default=[*pages])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.only is None or "terminals" in chosen.only:
            draw_terminals(Path(folder), {page: pages[page] for page in chosen.pages})
        for name in [n for n in makers if n in (chosen.only or makers)]:
            for picture in makers[name](Path(folder)):
                image = Image.open(picture).convert("RGB")
                for colours in (64, 32, 16):  # as many as fit
                    few = image.quantize(colours, dither=Image.Dither.NONE)
                    few.save(target := HERE / picture.name, optimize=True)
                    if target.stat().st_size < MOST_BYTES:
                        break


def draw_run(folder: Path) -> Iterator[Path]:
    """Train the demo, write its live view, and draw its data and what it recorded."""
    run = HERE.parent / "runs" / "demo"
    with Terminal("train.py", COMMAND.split()[2:], rows=ROWS, columns=COLUMNS) as terminal:
        terminal.wait_for(lambda: bool(MOMENT.search("\n".join(terminal.lines))), seconds=900)
        picture = screen_as_svg(terminal.screen, COMMAND)
        if status := terminal.wait(seconds=900):
            raise SystemExit(status)
    (HERE / "live-view.svg").write_text(picture)
    sheet, curves = folder / "look.png", folder / "curves.png"
    draw([read_run(run, "demo")]).savefig(curves, dpi=90)
    checked("look", *COMMAND.split()[2:], "--count", "16", "--output", sheet)
    yield from (curves, sheet)


def draw_learned(folder: Path) -> Iterator[Path]:
    """Draw the demo's errors of validation, and a digit of each class with the name it gets."""
    run = HERE.parent / "runs" / "demo"
    classes = sorted((HERE.parent / "data" / "demo" / "pictures" / "val").iterdir())
    digits = [min(each.iterdir()) for each in classes]
    named = Classifier.load(list_checkpoints(run)[-1]).classify(digits)
    figure = new_figure(figsize=(9, 2.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2))
    validations, axis = read_run(run, "demo").validation, left.subplots()
    axis.plot([v.epoch for v in validations], [100 * v.top1_error for v in validations], ".-")
    axis.set(xlabel="epochs", title="Wrong digits (%)", ylim=(0, 100))
    for axis, digit, guesses in zip(right.subplots(2, 5).flat, digits, named, strict=True):
        axis.imshow(Image.open(digit), cmap="gray")
        axis.set_title(f"{guesses[0].name}, {guesses[0].probability:.0%}", fontsize=8)
        axis.set_axis_off()
    yield saved(figure, folder / "learned.png")


def draw_classified(folder: Path) -> Iterator[Path]:
    """Classify a digit with the demo's weights, and draw what mattered."""
    run, digit = HERE.parent / "runs" / "demo", "data/demo/pictures/val/digit_3/0045.JPEG"
    checked("classify", "--weights", run, "--show", folder, digit)
    (drawing,) = folder.glob("*0045*")
    yield drawing.rename(folder / "classified.png")


def draw_trace(folder: Path) -> Iterator[Path]:
    """Trace two epochs of the demo, and draw two of its steps as Perfetto's page shows them."""
    run, picture = folder / "traced", folder / "trace.png"
    options = ["--weights_dir", run, "--trace", "steps", "--n_epochs", "2", "--live_view", "false"]
    checked("train", *COMMAND.split()[2:], *options)
    checked("trace", run)
    trace = read_trace(run / MERGED)
    steps = [s for s in spans_of(trace) if (s.process, s.name) == (0, STEP)]
    first, second = steps[SHOWN : SHOWN + 2]
    margin = 0.05 * (second.end - first.begin)
    begin, end = first.begin - margin, second.end + margin
    perfetto_screenshot(run / MERGED, picture, begin, end, ("gradients", second.begin), PAGE)
    Image.open(picture).crop((0, 0, PAGE[0], PAGE_END)).save(picture)
    yield picture


def draw_cost(folder: Path) -> Iterator[Path]:
    """Predict AlexNet's step on several machines."""
    picture = folder / "cost.png"
    measured = [] if MACHINE.exists() else ["--calibrate"]
    checked(*PREDICTION.split()[1:], *measured, "--output", picture)
    yield picture


def draw_rates(folder: Path) -> Iterator[Path]:
    """Draw the learning rate of each policy that depends on nothing but the epoch."""
    figure, axis = subplots(figsize=(8, 3), layout="constrained")
    steps = 600
    for name, settings in RATES.items():
        schedule = SCHEDULES[name](**settings)
        moments = [
            Moment(EPOCHS * k // steps, EPOCHS * k / steps, EPOCHS, step=k, steps=steps)
            for k in range(steps)
        ]
        rates = [schedule.rate(0.01, moment) for moment in moments]
        axis.plot([moment.done for moment in moments], rates, label=name)
    axis.set(xlabel="epochs", ylabel="learning rate")
    axis.legend()
    yield saved(figure, folder / "rates.png")


def draw_placement(folder: Path) -> Iterator[Path]:
    """Draw the megabytes that a trainer of AlexNet receives in a step."""
    received: dict[str, list[float]] = {}
    for ranks in RANKS:
        for kind in ("replicated", "sharded"):
            divided = DividedNetwork.of(PlacementOptions(ranks=ranks, fully_connected=kind))
            if kind == "replicated":
                for exchange in ("average", "gradients"):
                    nbytes = divided.exchanged_if_replicated(exchange)
                    received.setdefault(exchange, []).append(nbytes / 1e6)
            else:
                nbytes = max(divided.received(divided.partitioned())) + divided.exchanged()
                received.setdefault(kind, []).append(nbytes / 1e6)
    figure, axis = subplots(figsize=(8, 3), layout="constrained")
    for number, (name, values) in enumerate(received.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(RANKS))]
        axis.bar_label(axis.bar(places, values, 0.25, label=name), fmt="%.0f")
    axis.set_xticks(range(len(RANKS)), [f"{ranks} trainers" for ranks in RANKS])
    axis.set_ylabel("MB received in a step")
    axis.legend()
    yield saved(figure, folder / "placement.png")


def draw_terminals(folder: Path, pages: Mapping[str, Any]) -> None:
    """Run the commands of pages in a copy of the project, and draw what they print."""
    copy = copy_project(folder)
    in_shell(copy, "demo/prepare.sh")
    (copy / "runs").mkdir()
    shutil.copytree(HERE.parent / "runs" / "demo", copy / "runs" / "demo")
    for page, about in pages.items():
        blocks = code_blocks(HERE / f"{page}.md", "python")
        for name, number in about.get("blocks", {}).items():
            (copy / name).write_text(blocks[number])
        in_shell(copy, about.get("before", ":"))
        printed = ""
        for command in about["shown"].splitlines():
            output = in_shell(copy, f"set +e\n{command}\ntrue").replace(f"{copy}/", "")
            printed += f"$ {command}\n{output.expandtabs()}"
        columns = min(WIDEST, max(COLUMNS, *map(len, printed.splitlines())))
        screen = pyte.Screen(columns, HIGHEST)
        pyte.Stream(screen).feed(printed.replace("\n", "\r\n"))
        screen.lines = screen.cursor.y
        (HERE / f"{page}.svg").write_text(screen_as_svg(screen, page))


def saved(figure: Any, picture: Path) -> Path:
    """Write a figure, and return where."""
    figure.savefig(picture, dpi=90)
    return picture


def checked(*command: object) -> None:
    """Run a program of ours, which must succeed."""
    if status := tandem([*map(str, command)]):
        raise SystemExit(status)


def screen_as_svg(screen: pyte.Screen, title: str) -> str:
    """Draw a terminal's screen with its colours, in the fonts that a reader has."""
    console = Console(record=True, width=screen.columns, file=io.StringIO(), force_terminal=True)
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        line = Text(no_wrap=True)
        for (colour, bold), alike in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
            words = "".join(cell.data for cell in alike)
            line.append(words, Style(color=_colour(colour), bold=bold))
        line.rstrip()
        console.print(line)
    fonts = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
    return console.export_svg(title=title, code_format=fonts.sub("", CONSOLE_SVG_FORMAT))


def _colour(name: str) -> str | None:
    name = re.sub(r"^bright", "bright_", name)
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return _NAMES.get(name, name)


if __name__ == "__main__":
    main()
