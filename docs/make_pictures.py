"""Make the pictures of the demo again: train it in a terminal, and draw the run and its data.

demo/prepare.sh && python -m docs.make_pictures

The run takes a few minutes, and runs/demo must not exist before. The picture of its live view is
the terminal's screen in the middle of an epoch; the others are what ``tandem plot`` and
``tandem look`` draw, with fewer colours.
"""

import argparse
import io
import re
import tempfile
from itertools import groupby
from pathlib import Path

import pyte
from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tandem.__main__ import main as tandem
from tandem.plot import draw, read_run
from tests.support.terminal import Terminal

HERE = Path(__file__).resolve().parent
COMMAND = "python train.py --config demo/config.yaml"
ROWS, COLUMNS = 16, 90
MOMENT = re.compile(r"epoch 11 of 16, training\s.* 1\d of 23 steps", re.DOTALL)
_NAMES = {"brown": "yellow", "default": None}  # of colours, where pyte and rich differ


def main() -> None:
    """Train the demo, and write the pictures beside this file."""
    argparse.ArgumentParser("python -m docs.make_pictures", description=__doc__).parse_args()
    run = HERE.parent / "runs" / "demo"
    with Terminal("train.py", COMMAND.split()[2:], rows=ROWS, columns=COLUMNS) as terminal:
        terminal.wait_for(lambda: bool(MOMENT.search("\n".join(terminal.lines))), seconds=900)
        picture = screen_as_svg(terminal.screen, COMMAND)
        if status := terminal.wait(seconds=900):
            raise SystemExit(status)
    (HERE / "live-view.svg").write_text(picture)
    with tempfile.TemporaryDirectory() as folder:
        sheet, curves = Path(folder) / "look.png", Path(folder) / "curves.png"
        draw([read_run(run, "demo")]).savefig(curves, dpi=90)
        tandem(["look", *COMMAND.split()[2:], "--count", "16", "--output", str(sheet)])
        for file in (curves, sheet):
            image = Image.open(file).convert("RGB")
            image.quantize(64, dither=Image.Dither.NONE).save(HERE / file.name, optimize=True)


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
