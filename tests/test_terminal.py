"""Output of a run: on a terminal, on a dumb one, and in a file."""

import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.run_folder import list_checkpoints
from tandem.launch.console import can_show
from tests.support.terminal import Terminal
from tests.support.tiny import is_gone, read_record, run_program, settings

ESCAPE = b"\x1b"


def shows(terminal: Terminal, *patterns: str) -> bool:
    """Whether each is on the screen now, in this order."""
    return (
        re.search(
            ".*".join(f"(?:{p})" for p in patterns),
            "\n".join(terminal.lines),
            re.DOTALL | re.MULTILINE,
        )
        is not None
    )


VIEW = (
    r"/run: epoch \d+ of 100000, training",
    r"epoch +━+.* \d+ of 7 steps",
    r"run +━*.* \d+\.\d %, (\d+ d )?[\d:]+ left",
    r"training    loss \d\.\d{4}   top-1 error \d+\.\d %   \d+\.\d images/s   rate 0\.01",
    r"validation  loss \d\.\d{4}   top-1 error \d+\.\d %   top-5 error 0\.0 %   after epoch \d+",
    r"time +computing \d+ %   waiting for loader \d+ %   exchanging \d+ %",
    r"memory +memory",
    r"trainer 0  (computing|exchanging|waiting for loader)[^\n]* 0\.\d\d GB"
    r"  loader 0  (reading|slot filled) +0\.\d\d GB",
    r"trainer 1  \w+[^\n]* 0\.\d\d GB  loader 1 ",
)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room beside it on a line of the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_run_on_a_terminal_until_ctrl_c(data: Path, short_path: Path) -> None:
    run = short_path / "run"
    common = {
        "batch_size": 1,
        "devices": ["cpu", "cpu"],
        "n_epochs": 100_000,
        "lr_policy": "constant",
    }
    arguments = settings(data, run, **common, snapshot_freq=100_000)
    with Terminal("train.py", arguments) as terminal:
        first = r"/run: \d+\.\d s: starting processes"
        terminal.wait_for(lambda: shows(terminal, first, "trainer 0  starting"))
        terminal.wait_for(lambda: shows(terminal, *VIEW))
        terminal.wait_for(lambda: shows(terminal, "epoch 2 validation: loss", *VIEW))
        for state in ("computing", "exchanging", "validating"):
            terminal.wait_for(lambda state=state: shows(terminal, f"trainer 0  {state}"))
        assert shows(terminal, "epoch [0-9]+ of 100000")
        # In a smaller window it is there once, and no line is too long for it.
        terminal.resize(24, 60)
        terminal.wait_for(lambda: shows(terminal, r"images?…$", r"trainer 1  [^\n]*…  "))
        terminal.wait_for(lambda: "\n".join(terminal.lines).count("trainer 1  ") == 1)
        terminal.resize(40, 120)
        terminal.wait_for(lambda: shows(terminal, *VIEW))
        terminal.type(b"\x03")
        assert terminal.wait() == 130
        # The view is gone; log lines stay, the cursor shows, and no setting has changed.
        # (What was drawn while the window changed may stand further up.)
        assert "trainer 0" not in terminal.text[terminal.text.index("SIGINT: stopping") :]
        assert shows(
            terminal, "validation: loss", "SIGINT: stopping after", "wrote .*", "stopped by"
        )
        assert not terminal.screen.cursor.hidden
        assert b"\x1b[?1049" not in terminal.raw  # no other screen
        assert is_gone(terminal.pid)


@pytest.mark.slow
@pytest.mark.parametrize("live_view", [True, False])
def test_a_closed_terminal_leaves_a_checkpoint(
    data: Path, short_path: Path, live_view: bool
) -> None:
    """And no process, although nothing can be written to it any more."""
    run = short_path / "run"
    arguments = settings(data, run, n_epochs=100_000, snapshot_freq=100_000, live_view=live_view)
    with Terminal("train.py", arguments) as terminal:
        terminal.wait_for(lambda: shows(terminal, "epoch 2 validation: loss"))
        assert terminal.hang_up() == 129
        assert is_gone(terminal.pid)
    saved = read_header(list_checkpoints(run)[-1]).state
    assert saved.step == [row["step"] for row in read_record(run) if row["event"] == "train"][-1]


