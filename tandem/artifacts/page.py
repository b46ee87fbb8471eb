"""Pages of HTML that need no other file: text, tables, drawings and pictures."""

import base64
import io
import warnings
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import explained
from tandem.files import make_folder, write_text

if TYPE_CHECKING:
    from PIL import Image

# Nothing is fetched or executed: names of classes and files come from elsewhere.
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 70rem; margin: 1rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }}
img {{ max-width: 100%; height: auto; }}
.wide {{ overflow: auto; max-height: 40rem; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.1rem 0.8rem 0.1rem 0; text-align: left; vertical-align: top; }}
th {{ position: sticky; top: 0; background: white; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style>
</head>
<body>
<h1>{title}</h1>
"""


class Page:
    """A page, part by part in their order."""

    def __init__(self, title: str) -> None:
        self._parts = [_HEAD.format(title=escape(title))]

    def section(self, title: str, text: str = "") -> None:
        """Begin a section, with a paragraph if it has text."""
        self._parts.append(f"<h2>{escape(title)}</h2>\n")
        if text:
            self.text(text)

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>\n")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add a table, whose cells are texts and numbers."""
        cells = "".join(f"<th>{escape(name)}</th>" for name in head)
        lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
        self._parts.append(f'<div class="wide"><table><tr>{cells}</tr>\n{lines}</table></div>\n')

    def figure(self, figure: Any, description: str) -> None:
        """Add a drawing, a Figure of matplotlib."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # of a class's name that the font lacks
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        self._image("svg+xml", buffer.getvalue(), description)

    def picture(self, image: "Image.Image", description: str) -> None:
        """Add a picture."""
        buffer = io.BytesIO()
        image.save(buffer, format="png")
        self._image("png", buffer.getvalue(), description)

    def write(self, path: Path) -> None:
        """Write the page, whole or not at all; raises InputError where that is impossible."""
        with explained(path, "cannot be written"):
            make_folder(path.parent)
            write_text(path, "".join([*self._parts, "</body>\n</html>\n"]))

    def _image(self, kind: str, content: bytes, description: str) -> None:
        data = base64.b64encode(content).decode()
        alternative = escape(description, quote=True)
        self._parts.append(f'<img alt="{alternative}" src="data:image/{kind};base64,{data}">\n')


def _cell(value: object) -> str:
    if isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, int):
        value = f"{value:,}"
    else:
        return f"<td>{escape(str(value))}</td>"
    return f'<td class="number">{value}</td>'
