"""The command ``tandem cost``: what it prints, draws and refuses."""

import json
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tandem.cost import program
from tandem.cost.drawing import draw
from tandem.cost.machine import Machine
from tandem.cost.predict import Prediction
from tandem.cost.program import reported, run_cost
from tests.support.norm_network import CROP, NETWORK

VALUES: dict[str, Any] = {
    "processor": "made up",
    "speeds": [
        {"trainers": 1, "threads": 2, "bandwidth": 2e10, "call": 1e-5, "rates": {"default": 2e9}},
        {"trainers": 2, "threads": 1, "bandwidth": 1e10, "call": 1e-5, "rates": {"default": 1e9}},
    ],
    "load": 1e9,
    "exchange": {"averaged": 1e-9, "messages": 1e-5},
}
SMALL = f"--network {NETWORK} --crop_size {CROP} --batch_size 4 --classes 10".split()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def machine() -> str:
    Path("made_up.yaml").write_text(yaml.safe_dump(VALUES))
    return "made_up.yaml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, small: bool = True) -> str:
    assert run_cost([*(SMALL if small else ()), *arguments], None) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that is refused."""
    assert run_cost([*SMALL, *arguments], None) == 2
    message = capsys.readouterr().err.removeprefix("error: ").removesuffix("\n")
    assert "\n" not in message
    return message


def table(text: str) -> list[list[str]]:
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.split()[:2] == ["ranks", "machines"])
    return [re.split(r"  +", line.strip()) for line in lines[first + 1 :] if line[:5].strip()]


def test_a_line_for_each_number_of_ranks(
    machine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = run(capsys, "--machine", machine, "--ranks", "1", "2", "4", "--output", "cost.png")
    rows = [row for row in table(text) if row[0].isdigit()]
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "1"], ["4", "2"]]
    assert rows[0][-2:] == ["1.00", "100%"]
    assert "NormNetwork, 4 images per trainer and step" in text
    assert "GFLOP; rates of made_up.yaml\n" in text
    assert "exchange: average, 0.01 MB, by memory, asa" in text
    assert "note: between machines an assumed 50 us a message and 10 Gbit/s" in text
    assert "note: not measured: bytes_within, added;" in text
    assert Path("cost.png").stat().st_size > 10_000


def test_numbers_as_json(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--machine", machine, "--ranks", "2", "--network_bw", "1e9", "--network_lat", "0"]
    found = json.loads(run(capsys, *options, "--json"))
    (row,) = found["predictions"]
    assert (found["rates"], found["notes"]) == (machine, [])
    assert (row["ranks"], row["machines"], row["images"]) == (2, 1, 8)
    assert row["step"] == pytest.approx(max(row["compute"] + row["exposed"], row["load"]))
    assert row["images_per_second"] == pytest.approx(8 / row["step"])
    assert row["efficiency"] == pytest.approx(row["speedup"] / 2)


def test_layers(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--machine", machine, "--ranks", "1", "--layers").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("layer "))
    rows = [line.split() for line in lines[first + 1 :]]
    assert [row[0] for row in rows][:3] == ["input", "conv1", "conv1.norm"]
    assert {"fc1", "fc2", "totals"} <= {row[0] for row in rows}
    shares = sum(float(row[4].rstrip("%")) for row in rows)
    assert shares == pytest.approx(100, abs=0.5)


def test_settings_of_a_run_are_read(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From config.yaml, as train.py does; buckets are of ranks."""
    settings = {"exchange": "gradients", "bucket_mb": 0.001, "optimizer": "adam"}
    Path("config.yaml").write_text(yaml.safe_dump(settings))
    text = run(capsys, "--machine", machine, "--ranks", "2")
    assert re.search(r"exchange: gradients, 0\.\d+ MB in \d+ buckets, by asa", text)


def test_pydtnns_numbers_are_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cpu_speed", "4e12", "--memory_bw", "5e10", "--ranks", "1", "2"]
    text = run(capsys, *options)
    assert "GFLOP; rates of cpu_speed and memory_bw\n" in text
    assert "note: the machine has no rate of loading" in text
    assert [row[:2] for row in table(text) if row[0].isdigit()] == [["1", "1"], ["2", "2"]]


def test_a_measured_machine_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = SimpleNamespace(calibrate=lambda: Machine.of(VALUES))
    monkeypatch.setitem(sys.modules, "tandem.cost.calibrate", measured)
    assert "rates of machine.yaml\n" in run(capsys, "--calibrate", "--ranks", "1")
    assert Machine.read(Path("machine.yaml")) == Machine.of(VALUES)
    # Which is then the machine of this folder.
    assert table(run(capsys, "--ranks", "2"))
    message = "--machine: there is no folder none for machine.yaml"
    assert refused(capsys, "--calibrate", "--machine", "none/machine.yaml") == message


