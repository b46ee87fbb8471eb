"""The GPU benchmark's comparisons and rows, as far as a CPU can tell."""

import itertools
import json
import time

import pytest
import torch

from benchmarks.gpu import (
    Budget,
    Report,
    Session,
    copy_row,
    goal_row,
    parse,
    peak_flops,
    step_row,
    steps_part,
    table,
    time_steps,
)
from benchmarks.gpu_contenders import CONTENDERS, StepSetting
from benchmarks.measure import Measured, measure
from benchmarks.original import run_row, table_runs
from benchmarks.roofline import Rates
from examples.resident_step import Sizes
from tests.benchmarks.test_original import record

SMALL = Sizes(batch=3)
RATES = Rates(1e12, 1e10)


def session(*words: str) -> Session:
    options = parse(["--rounds", "2", "--repeats", "1", *words])
    place = StepSetting(SMALL, "bfloat16", None)
    return Session(options, Budget(1000), Report(), place, lambda: None)


@pytest.mark.slow
def test_each_contender_is_compared_with_ours_and_its_goal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in {type(contender) for contender in CONTENDERS.values()}:
        monkeypatch.setattr(kind, "make", lambda self, place: lambda: None)
    seconds = {"ours": 0.010, "compiled": 0.011, "compiled-sliced": 0.011, "channels-last": 0.02}
    monkeypatch.setattr(
        "benchmarks.gpu.measure",
        lambda steps, *rest, **options: [Measured(name, (seconds[name],) * 3) for name in steps],
    )
    one = session("--modes", *seconds)
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


def test_the_part_of_the_steps_runs_on_a_cpu_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "NVIDIA H200")
    monkeypatch.setattr("benchmarks.gpu.measure_rates", lambda *arguments: RATES)
    limit, benchmark = torch._dynamo.config.recompile_limit, torch.backends.cudnn.benchmark
    steps_part(session("--modes", "eager"))
    assert torch._dynamo.config.recompile_limit > len(CONTENDERS)
    torch._dynamo.config.recompile_limit, torch.backends.cudnn.benchmark = limit, benchmark
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["what"] for row in rows] == ["rates", "step"]
    assert rows[1]["images_per_second"] > 0
    assert rows[1]["share_of_peak"] is not None


def test_contenders_run_in_turn_and_warming_up_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    found = measure(steps, 2, 2, lambda: calls.append("wait"), warmups=1, settle=2)
    turns = ["a", "wait", "a", "a", "wait"], ["b", "wait", "b", "b", "wait"]
    assert calls == 3 * [*turns[0], *turns[1]]
    assert all(m.seconds == (0.5, 0.5) for m in found)
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
