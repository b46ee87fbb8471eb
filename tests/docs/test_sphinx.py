"""`make docs`: pages from Markdown and docstrings, without a warning."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs import conf
from tests.support.tiny import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    """The command of `make docs`, but for where the pages go."""
    dry = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    line = next(line for line in dry.stdout.splitlines() if "-m sphinx" in line)
    options = line.split("-m sphinx ")[1].replace("docs/_build/html", str(tmp_path)).split()
    assert "--fail-on-warning" in options
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    names = {path.name for path in tmp_path.rglob("*.html")}
    pages = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    modules = {"tandem.config.schema.html", "tandem.memory.cuda.html", "tandem.ops.conv.html"}
    assert pages | modules <= names
    assert "norm_before_pool" in (tmp_path / "programs.html").read_text()
    assert "loader_threads" in (tmp_path / "settings.html").read_text()
    assert "bvlc_alexnet" in (tmp_path / "pretrained.html").read_text()
    index = (tmp_path / "index.html").read_text()
    assert "live-view.svg" in index
    assert "copybutton" in index
    assert dead_ends(tmp_path) == []
    entries = Counter(
        entry
        for page in (tmp_path / "api").glob("*.html")
        for entry in re.findall(r'<dt class="[^"]*" id="(tandem[^"]*)"', page.read_text())
    )
    assert {entry for entry, times in entries.items() if times > 1} == set()
    assert entries.keys() >= {"tandem.ops.conv2d", "tandem.layers.convolution"}
    assert entries.keys().isdisjoint({"tandem.ops.conv.conv2d"})
    assert "LeNet" in (tmp_path / "another-network.html").read_text()


class Page(HTMLParser):
    """What a built page links to, and the names by which others can link into it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for key, value in attributes:
            if key == "id" and value:
                self.names.add(value)
            elif key in ("href", "src") and value:
                self.links.add(value)


def dead_ends(folder: Path) -> list[str]:
    """The links of built pages to files or places that do not exist."""
    pages = {file.resolve(): Page(file) for file in folder.rglob("*.html")}
    dead = []
    for file, page in pages.items():
        if "_modules" in file.parts:  # Sphinx's own: it lists modules whose source it does not have
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            into = parts.fragment if target in pages else ""
            if not target.exists() or (into and into not in pages[target].names):
                dead.append(f"{file.name}: {link}")
    return dead


def test_no_module_needs_a_package_that_the_pages_lack() -> None:
    """Those that are imported when a module is, and that `make docs` does not install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = project["dependencies"] + project["optional-dependencies"]["dev"]
    required = {re.match(r"[\w-]+", text)[0] for text in installed}  # type: ignore[index]
    required = {{"pyyaml": "yaml", "pillow": "PIL"}.get(name, name) for name in required}
    imported = set()
    for path in (ROOT / "tandem").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).partition(".")[0])
    others = imported - required - sys.stdlib_module_names - {"tandem", "alex_net"}
    assert "triton" in others
    assert others <= set(conf.autodoc_mock_imports)


def test_a_dead_end_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text("<p id='there'>")
    links = ["b.html#there", "b.html#gone", "c.html", "https://x.y", "b.html", "#", "#here"]
    (tmp_path / "a.html").write_text("".join(f'<a href="{link}">' for link in links))
    found = {"b.html#gone", "c.html", "#here"}
    assert set(dead_ends(tmp_path)) == {f"a.html: {link}" for link in found}
