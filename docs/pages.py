"""Sources of the built pages outside docs/: the README and its like, and tables."""

import contextlib
import io
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tandem.__main__ import VERBS, main
from tandem.cli import sections
from tandem.config.schema import Config
from tandem.preprocessing.settings import Settings
from tandem.validation import declared, shown

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^]\\[]|\\.|!?\[[^]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
_ALONE = re.compile(r"^\[[^]]*\]\((\.\./[\w./-]+\.md)\)$", re.MULTILINE)


@cache
def included() -> dict[Path, str]:
    """The files outside docs/ that are pages, with the names of these pages.

    A line of a page that is nothing but a link to such a file stands for its content: on a host of
    repositories a reader follows the link, in the built pages the text is there.
    """
    return {
        (DOCS / target).resolve(): page.stem
        for page in sorted(DOCS.glob("*.md"))
        for target in _ALONE.findall(page.read_text())
    }


def built(text: str) -> str:
    """Return the text of a page of docs/ as Sphinx is to read it."""
    text = _ALONE.sub(_content, linked(text, DOCS))
    return re.sub(r"^<!-- (.*) -->$", lambda found: _MADE[found[1]](), text, flags=re.MULTILINE)


def _content(found: re.Match[str]) -> str:
    file = (DOCS / found[1]).resolve()
    return linked(file.read_text(), file.parent)


def linked(text: str, folder: Path) -> str:
    """Point the links of a text that lies in a folder to the built pages.

    A link to a Markdown file or folder that is no page becomes its text; any other file is offered
    for download.
    """

    def outside_code(part: str) -> str:
        return _LINK.sub(lambda found: _link(found, folder), part)

    return _outside_fences(text, outside_code)


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _link(found: re.Match[str], folder: Path) -> str:
    mark, words, target = found.groups()
    name, hash_mark, anchor = target.partition("#")
    if re.match(r"\w+:", target) or not name or _is_alone(found):
        return found[0]
    file = (folder / name).resolve()
    if page := included().get(file):
        return f"{mark}[{words}]({page}.md{hash_mark}{anchor})"
    if not mark and file.parent != DOCS and (file.suffix == ".md" or file.is_dir()):
        return words
    outside = "path:" if not mark and DOCS not in file.parents else ""
    return f"{mark}[{words}]({outside}{os.path.relpath(file, DOCS)}{hash_mark}{anchor})"


def _is_alone(found: re.Match[str]) -> bool:
    text, begin, end = found.string, found.start(), found.end()
    line = text[text.rfind("\n", 0, begin) + 1 : (text.find("\n", end) + 1 or len(text) + 1) - 1]
    return bool(_ALONE.fullmatch(line))


def settings_tables(model: Any) -> str:
    """Return a heading and a table for each section of the settings of `model`."""
    parts = []
    for heading, keys in sections(model.model_fields).items():
        rows = [_row(key, model.model_fields[key]) for key in keys]
        head = ["| setting | default | meaning, and what is allowed |", "|---|---|---|"]
        parts.append("\n".join([f"### {heading}\n"] * bool(heading) + head + rows))
    return "\n\n".join(parts)


def _row(key: str, field: Any) -> str:
    allowed, meaning = declared(field, "allowed"), str(field.description)
    text = meaning if allowed in meaning else f"{meaning}. Allowed: {allowed}"
    default = "required" if field.is_required() else f"`{shown(field.default, quoted=False)}`"
    return f"| `{key}` | {default} | {_escaped(text)} |"


def _escaped(text: str) -> str:
    return re.sub(r"([|*<\[\]])", r"\\\1", text)


def programs() -> str:
    """Return a heading for each verb of the command, and its help without the settings of a run."""
    parts = []
    for verb, program in VERBS.items():
        text, settings, _ = _help(verb).partition("\nThe run:\n")
        head = f"## tandem {verb}: {program.summary}"
        more = ["The other options are [the settings of a run](settings.md)."] * bool(settings)
        parts += [head, f"```none\n{text.strip()}\n```", *more]
    return "\n\n".join(parts)


def _help(verb: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    return output.getvalue()


def kernels() -> str:
    """Return the table of PyTensor's Ops with and without a kernel."""
    from tandem.backend.coverage import table

    return table()


_MADE: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "settings of a run": lambda: settings_tables(Config),
    "settings of preprocessing": lambda: settings_tables(Settings),
    "programs": programs,
}
