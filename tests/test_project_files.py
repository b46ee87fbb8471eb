"""The files of a public project agree with each other and with the code."""

import re
import subprocess
import tomllib

import yaml
from packaging.version import Version

import tandem
from tandem import __version__
from tandem.artifacts.reproducibility import SAME_BITS
from tests.support.pages import make_targets
from tests.support.tiny import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
THIRD_PARTY = ("tandem/data/imagenet_names.txt",)


def test_the_version_is_the_same_everywhere() -> None:
    heading = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    released = CITATION["version"]
    assert heading.groups() == (released, str(CITATION["date-released"]))
    assert Version(released) <= Version(__version__)  # between releases that of the next, as .dev0
    assert SAME_BITS[-1] == __version__
    assert PROJECT["dynamic"] == ["version"]


def test_every_dependency_is_bounded() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    by_year = {"furo", "pycuda"}  # versions that name the year promise nothing of the next
    for requirement in (each for group in groups for each in group):
        name, _, bounds = requirement.partition(">=")
        assert bounds, requirement
        assert name in by_year or ",<" in bounds, requirement


def test_packages_whose_internals_are_used_have_the_minor_version_that_is_tested() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *extras["gpu-compile"], *extras["keras"]]
    for name in ("pytensor", "torch", "numba", "triton", "keras"):
        (requirement,) = (each for each in requirements if each.startswith(f"{name}>="))
        major, minor = pins[name].split(".")[:2]
        assert f",<{major}.{int(minor) + 1}" in requirement


def test_the_licence_is_the_same_everywhere() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License\n\nCopyright (c) 2026, the Tandem authors\n")
    assert PROJECT["license"] == CITATION["license"] == "BSD-3-Clause"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert PROJECT["authors"] == [{"name": "the Tandem authors"}]


def test_text_of_others_keeps_its_licence() -> None:
    """WordNet's asks that its notice stands in every copy; timm's that its source is named."""
    (names,) = THIRD_PARTY
    head = [line for line in (ROOT / names).read_text().splitlines() if line.startswith("#")]
    notice = " ".join(line.lstrip("# ") for line in head)
    for words in (
        "WordNet Release 3.0. This software and database is being provided to you",
        "without fee or royalty is hereby granted",
        "WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.",
        'PROVIDED "AS IS"',
        "Title to copyright in this software, database",
        "timm 1.0.31 (Apache License 2.0)",
    ):
        assert words in notice
    tracked = subprocess.run(
        ["git", "grep", "--files-with-matches", "Princeton University"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if tracked.returncode == 0:  # in a clone
        found = set(tracked.stdout.split()) - {"tests/test_project_files.py"}
        assert found == {*THIRD_PARTY}


def test_a_change_is_checked_by_what_the_project_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["steps"][-1] == {"run": ".ci/run"}
    oldest, newest = job["strategy"]["matrix"]["python"]
    supported = [
        classifier.rpartition(" :: ")[2]
        for classifier in PROJECT["classifiers"]
        if re.search(r":: 3\.\d+$", classifier)
    ]
    assert (oldest, newest) == (supported[0], supported[-1])
    assert PROJECT["requires-python"] == f">={oldest},<3.{int(newest[2:]) + 1}"
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    commands = re.findall(r"\$\(BIN\)/(.*?)(?: --check)?(?: \.)?$", recipe[1], re.MULTILINE)
    assert commands == ["ruff check", "ruff format", "mypy"]
    assert all(f".venv/bin/{c}" in h["entry"] for c, h in zip(commands, hooks, strict=True))


def test_contributors_are_told_what_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(make_targets())


def test_the_first_page_names_every_package_once() -> None:
    named = re.findall(r"^``(\w+)``", tandem.__doc__ or "", re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "tandem").glob("*/__init__.py")}
    assert sorted(named) == sorted(folders)
