"""The GPU benchmark's order, time budget and rows, with contenders that take no time."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu import (
    Budget,
    Report,
    Session,
    copy_row,
    exchange_part,
    goal_row,
    main,
    parse,
    peak_flops,
    run_settings,
    runs_part,
    step_row,
    steps_part,
    table,
    time_steps,
)
from benchmarks.gpu_contenders import CONTENDERS, Place
from benchmarks.measure import Measured, measure
from benchmarks.original import run_row, table_runs
from benchmarks.roofline import Rates
from examples.resident_step import Sizes
from tests.benchmarks.test_original import record

SMALL = Sizes(batch=3)
RATES = Rates(1e12, 1e10)


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def session(clock: Clock, *words: str, seconds: float = 1000) -> Session:
    options = parse(["--rounds", "2", "--repeats", "1", *words])
    place = Place(SMALL, "bfloat16", None)
    return Session(options, Budget(seconds, clock), Report(), place, lambda: None)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[str]:
    """Contenders that note when they are made and take 50 seconds to be made."""
    events: list[str] = []

    def make(name: str) -> Callable[[], Any]:
        events.append(f"make {name}")
        clock.now += 50
        if name == "eager":
            raise RuntimeError("out of luck")
        return lambda: None

    for name, contender in CONTENDERS.items():
        fake = replace(contender)  # type: ignore[type-var]
        object.__setattr__(fake, "make", lambda place, name=name: make(name))
        monkeypatch.setitem(CONTENDERS, name, fake)
    monkeypatch.setattr(
        "benchmarks.gpu.print", lambda line, **_: events.append(line), raising=False
    )
    return events


def names(report: Report, what: str) -> list[str]:
    return [row["name"] for row in report.rows if row["what"] == what]


def test_each_row_is_reported_before_the_next_contender_is_made(
    clock: Clock, events: list[str]
) -> None:
    one = session(clock, "--modes", "ours", "compiled", "compiled-sliced")
    time_steps(one, RATES, None)
    shown = [e if e.startswith("make") else json.loads(e)["what"] for e in events]
    first = ["make ours", "step", "goal"]
    assert shown == [
        *first,
        "make compiled",
        "step",
        "goal",
        "make compiled-sliced",
        "step",
        "goal",
    ]


def test_each_contender_is_compared_with_ours_and_its_goal(
    clock: Clock, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"ours": 0.010, "compiled": 0.011, "compiled-sliced": 0.011, "channels-last": 0.02}
    monkeypatch.setattr(
        "benchmarks.gpu.measure",
        lambda steps, *rest, **options: [Measured(name, (seconds[name],) * 3) for name in steps],
    )
    one = session(clock, "--modes", *seconds)
    time_steps(one, RATES, None)
    rows = {row["name"]: row for row in one.report.rows}
    found = [rows[name]["first is faster by"] for name in seconds]
    assert found == [None, 1.1, 1.1, 2.0]
    goals = {n: r["reached"] for n, r in rows.items() if r["what"] == "goal"}
    share = rows["ours"]["share_of_floor"]
    assert goals == {
        "part of the floor": share >= 0.5,
        "speed of compiled": False,  # of 1.2
        "speed of compiled-sliced": True,
    }
    assert rows["part of the floor"]["value"] == share


def test_without_ours_nothing_has_a_goal(clock: Clock, events: list[str]) -> None:
    one = session(clock, "--modes", "channels-last", "compiled")
    time_steps(one, RATES, None)
    assert [row["what"] for row in one.report.rows] == ["step", "step"]


def test_what_has_no_time_is_left_out_and_named(clock: Clock, events: list[str]) -> None:
    # At 60 seconds for what compiles and 180 for what tunes, each takes 50.
    modes = ["ours", "max-autotune", "compiled", "max-autotune-sliced", "channels-last"]
    one = session(clock, "--modes", *modes, seconds=240)
    time_steps(one, RATES, None)
    assert names(one.report, "step") == ["ours", "max-autotune", "compiled", "channels-last"]
    assert one.budget.left_out == ["max-autotune-sliced"]


def test_a_contender_that_fails_is_reported_and_the_next_is_made(
    clock: Clock, events: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    one = session(clock, "--modes", "eager", "ours", "compiled")
    time_steps(one, RATES, None)
    assert [row["error"] for row in one.report.rows if row["what"] == "failure"] == [
        "RuntimeError: out of luck"
    ]
    assert names(one.report, "step") == ["ours", "compiled"]
    assert one.report.failed
    assert "out of luck" in capsys.readouterr().err


def test_the_part_of_the_steps_runs_on_a_cpu_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "NVIDIA H200")
    monkeypatch.setattr("benchmarks.gpu.measure_rates", lambda *arguments: RATES)
    limit, benchmark = torch._dynamo.config.recompile_limit, torch.backends.cudnn.benchmark
    steps_part(session(clock, "--modes", "eager"))
    assert torch._dynamo.config.recompile_limit > len(CONTENDERS)
    torch._dynamo.config.recompile_limit, torch.backends.cudnn.benchmark = limit, benchmark
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["what"] for row in rows] == ["rates", "step"]
    assert rows[1]["images_per_second"] > 0
    assert rows[1]["share_of_peak"] is not None


def test_runs_are_limited_by_the_time_that_is_left(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], float]] = []

    def run_records(data: Any, settings: list[str], *rest: Any) -> Any:
        asked.append((settings, rest[1]))
        clock.now += 100
        return [record(51_200.0, 0.01)]

    monkeypatch.setattr("benchmarks.gpu.run_records", run_records)
    monkeypatch.setattr("benchmarks.gpu.cuda_device_count", lambda: 1)
    one = session(clock, "--data", "data", "--", "--crop_size", "99", seconds=320)
    runs_part(one)
    assert [limit for _, limit in asked] == [320, 220, 120]
    assert asked[0][0][-10:] == ["--crop_size", "99", *table_runs(1)[0].settings()]
    assert one.budget.left_out == [run.name for run in table_runs(1)[3:]]
    assert names(one.report, "goal") == [
        "loading hidden, one trainer, parallel loading on",
        "loading hidden, 2 trainers on 1 GPU, parallel loading on",
    ]
    yes, no = (row for row in one.report.rows if row["what"] == "table 1")
    assert (yes["seconds, 2 trainers"], no["seconds, 2 trainers"]) == (0.1, None)
    assert (yes["seconds, 1 trainer"], no["seconds, 1 trainer"]) == (0.1, 0.1)


def test_averages_and_gradients_are_exchanged(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(Measured("average", (0.001,)), 800), (Measured("gradients", (0.001,)), 400)]
    monkeypatch.setattr("benchmarks.gpu.exchange_seconds", lambda *rounds: found)
    one = session(clock)
    exchange_part(one)
    assert names(one.report, "copy") == ["average", "gradients"]
    exchange_part(late := session(clock, seconds=1))
    assert (late.report.rows, late.budget.left_out) == ([], ["exchange"])


def test_contenders_run_in_turn_and_warming_up_does_not_count() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    found = measure(steps, 2, 2, lambda: calls.append("wait"), warmups=1)
    assert calls == 3 * ["wait", "a", "a", "wait", "wait", "b", "b", "wait"]
    assert [(m.name, len(m.seconds)) for m in found] == [("a", 2), ("b", 2)]


def test_peaks_are_of_the_device_and_precision() -> None:
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert peak_flops("A device to come", "float32") is None


def test_the_table_has_a_block_for_each_kind() -> None:
    measured = Measured("plain", (0.5, 0.25, 1.0))
    rows = [
        step_row(measured, SMALL, None, 0.25),
        copy_row(measured, 10**9),
        run_row(table_runs(1)[0], [record(2.0, 0.0)]),
    ]
    lines = table(rows).splitlines()
    assert lines[0].split()[:2] == ["name", "images_per_second"]
    assert lines[1].startswith("plain  6.0")
    assert lines[1].endswith("3       -              0.5")
    assert "2.0" in lines[4]
    assert lines[-1].startswith("one trainer, parallel loading on  2.0")
    assert table([goal_row("hidden", 0.98, 0.97)]).splitlines()[1].endswith("yes")
    assert table([goal_row("hidden", 0.96, 0.97)]).splitlines()[1].endswith("NO")
    assert all(json.dumps(row) for row in rows)


def test_the_command_line_chooses_parts_and_contenders() -> None:
    options = parse(["--parts", "steps", "--modes", "ours", "ours", "compiled", "--seconds", "280"])
    assert options.modes == ["ours", "compiled"]
    assert (options.parts, options.seconds) == (["steps"], 280)
    assert parse([]).modes == list(CONTENDERS)
    assert run_settings(parse(["--", "--seed", "2"]))[-2:] == ["--seed", "2"]
    with pytest.raises(SystemExit):
        parse(["--modes", "fastest"])


def test_what_is_stopped_prints_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: Any, report: Report) -> None:
        report(goal_row("speed of compiled", 1.3, 1.2))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("benchmarks.gpu.run", run)
    monkeypatch.setattr("benchmarks.gpu.cuda_device_count", lambda: 1)
    monkeypatch.setattr("benchmarks.gpu.missing_for_gpus", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main([])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "speed of compiled  1.3    1.2   yes" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: this benchmark needs a GPU: no GPU was found\n"
