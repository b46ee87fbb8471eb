"""The scripts for a first look at a GPU: all that they name exists, and a stage has its time."""

import ast
import importlib.util
import os
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import parse
from tandem.artifacts.metrics_log import Record, TrainRecord, ValidationRecord, to_json
from tandem.config.command_line import load_config
from tests.gpu.compile.fake_device import REPLACED
from tests.gpu.first import summary

HERE = Path(__file__).parent
SCRIPTS = [path for folder in ("first", "compile") for path in sorted((HERE / folder).glob("*.py"))]
ROOT = HERE.parents[1]
SCRIPT = HERE / "first" / "first_gpu.sh"
STAGES = ("look", "step", "learn", "profile", "runs", "parallel", "table")
OURS = ("alex_net", "benchmarks", "examples", "tandem", "tests")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_imported_name_exists(script: Path) -> None:
    nodes = [n for n in ast.walk(ast.parse(script.read_text())) if isinstance(n, ast.ImportFrom)]
    for node in nodes:
        assert node.module
        if node.module.partition(".")[0] in OURS:
            module = importlib.import_module(node.module)
            missing = [each.name for each in node.names if not hasattr(module, each.name)]
            assert not missing, f"{script.name}: {node.module} has no {missing}"


@pytest.mark.parametrize("name", REPLACED)
def test_every_patched_name_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def run_script(folder: Path, stage: str, **environment: str) -> tuple[list[list[str]], str]:
    """Run a stage with a `timeout` that only notes its arguments; return these and the output."""
    notes = folder / "notes"
    fake = folder / "timeout"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\037" "$@" >> {notes}\necho >> {notes}\n')
    fake.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    command = [SCRIPT, stage, folder / "out", "pictures"]
    environment = {**os.environ, "PATH": path, "PYTHON": "python", **environment}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = notes.read_text().split("\037\n")[:-1] if notes.exists() else []
    return [line.split("\037")[2:] for line in lines], result.stdout  # without --kill-after 5


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_ends_within_ten_minutes(tmp_path: Path, stage: str) -> None:
    commands, _ = run_script(tmp_path, stage)
    assert commands
    assert sum(int(limit) for limit, *_ in commands) <= 600


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_starts_exists(tmp_path: Path, stage: str) -> None:
    commands = [words for _, *words in run_script(tmp_path, stage)[0]]
    parsers = {"benchmarks.gpu": parse, "pytest": check_test_files}
    for program, *words in commands:
        if words[:1] == ["train.py"]:
            load_config(words[1:])
        elif words[:1] == ["-m"]:
            assert importlib.util.find_spec(words[1])
            parsers.get(words[1], lambda rest: None)(words[2:])
        elif words[:1] != ["-c"] and program != "nvidia-smi":
            assert (ROOT / program).exists()


def check_test_files(words: list[str]) -> None:
    files = [word for word in words if word.endswith(".py")]
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_stages_run_every_test_for_gpus(tmp_path: Path) -> None:
    words: set[str] = set()
    for stage in STAGES:
        words |= {word for command in run_script(tmp_path, stage)[0] for word in command}
    ours = {f"tests/gpu/{file.name}" for file in HERE.glob("test_*.py")}
    assert ours - words == {f"tests/gpu/{Path(__file__).name}"}


def test_the_parts_of_make_are_all_tests_for_gpus() -> None:
    line = re.search(r"^PART \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line
    own = Path(__file__).stem
    assert {own} | {f"test_{part}" for part in line[1].split()} == {
        file.stem for file in HERE.glob("test_*.py")
    }


@pytest.mark.parametrize(("python", "status"), [("true", 0), ("false", 2)])
def test_make_names_the_parts_that_failed_here_only(python: str, status: int) -> None:
    command = ["make", "gpu-test", f"GPU_PYTHON={python}", "PART=step runs"]
    environment = {**os.environ, "failed": "something else"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    assert ("longer than ten minutes: step runs\n" in result.stderr + result.stdout) == bool(status)


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    commands, output = run_script(tmp_path, "profile", STAGE_SECONDS="0")
    assert commands == []
    assert output.count("== no time left: python -m tests.gpu.first.profile_step") == 3


def test_the_shell_script_is_sound_and_explains_itself() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    result = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert all(f"{stage}: " in result.stdout for stage in STAGES)
    assert subprocess.run([SCRIPT, "nothing"], capture_output=True, cwd=HERE).returncode == 2


def write_run(folder: Path, *records: Record) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [to_json(record) for record in records]
    (folder / "record.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.mark.parametrize(("error", "status", "word"), [(0.35, 0, "PASS"), (0.36, 1, "FAIL")])
def test_the_summary_compares_the_best_error_with_the_goal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: float,
    status: int,
    word: str,
) -> None:
    train = [TrainRecord(1, n, 1.0, None, 0.01, 100.0 * n, 0.9, 0.1, 0.0) for n in range(1, 7)]
    errors = [ValidationRecord(n, 6, 1.0, value, 0.1, 8) for n, value in ((1, 0.5), (2, error))]
    run = write_run(tmp_path / "run", *train, *errors)
    assert summary.main([str(run), "--goal", "0.35"]) == status
    output = capsys.readouterr().out
    assert "median 500 images/s, 90.0% of the loading hidden" in output
    assert f"top-1 error {error:.4f} in epoch 2" in output
    assert f"{word}: at most 0.35 is the goal" in output
    assert summary.main([str(run)]) == 0
    assert summary.main([str(write_run(tmp_path / "begun", *train[:1]))]) == 1
