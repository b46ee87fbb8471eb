"""The frame of the programs: options of every form, what is refused, help, exit status."""

import argparse
import logging
from pathlib import Path
from typing import Literal

import pytest

from tandem import __version__
from tandem.cli import CommandLine, Options, PathOption, count, exit_status, option, run_program
from tandem.errors import InputError


class Mine(Options):
    pictures: tuple[str, ...] = option(..., "what is read", "files", "arguments")
    weights: PathOption = option(..., "checkpoint", "a file", "text")
    top: int = option(5, "guesses", "a whole number of at least 1", ge=1)
    fast: bool | Literal["auto"] = option("auto", "quickly, 100 %", "true, false or auto")
    as_json: bool = option(False, "JSON", "true or false", alias="json")
    steps: list[int] = option([], "steps", "a list of whole numbers", "list")


def read(*arguments: str) -> Mine:
    return CommandLine(arguments, "What it does", answers={"gpu": "use weights"}).read(Mine)


def refusal(*arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        read(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "--weights", "w", "b"], {}),
        (["a", "b", "--weights=w", "--top", "3"], {"top": 3}),
        (["--top", "3", "--top", "4", "a", "b", "--weights", "w"], {"top": 4}),
        (["--weights", "w", "--json", "a", "b"], {"as_json": True}),
        (["--weights", "w", "--json", "false", "a", "b"], {"as_json": False}),
        (["--fast", "a", "b", "--weights", "w"], {"fast": True}),
        (["a", "b", "--weights", "w", "--steps", "1", "-2"], {"steps": [1, -2]}),
        (["--steps=[1, 2]", "--weights", "w", "--", "a", "b"], {"steps": [1, 2]}),
        (["--weights", "w", "--steps", "[1]", "a", "b"], {"steps": [1]}),
        (["--weights", "w", "--steps", "[1,", "2]", "a", "b"], {"steps": [1, 2]}),
        (["--steps", "1", "2", "--weights", "w", "a", "b"], {"steps": [1, 2]}),
    ],
)
def test_options_stand_among_arguments(given: list[str], expected: dict[str, object]) -> None:
    options = read(*given)
    assert (options.pictures, options.weights) == (("a", "b"), Path("w"))
    assert {key: getattr(options, key) for key in expected} == expected
    assert read("--weights", "w", "-", "--", "--top").pictures == ("-", "--top")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--weights", "w"], "pictures is missing; it must be files"),
        (["a"], "--weights is missing; it must be a file"),
        (["a", "--weights"], "--weights: a value is missing; it must be a file"),
        (["a", "--weights", "w", "--top", "0"], "--top is 0; it must be a whole number"),
        (["--tops", "1"], "unknown option --tops; did you mean --top?"),
        (["--pictures", "a"], "unknown option --pictures; --help lists all of them"),
        (["--gpu", "1"], "there is no option --gpu: use weights"),
        (["-top", "1"], "unknown option -top; did you mean --top?"),
        (["a", "--weights", "w", "--json=maybe"], '--json is "maybe"; it must be true or false'),
    ],
)
def test_what_is_refused(given: list[str], message: str) -> None:
    assert refusal(*given).startswith(message)


def test_help_and_version_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for text in (
        "What it does",
        "PICTURE [PICTURE ...]",
        "--weights FILE checkpoint [a file]",
        "--top VALUE guesses [a whole number of at least 1; default: 5]",
        "--fast [VALUE] quickly, 100 % [true, false or auto; default: auto]",
        "--steps VALUE [VALUE ...]",
    ):
        assert text in words
    with pytest.raises(SystemExit):
        read("--version")
    assert capsys.readouterr().out == f"tandem {__version__}\n"


def test_a_file_of_settings_is_below_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("top: 2\nweights: x\n")
    line = CommandLine(["a", "--top=3"], None)
    with pytest.raises(InputError, match="weights is missing"):
        line.read(Mine, tmp_path / "none.yaml")
    file.write_text("top: 2\nstep: x\n")
    with pytest.raises(InputError, match=r"--weights \(in .*mine.yaml: weights\) is missing") as e:
        line.read(Mine, file)
    assert f"{file}: unknown key step; did you mean steps?" in str(e.value)


def test_exit_status(caplog: pytest.LogCaptureFixture) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def refuse() -> None:
        raise InputError("that is wrong")

    caplog.set_level(logging.INFO, "tandem")
    assert exit_status(lambda: None) == 0
    assert exit_status(lambda: 1) == 1
    assert exit_status(refuse) == 2
    assert exit_status(interrupt, "stopped") == 130
    assert caplog.messages == ["error: that is wrong", "stopped"]


def test_a_program_reads_its_options_and_works(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Mine] = []
    assert run_program(Mine, seen.append, CommandLine(["a", "--weights", "w"], None)) == 0
    assert seen[0].weights == Path("w")
    assert run_program(Mine, seen.append, CommandLine([], None)) == 2
    assert capsys.readouterr().err.startswith("error: pictures is missing; it must be files\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [("0", "found 0, expected a number from 1 on"), ("-3", "found -3"), ("x", "invalid count")],
)
def test_a_count_of_nothing_is_refused(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=count)
    assert parser.parse_args(["--epochs=12"]).epochs == 12
    with pytest.raises(SystemExit):
        parser.parse_args([f"--epochs={given}"])
    assert said in capsys.readouterr().err
