"""`make docs`: pages from Markdown and docstrings, without a warning."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "LeNet" in (tmp_path / "another-network.html").read_text()
