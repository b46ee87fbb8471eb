"""`make docs`: pages from Markdown and docstrings, without a warning."""

import ast
import contextlib
import functools
import re
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import tandem.ops
from docs import conf
from tests.support.browser import browser_page
from tests.support.tiny import ROOT


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages, by the command of `make docs`, but for where they go."""
    folder = tmp_path_factory.mktemp("pages")
    dry = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    line = next(line for line in dry.stdout.splitlines() if "-m sphinx" in line)
    options = line.split("-m sphinx ")[1].replace("docs/_build", str(folder)).split()
    assert "--fail-on-warning" in options
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return folder / "html"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pages_are_built_without_a_warning(pages: Path) -> None:
    names = {path.name for path in pages.rglob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= names
    assert "norm_before_pool" in (pages / "programs.html").read_text()
    assert "loader_threads" in (pages / "settings.html").read_text()
    assert "bvlc_alexnet" in (pages / "pretrained.html").read_text()
    assert "TriGamma" in (pages / "from-theano.html").read_text()
    assert "LeNet" in (pages / "another-network.html").read_text()
    index = (pages / "index.html").read_text()
    assert "live-view.svg" in index
    assert "copybutton" in index
    assert dead_ends(pages) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_public_api_alone_has_pages_and_each_name_once(pages: Path) -> None:
    files = {file.stem for file in (ROOT / "docs" / "library").glob("*.rst")}
    assert {page.stem for page in (pages / "library").glob("*.html")} == files
    entries = Counter(
        entry
        for page in (pages / "library").glob("*.html")
        for entry in re.findall(r'<dt class="[^"]*" id="(tandem[^"]*)"', page.read_text())
    )
    assert {entry for entry, times in entries.items() if times > 1} == set()
    public = {"tandem.train", "tandem.ops.conv2d", "tandem.keras.distribute"}
    assert entries.keys() >= public | {"tandem.layers.convolution", "tandem.models.vgg.VGG16"}
    assert entries.keys().isdisjoint({"tandem.ops.conv.conv2d", "tandem.ops.Conv2d"})


def test_each_function_of_the_ops_has_its_place_in_their_page() -> None:
    page = (ROOT / "docs" / "library" / "ops.rst").read_text()
    functions = {name for name in tandem.ops.__all__ if name.islower()} - {"first_token"}
    assert sorted(functions) == re.findall(r"autofunction:: (\w+)", page)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_search_does_not_begin_with_the_changelog(pages: Path) -> None:
    with served(pages) as address, browser_page() as page:
        for words in ("keras", "exchange", "checkpoint", "fully_connected"):
            page.goto(f"{address}/search.html?q={words}")
            page.wait_for_selector("#search-results li")
            titles = page.locator("#search-results li > a").all_inner_texts()
            assert len(titles) > 5, words
            assert not [title for title in titles if "Changelog" in title], words


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_narrow_page_scrolls_its_tables_and_not_itself(pages: Path) -> None:
    scrolled = 0
    with browser_page(400) as page:
        for file in pages.glob("*.html"):
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, file.name
            for width, room, overflow, prose in page.evaluate(_TABLES):
                assert overflow == "auto", file.name
                assert prose > 90, file.name  # pixels: not a word a line
                scrolled += width > room
    assert scrolled > 20


_TABLES = """[...document.querySelectorAll('article table.docutils')].map(table => [
    table.offsetWidth, table.parentElement.clientWidth,
    getComputedStyle(table.parentElement).overflowX,
    Math.min(1e3, ...[...table.querySelectorAll('td')].filter(cell => cell.innerText.length > 60)
        .map(cell => cell.offsetWidth))])"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder is served: the search fetches pages."""
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


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
