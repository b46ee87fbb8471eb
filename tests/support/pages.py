"""The commands of a page in docs/, and a copy of the project to run them in."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.tiny import ROOT

_LEFT_OUT = {".git", ".venv", "data", "runs", "_build", "api"}


def code_blocks(page: Path, language: str = "bash") -> list[str]:
    """The fenced blocks of a page in a language, unindented, in order."""
    fenced = rf"^( *)```{language}\n(.*?)^ *```$"
    return [
        "\n".join(line.removeprefix(indent) for line in block.splitlines())
        for indent, block in re.findall(fenced, page.read_text(), re.DOTALL | re.MULTILINE)
    ]


def commands(page: Path) -> list[str]:
    """The command lines of a page, each whole, without here-documents.

    Of blocks that name no language, those that begin with a program.
    """
    found = _lines("\n".join(code_blocks(page)))
    others = _lines("\n".join(code_blocks(page, "")))
    return [*found, *(line for line in others if line.startswith(("python ", "make ")))]


def _lines(text: str) -> list[str]:
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def copy_project(folder: Path) -> Path:
    """A copy of the project as it is now, with this environment as its ``.venv``."""
    copy = folder / "project"

    def left_out(place: str, names: list[str]) -> set[str]:
        top = Path(place) in (ROOT, ROOT / "docs")
        return {name for name in names if name == "__pycache__" or (top and name in _LEFT_OUT)}

    shutil.copytree(ROOT, copy, ignore=left_out)
    (copy / ".venv").mkdir()
    (copy / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (copy / ".venv" / "installed").touch()  # later than pyproject.toml: make finds nothing to do
    return copy


def in_shell(folder: Path, command: str, timeout: float = 600) -> str:
    """Run commands as a user's shell does; give what they print, and fail if one fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder)},
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout
