"""Runs that are traced: what their traces hold, and that they compute what others compute."""

import signal
import timeit
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tandem.__main__ import main as tandem
from tandem.artifacts.run_folder import list_checkpoints
from tandem.memory.parameters import HostMemory
from tandem.trace.chrome import read_trace
from tandem.trace.spans import spans_of
from tandem.training import tracing
from tests.support.perfetto import perfetto
from tests.support.ranks import Starter
from tests.support.runs import (
    RunningJob,
    assert_same_bits,
    train,
    train_log,
    train_ranks,
)
from tests.support.tiny import prepare, run_program, settings, wait_until
from tests.support.traces import coverage, parts_of, span_seconds, spans_in, steps_in

slow = pytest.mark.slow
TWO: dict[str, Any] = {
    "devices": ["cpu"] * 2,
    "n_epochs": 2,
    "shuffle": "images",
    "width": 0.3,
    "batch_size": 4,
    "exchange": "gradients",
    "print_freq": 3,
    "check_every": 4,
}
WINDOW = [2, 9]  # of 12 steps, six of each epoch
FLOPS = "select max(int_value) from args where key = 'args.flops'"
PARTS = {"wait", "request", "gradients", "vote", "exchange", "update", "progress"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"), train=43)


@pytest.fixture(scope="module")
def untraced(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("untraced") / "run", **TWO)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=slow)], ids="trainers={}".format)
def traced(
    data: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """Of trainers with loaders, of the same global minibatch: parts of steps and Ops."""
    run, trainers = tmp_path_factory.mktemp("traced") / "run", request.param
    changes = {**TWO, "devices": ["cpu"] * trainers, "batch_size": 8 // trainers}
    log = train_log(data, run, **changes, trace="ops", trace_steps=WINDOW)
    assert f"{run}/trace-0.json: the trace of steps 2 to 8" in log
    assert len([*run.glob("trace-*.json")]) == 2 * trainers
    return run


of_two = pytest.mark.parametrize("traced", [pytest.param(2, marks=slow)], indirect=True)


@of_two
def test_a_trace_costs_no_bit(untraced: Path, traced: Path) -> None:
    assert_same_bits(traced, untraced)
    assert not [*untraced.glob("trace*")]


@of_two
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_consist_of_their_parts(traced: Path, rank: int) -> None:
    found = spans_in(traced / f"trace-{rank}.json")
    steps = steps_in(found)
    assert [step.args["step"] for step in steps] == [*range(3, 10)]
    assert [step.args["epoch"] for step in steps] == [1] * 4 + [2] * 3
    for step in steps:
        names = parts_of(step, found)
        others = {3: ["report"], 6: ["report"], 9: ["report"], 4: ["check"], 8: ["check"]}
        assert sorted(names) == sorted([*PARTS, *others.get(step.args["step"], [])])
    assert coverage(found) > 0.97
    between = [span for span in found if span.around("step") is None]
    assert {span.name for span in between if span.parent is None} == {"validate", "save"}
    (validation,) = [span for span in between if span.name == "validate"]
    expected = ["wait", "request", "evaluate", "progress", "vote"]
    assert parts_of(validation, found) == expected
    assert steps[3].end <= validation.begin
    assert validation.end <= steps[4].begin


def test_what_a_trace_is_of(traced: Path) -> None:
    expected = (
        ("trace-0.json", "trainer 0", 0),
        ("trace-0-loader.json", "loader 0", 1),
        ("trace-1.json", "trainer 1", 2),
        ("trace-1-loader.json", "loader 1", 3),
    )
    written = len([*traced.glob("trace-*.json")])
    for name, process, number in expected[:written]:
        path, trainers = traced / name, written // 2
        (header,) = read_trace(path).processes
        assert (header.process, header.number, header.rank) == (process, number, number // 2)
        assert (header.steps, header.recorded_steps, header.dropped) == ((2, 9), 7, 0)
        run = header.run
        assert (run["network"], run["width"], run["crop_size"]) == ("alex_net:AlexNet", 0.3, 67)
        found = run["trainers"], run["batch_size"], run["classes"]
        assert found == (trainers, 8 // trainers, 3)
        found = run["precision"], run["exchange"], run["trace"]
        assert found == ("float32", "gradients", "ops")


def test_an_arrow_leads_from_each_fill_to_its_step(traced: Path) -> None:
    for fills in traced.glob("trace-*-loader.json"):
        check_arrows(fills, traced / f"{fills.name.removesuffix('-loader.json')}.json", 7)


def check_arrows(fills: Path, steps: Path, count: int) -> None:
    """Check that so many arrows each lead from a fill to the gradients of its step."""
    begins = {e["id"]: e["ts"] / 1e6 for e in read_trace(fills).events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] / 1e6 for e in read_trace(steps).events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == count
    made = [span for span in spans_in(fills, "loader") if span.name == "fill"]
    used = [span for span in spans_in(steps) if span.name == "gradients"]
    for number, fill in begins.items():
        assert fill < ends[number]
        assert sum(s.begin <= fill <= s.end for s in made) == 1
        assert sum(s.begin <= ends[number] <= s.end for s in used) == 1


def test_memory_is_counted_and_a_thread_writes_checkpoints(traced: Path) -> None:
    path = traced / "trace-0.json"
    counted = [e["args"]["resident"] for e in read_trace(path).events if e["ph"] == "C"]
    assert len(counted) == 7
    assert all(50e6 < nbytes < 50e9 for nbytes in counted)
    assert [span.name for span in spans_in(path, "checkpoint")] == ["write"]


def test_a_step_pays_little_for_its_trace(traced: Path) -> None:
    """Of this step of some 20 ms, by its parts; those of the benchmarks take seconds."""
    events = read_trace(traced / "trace-0.json").events
    recorded = [e for e in events if e["ph"] in "Xsf" and "op" not in e.get("args", {})]
    steps = steps_in(spans_in(traced / "trace-0.json"))
    memory: Any = object.__new__(HostMemory)
    counting = min(timeit.repeat(lambda: tracing._memory(memory), repeat=5, number=100)) / 100
    cost = len(recorded) / len(steps) * span_seconds() + counting
    assert cost < 0.005 * median(step.seconds for step in steps)


def test_spans_of_ops(traced: Path) -> None:
    found = spans_in(traced / "trace-0.json")
    assert coverage(found) > 0.97
    lines = [span for span in found if span.is_op and span.around("step")]
    assert {line.parent.name for line in lines if line.parent} == {"gradients", "update"}
    convolutions, phases = [], set()
    for line in lines:
        args, part = line.args, line.parent
        assert part is not None
        assert args.keys() >= {"op", "layer", "phase", "shape", "flops", "bytes", "kind"}
        phases.add((part.name, args["phase"]))
        if line.name.startswith("Conv2d"):
            convolutions.append((line.name, args["layer"], args["phase"]))
            assert args["op"] == line.name
            assert args["flops"] > 0
        elif line.name in ("convert", "copy"):
            assert args["flops"] == args["bytes"] == 0
    assert phases == {("gradients", "forward"), ("gradients", "backward"), ("update", "update")}
    # The first layer needs no gradient of its pictures.
    expected = {("Conv2d", f"conv{n}", "forward") for n in range(1, 6)}
    expected |= {("Conv2dWeightGrad", f"conv{n}", "backward") for n in range(1, 6)}
    expected |= {("Conv2dInputGrad", f"conv{n}", "backward") for n in range(2, 6)}
    assert {*convolutions} == expected
    assert len(convolutions) == 7 * len(expected)


@of_two
def test_perfetto_shows_the_whole_run(traced: Path, tmp_path: Path) -> None:
    assert tandem(["trace", str(traced), "--output", str(tmp_path / "trace.json")]) == 0
    expected: Counter[tuple[str, ...]] = Counter()
    for file in traced.glob("trace-*.json"):
        trace = read_trace(file)
        process = trace.processes[0].process
        expected.update((process, span.thread, span.name) for span in spans_of(trace))
    with perfetto(tmp_path / "trace.json") as shown:
        assert shown.faults() == []
        assert shown.spans() == expected
        assert shown.flows() == {
            ("fill", f"loader {rank}", "gradients", f"trainer {rank}"): 7 for rank in (0, 1)
        }
        assert shown.counters() == {(f"trainer {n}", "memory resident"): 7 for n in (0, 1)}
        assert shown.query(FLOPS)[0][0] > 0
        shown.expand()
        # Perfetto writes each name with the number of its process or thread.
        names = ["trainer 0 0", "loader 0 1", "trainer 1 2", "loader 1 3", "checkpoint 2"]
        for name in (*names, "memory resident"):
            shown.page.get_by_text(name, exact=True).first.wait_for()
        assert shown.page.get_by_text("main thread").count() == 0


@slow
@pytest.mark.parametrize(
    ("by", "trace", "para_load"),
    [
        ("mpirun", "steps", False),
        pytest.param("mpirun", "ops", True, marks=slow),
        pytest.param("torchrun", "steps", True, marks=slow),
        pytest.param("torchrun", "ops", False, marks=slow),
    ],
)
def test_ranks_average_buckets_in_a_thread(
    data: Path, tmp_path: Path, untraced: Path, by: Starter, trace: str, para_load: bool
) -> None:
    """The run ends before the steps to record do."""
    changes = {**TWO, "devices": ["cpu"], "bucket_mb": 0.5, "para_load": para_load}
    changes |= {"trace": trace, "trace_steps": [3, 100]}
    run = train_ranks(data, tmp_path / "run", 2, by, **changes)
    assert_same_bits(run, untraced)
    for rank in range(2):
        path = run / f"trace-{rank}.json"
        fills = run / f"trace-{rank}-loader.json" if para_load else path
        for each in {path, fills}:
            assert read_trace(each).processes[0].recorded_steps == 9
        check_arrows(fills, path, 9)
        averages = spans_in(path, "buckets")
        assert {span.name for span in averages} == {"average"}
        buckets = {span.args["bucket"] for span in averages}
        assert len(buckets) > 1
        assert len(averages) == 9 * len(buckets)
        found = spans_in(path)
        assert parts_of(steps_in(found)[0], found).count("begin exchange") == 1
        assert coverage(found) > 0.9  # ranks wait busily, on as few cores as there may be


# Longer runs


@slow
def test_lines_of_a_larger_network_cover_its_steps(data: Path, tmp_path: Path) -> None:
    changes = {"trace": "ops", "trace_steps": [2, 5], "width": 1.0, "batch_size": 32}
    train(data, tmp_path / "run", **{**TWO, **changes, "devices": ["cpu"], "n_epochs": 3})
    found = spans_in(tmp_path / "run" / "trace-0.json")
    assert len(steps_in(found)) == 3
    assert coverage(found) > 0.97
    assert coverage(found, "gradients") > 0.97
    assert coverage(found, "update") > 0.97
    outermost = [span for span in found if span.is_op and span.around("step")]
    others = [
        s for s in found if s.name in ("vote", "wait", "request", "report", "check", "progress")
    ]
    covered = sum(span.seconds for span in [*outermost, *others] if span.around("step"))
    assert covered > 0.97 * sum(step.seconds for step in steps_in(found))


@slow
@pytest.mark.parametrize("rule", ["easgd", "gosgd"])
def test_asynchronous_ranks_are_traced(data: Path, tmp_path: Path, rule: str) -> None:
    changes = {**TWO, "devices": ["cpu"], "rule": rule, "exchange": "average", "check_every": 0}
    train_ranks(data, tmp_path, 2, **changes, trace="steps", trace_steps=WINDOW)
    for rank in range(2):
        found = spans_in(tmp_path / f"trace-{rank}.json")
        assert len(steps_in(found)) == 7
        assert "exchange" in {span.name for span in found}


@slow
def test_trainers_that_divide_layers_meet_within_gradients(data: Path, tmp_path: Path) -> None:
    changes = {"fully_connected": "sharded", "trace": "ops", "trace_steps": WINDOW}
    runs = [train(data, tmp_path / "plain", **TWO, fully_connected="sharded")]
    runs.append(train(data, tmp_path / "traced", **TWO, **changes))
    assert_same_bits(*runs)
    found = spans_in(tmp_path / "traced" / "trace-1.json")
    meetings = [span for span in found if span.name == "conversion"]
    assert len(meetings) > len(steps_in(found))
    assert all(span.around("gradients") or span.around("evaluate") for span in meetings)
    assert all(span.parent is not None and span.parent.is_op for span in meetings)


@slow
def test_simulated_gpus_are_waited_for(data: Path, tmp_path: Path) -> None:
    changes = {**TWO, "devices": ["cuda:0", "cuda:1"], "compile": False, "precision": "float32"}
    changes |= {"trace": "steps", "trace_steps": WINDOW}
    train_ranks(data, tmp_path, 2, program=("tests/support/simulated_train.py",), **changes)
    found = spans_in(tmp_path / "trace-0.json")
    assert {"gradients", "synchronize", "exchange", "update"} <= {span.name for span in found}
    counted = [e["args"] for e in read_trace(tmp_path / "trace-0.json").events if e["ph"] == "C"]
    assert all(values["free on the GPU"] > 0 for values in counted)


@slow
def test_a_killed_run_leaves_what_was_written(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {**TWO, "n_epochs": 100_000, "trace": "steps", "trace_steps": [1, 10**7]}
    job = RunningJob(data, run, **changes)
    names = {f"trace-{rank}{suffix}.json" for rank in (0, 1) for suffix in ("", "-loader")}
    assert wait_until(lambda: names <= {path.name for path in run.iterdir()}, 60)
    job.signal(signal.SIGKILL, "group")
    job.process.wait()
    recorded = {name: read_trace(run / name).processes[0].recorded_steps for name in names}
    assert min(recorded.values()) > 0
    numbers = [step.args["step"] for step in steps_in(spans_in(run / "trace-0.json"))]
    assert numbers == [*range(2, 2 + recorded["trace-0.json"])]


@slow
def test_a_resumed_run_is_traced_from_its_own_first_step(data: Path, tmp_path: Path) -> None:
    run, traced = tmp_path / "run", {"trace": "steps", "trace_steps": [0, 2]}
    train(data, run, **{**TWO, **traced, "n_epochs": 1})
    assert len([*run.glob("trace-*.json")]) == 4
    alone = {**TWO, **traced, "devices": ["cpu"], "batch_size": 8, "exact": False}
    train(data, run, **alone, resume_train=True)
    assert {path.name for path in run.glob("trace-*.json")} == {
        "trace-0.json",
        "trace-0-loader.json",
    }
    steps = steps_in(spans_in(run / "trace-0.json"))
    assert [step.args for step in steps] == [{"epoch": 2, "step": 7}, {"epoch": 2, "step": 8}]
    # A validation by the settings of the run leaves its trace alone.
    before = (run / "trace-0.json").read_bytes()
    weights = str(list_checkpoints(run)[-1])
    result = run_program(
        "validate.py", ["--weights", weights, *settings(data, run, **TWO, **traced)]
    )
    assert result.returncode == 0, result.stderr
    assert (run / "trace-0.json").read_bytes() == before


@slow
def test_a_restarted_run_is_traced_anew(data: Path, tmp_path: Path) -> None:
    traced = {"trace": "steps", "trace_steps": [2, 8], "restarts": 1}
    job = RunningJob(data, tmp_path, 12, **{**TWO, **traced, "n_epochs": 30, "print_freq": 1})
    first = steps_in(spans_in(tmp_path / "trace-0.json"))
    job.signal(signal.SIGKILL, "trainer 1")
    job.end(0, timeout=120)
    again = steps_in(spans_in(tmp_path / "trace-0.json"))
    assert len(first) == len(again) == 6
    assert first[0].args["step"] == 3
    assert again[0].args["step"] > 3
    assert first[-1].end < again[0].begin