@pytest.mark.slow
def test_the_traceback_of_a_fault_is_whole_and_the_terminal_sane(
    data: Path, tmp_path: Path
) -> None:
    arguments = settings(data, tmp_path / "run", n_epochs=4, devices=["cpu", "cpu"], batch_size=6)
    with Terminal(
        "tests/support/broken_train.py", ["LoudAlexNet", *arguments], columns=70
    ) as terminal:
        assert terminal.wait() == 1
        text = terminal.text
    # Its rows with a path are as long as the path: these are looked for as they were written.
    assert b"in logits\r\n" in terminal.raw
    traceback = text[text.index("Traceback") :].rstrip().splitlines()
    assert traceback[-1] == "error: the run has ended: trainer 1: ZeroDivisionError: much too loud"
    assert traceback[-2] == "ZeroDivisionError: much too loud"
    # What a process writes by itself stands above the view, each line whole.
    for number in range(3):
        for where in ("out", "err"):
            assert f"\nloud line {number} to std{where}, which is longer than a row of this" in text
    assert text.count("to stdout, which is longer than a row of this terminal has columns\n") == 3
    assert not terminal.screen.cursor.hidden
    assert "trainer 0  " not in text


def test_a_killed_program_leaves_the_terminal_sane(data: Path, tmp_path: Path) -> None:
    arguments = settings(data, tmp_path / "run", n_epochs=4)
    with Terminal("train.py", arguments) as terminal:
        terminal.wait_for(lambda: shows(terminal, "trainer 0  starting"))
        os.kill(terminal.pid, signal.SIGKILL)
        assert not terminal.screen.cursor.hidden
        assert is_gone(terminal.pid, 20)


@pytest.mark.slow
def test_without_a_live_view_there_are_lines(data: Path, short_path: Path) -> None:
    arguments = settings(data, short_path / "run", batch_size=7, live_view=False)
    with Terminal("train.py", arguments, columns=150) as terminal:
        assert terminal.wait() == 0
        assert ESCAPE not in terminal.raw
        assert shows(terminal, "epoch 1 step 1: loss", "epoch 1 step 2: loss", "epoch 1 validation")
    weights = short_path / "run" / "epoch-0001.safetensors"
    more = settings(data, short_path / "run", batch_size=1, live_view=True)  # the run had none
    with Terminal("validate.py", ["--weights", str(weights), *more]) as terminal:
        seen = ("/run: validation", "of 7 steps", "trainer 0")
        terminal.wait_for(lambda: shows(terminal, *seen))
        assert terminal.wait() == 0
        assert shows(terminal, "epoch 1 validation: loss", r'^\{"event": "validation"')


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("is_terminal", "term", "can"),
    [
        (True, "xterm-256color", True),
        (True, "dumb", False),
        (True, None, False),
        (False, "xterm", False),
    ],
)
def test_a_view_needs_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, term: str | None, can: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    monkeypatch.setenv("FORCE_COLOR", "1")  # no statement about what the terminal can do
    monkeypatch.delenv("TERM") if term is None else monkeypatch.setenv("TERM", term)
    assert can_show() == can


@pytest.mark.slow
def test_without_a_terminal_a_run_is_reported_in_lines(data: Path, tmp_path: Path) -> None:
    result = run_program("train.py", settings(data, tmp_path / "run", batch_size=7))
    assert result.returncode == 0
    assert "\x1b" not in result.stderr
    lines = re.findall(
        r"^epoch 1 step \d: loss \d\.\d+, top-1 error .* images/s,", result.stderr, re.MULTILINE
    )
    assert len(lines) == 2