def test_settings_that_rates_depend_on_are_named(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that one trainer alone was not measured."""
    slow = {**VALUES, "speeds": VALUES["speeds"][1:]}
    Path("two.yaml").write_text(yaml.safe_dump(slow))
    settings = ["--precision", "bfloat16", "--threads", "2", "--compile", "true", "--ranks", "2"]
    notes = [
        "precision is bfloat16, with which the rates have to be measured",
        "threads is 2, with which the rates have to be measured",
        "compile is true; the lines are those without it",
    ]
    text = run(capsys, "--machine", machine, *settings)
    assert all(f"note: {note}\n" in text for note in notes)
    assert "at once" not in text
    text = run(capsys, "--machine", "two.yaml", "--ranks", "2")
    assert "note: the rates are those of 2 trainers at once; fewer are predicted to be no" in text
    assert "have to be measured" not in text
    Path("gpus.yaml").write_text(yaml.safe_dump({**slow, "devices": 2}))
    assert "at once" not in run(capsys, "--machine", "gpus.yaml", "--ranks", "2")
    message = "exchange: shared is one copy of the weights in the host's memory, for trainers on"
    assert refused(capsys, "--machine", "gpus.yaml", "--exchange", "shared").startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0; it must be whole numbers above 0"),
        (["--ranks", "1", "-2"], "--ranks is [1, -2]; it must be whole numbers above 0"),
        (["--ranks", "[]"], "--ranks is []; it must be whole numbers above 0"),
        (["--ranks", "two"], '--ranks is "two"; it must be whole numbers above 0'),
        (["--ranks", "3"], "ranks: found 3, expected a multiple of ranks_each, 2, as every"),
        (["--ranks_each", "0"], "--ranks_each is 0; it must be a whole number above 0"),
        (["--width", "0"], "--width is 0; it must be"),
        (["--network_bw", "-1"], "--network_bw is -1; it must be a number above 0"),
        (["--ranks_eech", "2"], "unknown option --ranks_eech; did you mean --ranks_each?"),
        (["--network_alg", "2"], "unknown option --network_alg; did you mean --collective?"),
        (["--collective", "nccl"], "collective: nccl has no model: it depends on the links"),
        (["--collective", "asaa"], '--collective is "asaa"; it must be'),
        (["--exchange", "shared", "--ranks", "4"], "exchange: shared is one copy of the weights"),
        (["--bucket_mb", "25"], "bucket_mb is 25 and exchange is average: only gradients can"),
        (["--output", "cost.txt"], "--output: found cost.txt, expected a file whose name ends"),
        (["--output", "none/cost.png"], "none/cost.png: cannot be written: No such file or"),
        (["--from", "trace.json"], "--from and --machine are both given; expected one of them"),
        (["--json", "--layers"], "--layers is a table, and --json has none"),
        (["--norm_rows", "3"], "norm_rows: found 3, expected a divisor of batch_size 4"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    arguments: Sequence[str], message: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused(capsys, "--machine", machine, *arguments)
    assert found.startswith(message)


def test_a_machine_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "no machine is given and there is no machine.yaml: measure this one by --calibrate"
    assert refused(capsys).startswith(missing)
    assert refused(capsys, "--cpu_speed", "1e12").startswith(missing)
    assert refused(capsys, "--machine", "none.yaml").startswith("none.yaml: cannot be read: No ")
    Path("large.yaml").write_bytes(bytes(3_000_000))
    message = (
        "large.yaml: has 3.00 MB; expected the rates of a machine, in a few kB of YAML (a trace"
    )
    assert refused(capsys, "--machine", "large.yaml").startswith(message)
    slow = {**VALUES["speeds"][0], "bandwidth": -1}
    Path("bad.yaml").write_text(yaml.safe_dump({"speeds": [slow]}))
    assert (
        refused(capsys, "--machine", "bad.yaml")
        == "bad.yaml: speeds, entry 1: bandwidth is -1; it must be a number of bytes/s above 0"
    )


def test_what_takes_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(program, "_PATIENCE", 0.01)
    monkeypatch.setattr(program.log, "info", lambda *words: done.set())
    with reported("rewriting the graph of %s", "a network"):
        assert done.wait(10)
    done.clear()
    monkeypatch.setattr(program, "_PATIENCE", 60.0)
    with reported("rewriting the graph of %s", "a network"):
        pass
    assert not done.is_set()


def test_rates_that_contradict_each_other_are_doubted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One trainer was measured beside another program: two at once are faster than it."""
    alone, both = VALUES["speeds"]
    slow = {**alone, "bandwidth": 2e9, "rates": {"default": 2e8}}
    Path("slow.yaml").write_text(yaml.safe_dump(VALUES | {"speeds": [slow, both]}))
    text = run(capsys, "--machine", "slow.yaml", "--ranks", "1", "2")
    assert "note: 2 ranks are predicted more than 2 times as fast as one" in text
    assert "measure it again" in text


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(program.tempfile, "TemporaryFile", denied)
    message = refused(capsys, "--calibrate")
    assert message == "--machine: machine.yaml: cannot be written: Permission denied"


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture(suffix: str, tmp_path: Path) -> None:
    waits = Prediction(1, 1, 1.0, 0.0, 0.0, 1.5, 8)
    hides = Prediction(64, 8, 1.0, 0.8, 0.3, 0.5, 512, speedup=49.2)
    draw("a network", [waits, hides], tmp_path / f"cost.{suffix}")
    assert (tmp_path / f"cost.{suffix}").stat().st_size > 5_000
