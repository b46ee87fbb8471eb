"""Training and validation as functions: from scripts without a guard, in turn, in threads."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.schema import Config
from tandem.launch import api
from tandem.processes.messages import Failed
from tandem.processes.supervisor import Outcome
from tests.support.runs import assert_same_bits, train
from tests.support.tiny import (
    find_process,
    finish,
    read_record,
    start,
    start_script,
    wait_for_steps,
)

TINY: dict[str, Any] = {
    "crop_size": 67,
    "width": 0.05,
    "batch_size": 2,
    "n_epochs": 1,
    "print_freq": 1,
    "threads": 1,
    "devices": ["cpu"],
}
DEATH = Failed("trainer 0", "death", "was killed by SIGKILL", "")
FAULT = Failed("loader 0", "fault", "OSError: disk", "Traceback: at this line\n")
BAD = Failed("trainer 0", "input", "disk full", "")


UNGUARDED = f"""
import sys
from pathlib import Path
from tandem import train

with Path("effects").open("a") as effects:
    effects.write("imported\\n")
result = train({TINY}, data_folder=Path(sys.argv[1]), weights_dir="run")
print(result.weights, result.record[-1].images, len(result.record))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_trains_once(data: Path, tmp_path: Path) -> None:
    output, errors = finish(start_script(tmp_path, UNGUARDED, data))
    assert (tmp_path / "effects").read_text() == "imported\n"
    assert output.split() == ["run/epoch-0001.safetensors", "7", "8"]
    assert errors == ""  # a library configures no logging


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(weights_dir=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("outcome", "error", "message", "note"),
    [
        (Outcome(2, BAD), tandem.InputError, "^disk full$", False),
        (Outcome(1, DEATH), tandem.RunError, "^trainer 0: was killed by SIGKILL$", False),
        (Outcome(1, FAULT), tandem.RunError, "^loader 0: OSError: disk", True),
        (Outcome(1, FAULT, stopped=True), RuntimeError, "disk", True),
        (Outcome(130, stopped=True), KeyboardInterrupt, "^$", False),
        (Outcome(143, stopped=True), SystemExit, "^143$", False),
    ],
)
def test_how_a_run_ended_is_raised(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    error: type[BaseException],
    message: str,
    note: bool,
) -> None:
    monkeypatch.setattr(api, "execute_training", lambda *_, **__: outcome)
    monkeypatch.setattr(api, "execute_validation", lambda *_: (outcome, None))
    for call in (lambda: tandem.train(config), lambda: tandem.validate("w", config)):
        with pytest.raises(error, match=message) as caught:
            call()
        notes = getattr(caught.value, "__notes__", [])
        assert notes == (["Traceback: at this line"] if note else [])


def checked(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **overrides: Any) -> Config:
    """The settings with which a run would start."""
    seen: list[Config] = []

    def execute(config: Config, *_: Any, **__: Any) -> Outcome:
        seen.append(config)
        return Outcome(1, DEATH)

    monkeypatch.setattr(api, "execute_training", execute)
    with pytest.raises(tandem.RunError):
        tandem.train(*arguments, **overrides)
    return seen[0]


def test_settings_come_in_three_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "mine.yaml"
    values = {"batch_size": 7, "weights_dir": str(run), "devices": ["cpu", "cpu"]}
    file.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    wanted = Config(batch_size=7, weights_dir=str(run), devices=("cpu", "cpu"), seed=3)
    for given in (values, file, str(file), wanted.model_copy(update={"seed": 1})):
        assert checked(monkeypatch, given, seed=3) == wanted
    assert checked(monkeypatch, weights_dir=run) == Config(weights_dir=str(run))


def test_settings_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("batch_size: 0\n")
    for arguments, overrides, message in (
        ([], {"epochs": 3}, "unknown key epochs; did you mean n_epochs?"),
        ([{"lr": 3}], {}, "unknown key lr; did you mean learning_rate?"),
        ([file], {}, f"{file}: batch_size is 0; it must be a whole number"),
        ([file], {"batch_size": -1}, "batch_size is -1; it must be a whole number"),
        ([tmp_path / "none.yaml"], {}, f"{tmp_path / 'none.yaml'}: cannot be read"),
        ([], {"network": "__main__:Net"}, "put the class into a module of its own"),
        ([], {"data_folder": tmp_path, "weights_dir": tmp_path / "run"}, "manifest"),
    ):
        with pytest.raises(tandem.InputError) as caught:
            tandem.train(*arguments, **overrides)
        assert message in str(caught.value)


def test_the_settings_beside_weights_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("batch_size: 0\n")
    with pytest.raises(tandem.InputError, match=f"^{file}: batch_size is 0"):
        tandem.validate(tmp_path / "w.safetensors")
    for weights in ("", ".", "/"):
        with pytest.raises(tandem.InputError, match="found a folder without checkpoints, expected"):
            tandem.validate(weights)


def test_ranks_are_referred_to_the_program(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "is_rank", lambda: True)
    with pytest.raises(tandem.InputError, match="use `tandem train`"):
        tandem.train(config)


def test_names_of_the_package_are_found_when_they_are_used() -> None:
    assert {*tandem.__all__} < {*dir(tandem)}
    assert tandem._PLACES.keys() == {*tandem.__all__}
    assert (tandem.train, tandem.validate, tandem.Result) == (api.train, api.validate, api.Result)
    assert issubclass(tandem.RunError, RuntimeError)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tandem.trian  # type: ignore[attr-defined]


THREE = f"""
import code, sys, threading
import tandem

settings = {TINY} | {{"data_folder": sys.argv[1], "n_epochs": 2}}
first = tandem.train(settings, weights_dir="first")
console = code.InteractiveConsole({{"tandem": tandem, "settings": settings}})
console.push("second = tandem.train(settings, weights_dir='second')")
thread = threading.Thread(target=lambda: tandem.train(settings, weights_dir="third"))
thread.start()
thread.join()
found = tandem.validate(first.weights, threads=1)
assert found.loss == first.record[-1].loss, (found, first.record[-1])
try:
    tandem.train(settings, weights_dir="first")
except tandem.InputError as error:
    print(error)
again = tandem.train(settings, weights_dir="first", resume_train=True)
assert again == first
"""


@pytest.mark.slow
def test_runs_in_turn_a_console_and_a_thread_compute_what_the_program_does(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "input").write_text(THREE)
    with (tmp_path / "input").open() as text:
        process = start([sys.executable, "-", str(data)], tmp_path, stdin=text)
    output, _ = finish(process)
    assert "weights_dir first holds a run already" in output
    program = train(data, tmp_path / "program", n_epochs=2)
    for name in ("first", "second", "third"):
        assert_same_bits(tmp_path / name, program)


ENDLESS = f"""
import os, sys
from tandem import train

try:
    train({TINY}, data_folder=sys.argv[1], weights_dir="run", n_epochs=1000, snapshot_minutes=0)
except BaseException as error:
    print(type(error).__name__, *getattr(error, "__notes__", []), error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_raised_after_a_checkpoint(
    data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start_script(tmp_path, ENDLESS, data)
    wait_for_steps(tmp_path / "run", process, 3)
    os.kill(process.pid, number)
    output, _ = finish(process)
    assert output.split()[0] == {"SIGINT": "KeyboardInterrupt"}.get(number.name, "SystemExit")
    saved = read_header(list_checkpoints(tmp_path / "run")[-1]).state
    lines = [line for line in read_record(tmp_path / "run") if line["event"] == "train"]
    assert saved.step == lines[-1]["step"]


@pytest.mark.slow
def test_a_killed_process_is_raised(data: Path, tmp_path: Path) -> None:
    process = start_script(tmp_path, ENDLESS, data)
    wait_for_steps(tmp_path / "run", process, 3)
    os.kill(find_process(process.pid, "loader 0"), signal.SIGKILL)
    output, errors = finish(process)
    assert output.startswith("RunError loader 0: was killed by SIGKILL")
    assert "the run has ended: loader 0: was killed" in errors


def test_nothing_is_configured_by_a_call(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    root, ours = logging.getLogger(), logging.getLogger("tandem")
    before = [*root.handlers], root.level, [*ours.handlers], ours.level
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    checked(monkeypatch, config)
    assert before == ([*root.handlers], root.level, [*ours.handlers], ours.level)
    assert handlers == {number: signal.getsignal(number) for number in handlers}
