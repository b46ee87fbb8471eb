"""Commands and programs that the pages name, and a copy of the project to run them in."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tandem.__main__ import VERBS
from tests.support.tiny import ROOT, python_path

PAGES = sorted((ROOT / "docs").glob("*.md"))
_ABOUT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
EVERY_PAGE = [*PAGES, *_ABOUT, *sorted((ROOT / "pretrained").glob("*.md"))]
_MORE = [*(ROOT / "tests" / "gpu").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
_SCRIPTS = sorted(
    path
    for folder in ("demo", "preprocessing", "tests/gpu")
    for path in (ROOT / folder).rglob("*.sh")
)
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


def make_targets() -> list[str]:
    """The phony targets of the Makefile."""
    (line,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return line.split()


def dry_run(target: str) -> str:
    """The commands of a target of the Makefile."""
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@functools.cache
def named_programs() -> frozenset[str]:
    """Programs of this project that pages, Makefile, scripts and benchmarks start by Python.

    Each is a file, as "train.py", or a module, as "-m tests.soak".
    """
    files = [*EVERY_PAGE, *_MORE, *(ROOT / "benchmarks").glob("*.py")]
    texts = [*map(dry_run, make_targets()), *(path.read_text() for path in files)]
    for path in _SCRIPTS:
        here = path.parent.relative_to(ROOT).as_posix()
        texts.append(
            path.read_text()
            .replace("$here", here)
            .replace("$python", "python")
            .replace("$PYTHON", "python")
        )
    text = "\n".join(texts).replace('"', "")
    found = re.findall(r"\bpython3? (?!-[^m])(-m [\w.]*\w|\S+\.py)", text)
    ours = {path.name for path in ROOT.iterdir()}
    named = {
        name
        for name in found
        if not name.startswith("-m ") or name.split()[1].split(".")[0] in ours
    }
    return frozenset(named | {f"-m tandem {verb}" for verb in VERBS})


# Forks for each program after importing what takes long; paths are as Python sets them.
_HELP = """
import importlib.util, io, json, os, runpy, sys
os.environ["KERAS_BACKEND"] = "torch"
import h5py, keras, matplotlib.pyplot, numba, pydantic.dataclasses, pytensor.tensor.fft
import safetensors.numpy, torch.distributed, yaml

here = sys.path[0]
for name in json.load(sys.stdin):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        status = 1
        try:
            if name.startswith("-m "):
                module, *verb = name[3:].split()
                sys.argv = [module, *verb, "--help"]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                sys.argv = [name, "--help"]
                sys.path[0] = os.path.abspath(os.path.dirname(name))
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
    os.close(writing)
    with open(reading) as output:
        text = output.read()
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print(json.dumps([name, status, text]), flush=True)
"""


@functools.cache
def help_of_programs() -> dict[str, tuple[int, str]]:
    """Exit status and output of each of `named_programs` called with ``--help``, as on a clone."""
    with tempfile.TemporaryDirectory() as folder:
        return _help_of_programs(uninstalled(Path(folder)))


def uninstalled(folder: Path) -> Path:
    """Make a Python in a folder that has all packages but the project, which a clone lacks too."""
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "tandem" not in path.name:
            (packages / path.name).symlink_to(path)
    python = folder / "python"
    # Without `site`, and so without what the environment's own folder of packages adds.
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def _help_of_programs(python: Path) -> dict[str, tuple[int, str]]:
    result = subprocess.run(
        [python, "-c", _HELP],
        cwd=ROOT,
        input=json.dumps(sorted(named_programs())),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {name: (status, text) for name, status, text in lines}


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
        env={**os.environ, "PATH": path, "PYTHONPATH": python_path(folder)},
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout
