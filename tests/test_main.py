"""The command ``tandem``: its verbs, their help, and what is refused."""

import contextlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import classify
import train
import validate
from tandem import __main__ as command
from tandem import __version__
from tandem.__main__ import VERBS, main
from tests.support.tiny import ROOT


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command writes to standard output before it ends well."""
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_verbs_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *arguments)
    assert re.findall(r"^  (\w+)   *\w", text, re.MULTILINE) == [*VERBS]
    assert shown(capsys, "--version") == f"tandem {__version__}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trian", "unknown verb trian; did you mean train?"),
        ("frobnicate", f"unknown verb frobnicate; known are {', '.join(VERBS)}"),
        ("--verison", "unknown option --verison; did you mean --version?"),
    ],
)
def test_an_unknown_verb_is_refused(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "--devices", "cpu"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_an_interrupt_during_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.__main__.importlib.import_module", interrupted)
    assert train.main([]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_its_commands(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, verb, "--help")
    assert text.startswith(f"usage: tandem {verb} ")
    assert text.count(f"tandem {verb}") >= 3
    assert " python " not in text


@pytest.mark.parametrize("script", [train, validate, classify])
def test_the_help_of_a_script_has_its_own_commands(
    script: object, capsys: pytest.CaptureFixture[str]
) -> None:
    name = script.__name__  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        script.main(["--help"])  # type: ignore[attr-defined]
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python {name}.py ")
    assert text.count(f"python {name}.py") >= 3
    assert not re.search(rf"^\S.*:  +tandem {name}\b", text, re.MULTILINE)


def test_a_module_in_the_current_folder_is_found_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by ``python -m tandem``, where the console command's own folder comes first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(command, "run_verb", lambda verb, arguments: 7)
    assert main(["train"]) == 7
    assert sys.path[-1] == str(tmp_path)


def test_the_command_is_installed_and_its_list_of_verbs_needs_no_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"tandem": f"{command.__name__}:main"}
    for word in ("--help", "--version"):
        # Without the folder of packages.
        arguments = [sys.executable, "-S", "-m", "tandem", word]
        result = subprocess.run(arguments, cwd=ROOT, env={}, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
