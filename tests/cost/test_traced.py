"""Rates of a machine from traces of runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema import Config
from tandem.cost.machine import Speed
from tandem.cost.steps import trainer_step
from tandem.cost.traced import machine_of_trace
from tandem.errors import InputError
from tandem.trace.chrome import Event, Header, Trace, names, read_trace, write_trace
from tandem.trace.spans import spans_of
from tests.support.runs import train
from tests.support.tiny import prepare

SPEED = Speed(
    trainers=2,
    threads=4,
    bandwidth=2e10,
    call=0,
    rates={"default": 1e9, "elementwise": 1e9, "convolution": 1e11, "update": 1e10},
)
WORKS = {
    "gradients": [("convolution", 10**9, 10**6), ("elementwise", 10**7, 10**7)],
    "update": [("update", 5 * 10**8, 10**9)],
}
RUN = {
    "network": "alex_net:AlexNet",
    "network_options": {},
    "crop_size": 227,
    "classes": 1000,
    "width": 1.0,
    "precision": "float32",
    "batch_size": 32,
    "threads": 4,
    "convolutions": "direct",
    "trainers": 2,
    "processor": "a processor",
    "trace": "ops",
}
FILL = 0.25  # seconds


def span(name: str, begin: float, end: float, pid: int = 0, **args: Any) -> Event:
    about = {"args": args} if args else {}
    ts, dur = 1e6 * begin, 1e6 * (end - begin)
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": 1, **about}


def step(begin: float, rank: int) -> list[Event]:
    """A step of which each line takes as long as by SPEED, between other parts."""
    events, now = [span("wait", begin, begin + 1, 2 * rank)], begin + 1
    for part, works in WORKS.items():
        first = now
        for kind, flops, nbytes in works:
            end = now + SPEED.seconds(kind, flops, nbytes)
            about = {"op": "Op", "layer": "a", "phase": "forward"}
            work = {"kind": kind, "flops": flops, "bytes": nbytes}
            events.append(span("Op", now, end, 2 * rank, **about, **work))
            now = end
        events += [span(part, first, now, 2 * rank), span("exchange", now, now + 2, 2 * rank)]
        now += 2
    return [span("step", begin, now, 2 * rank), *events]


def trace(run: dict[str, Any] = RUN, ranks: int = 2, with_ops: bool = True) -> Trace:
    headers, events = [], []
    for rank in range(ranks):
        for name, number in (("trainer", 2 * rank), ("loader", 2 * rank + 1)):
            process = f"{name} {rank}"
            about = {"rank": rank, "steps": (0, 3), "recorded_steps": 3, "host": "h", "run": run}
            headers.append(Header(process=process, number=number, **about))
            events += names(headers[-1], [name])
        events += [event for number in range(3) for event in step(100 * number, rank)]
        for number, seconds in enumerate((FILL, FILL, 9 * FILL)):  # the last from a slow disk
            events.append(span("fill", 100 * number, 100 * number + seconds, 2 * rank + 1))
    kept = [event for event in events if with_ops or "op" not in event.get("args", {})]
    return Trace(headers, kept)


def written(folder: Path, *arguments: Any, **options: Any) -> Path:
    write_trace(folder / "trace.json", trace(*arguments, **options))
    return folder / "trace.json"


@pytest.mark.parametrize("ranks", [1, 2])
def test_rates_are_those_of_the_steps(tmp_path: Path, ranks: int) -> None:
    """Of the file of one trainer of two, and of all."""
    machine = machine_of_trace(written(tmp_path, ranks=ranks), Config(batch_size=8), 1000)
    (found,) = machine.speeds
    assert (found.trainers, found.threads) == (2, 4)
    assert found.rates == pytest.approx(SPEED.rates, rel=1e-6)
    assert found.bandwidth == pytest.approx(SPEED.bandwidth, rel=1e-6)
    assert found.call == pytest.approx(0, abs=1e-9)
    assert machine.processor == "a processor"
    assert machine.load == pytest.approx(32 * 3 * 227**2 / FILL)


def test_updates_of_any_optimizer_are_known(tmp_path: Path) -> None:
    """Without an Op of its own, as SGD and Adam have, an optimizer's lines are elementwise."""
    whole = trace()
    for event in whole.events:
        if (about := event.get("args", {})).get("kind") == "update":
            about |= {"kind": "elementwise", "phase": "update"}
    write_trace(tmp_path / "trace.json", whole)
    (found,) = machine_of_trace(tmp_path / "trace.json", Config(), 1000).speeds
    assert found.bandwidth == pytest.approx(SPEED.bandwidth, rel=1e-6)


def test_trainers_are_counted_by_machine(tmp_path: Path) -> None:
    whole = trace({**RUN, "trainers": 4}, ranks=4)
    headers = [replace(h, host=f"h{h.rank // 2}") for h in whole.processes]
    write_trace(tmp_path / "trace.json", Trace(headers, whole.events))
    (found,) = machine_of_trace(tmp_path / "trace.json", Config(), 1000).speeds
    assert found.trainers == 2


def test_without_pictures_there_is_no_rate_of_loading(tmp_path: Path) -> None:
    path = written(tmp_path, {**RUN, "crop_size": None, "batch_size": "?", "threads": None})
    machine = machine_of_trace(path, Config(), 1000)
    assert machine.load is None
    assert machine.speeds[0].threads == 1


def test_settings_of_a_trace_are_those_that_are_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert machine_of_trace(path, Config(threads=4, convolutions="direct"), 1000).speeds
    for config, expected in (
        (Config(threads=2), "threads 4; expected 2"),
        (Config(convolutions="winograd"), 'convolutions "direct"; expected "winograd"'),
    ):
        with pytest.raises(InputError, match=f"is the trace of a run with {expected}, as rates"):
            machine_of_trace(path, config, 1000)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("network", "a:B", 'network "a:B"; expected "alex_net:AlexNet"'),
        ("network_options", {"norm_before_pool": True}, "network_options .*; expected {}"),
        ("crop_size", 224, "crop_size 224; expected 227"),
        ("classes", 10, "classes 10; expected 1000"),
        ("width", 0.5, "width 0.5; expected 1.0"),
        ("precision", "bfloat16", 'precision "bfloat16"; expected "float32"'),
    ],
)
def test_a_trace_of_another_network_is_refused(
    tmp_path: Path, key: str, value: object, expected: str
) -> None:
    path = written(tmp_path, {**RUN, key: value})
    with pytest.raises(InputError, match=rf"trace.json: is the trace of a run with {expected}"):
        machine_of_trace(path, Config(), 1000)


def test_a_trace_without_ops_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {**RUN, "trace": "steps"}, with_ops=False)
    message = 'holds no Ops, its run had trace "steps"; expected trace: ops'
    with pytest.raises(InputError, match=message):
        machine_of_trace(path, Config(), 1000)


def test_the_trace_of_a_loader_is_refused(tmp_path: Path) -> None:
    whole = trace()
    (loader,) = (header for header in whole.processes if header.process == "loader 1")
    write_trace(tmp_path / "trace.json", Trace([loader], []))
    with pytest.raises(InputError, match=r"is the trace of loader 1; expected one with a trainer"):
        machine_of_trace(tmp_path / "trace.json", Config(), 1000)


def test_a_trace_of_half_a_step_is_refused(tmp_path: Path) -> None:
    whole = trace()
    events = [e for e in whole.events if e.get("args", {}).get("kind") != "update"]
    write_trace(tmp_path / "trace.json", replace(whole, events=events))
    with pytest.raises(InputError, match="no line updates weights; expected a trace of whole"):
        machine_of_trace(tmp_path / "trace.json", Config(), 1000)


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(InputError, match=r"trace\.json"):
        machine_of_trace(path, Config(), 1000)
    content = json.dumps({"traceEvents": [], "otherData": {"format": "another"}})
    path.write_text(content)
    with pytest.raises(InputError, match=r'trace\.json: is a trace of format "another"'):
        machine_of_trace(path, Config(), 1000)


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [1, 2])
def test_the_lines_of_a_run_are_those_that_are_counted(tmp_path: Path, trainers: int) -> None:
    """So the steps of a traced run are as long as its own rates predict."""
    data, run = prepare(tmp_path / "data", train=48 * trainers), tmp_path / "run"
    changes = {"batch_size": 4, "width": 0.25, "trace": "ops", "trace_steps": [2, 12]}
    changes |= {"devices": ["cpu"] * trainers, "exchange": "average"}
    train(data, run, **changes)
    config = Config(batch_size=4, width=0.25, crop_size=67, exchange="average")
    (speed,) = machine_of_trace(run, config, 3).speeds
    assert (speed.trainers, speed.threads) == (trainers, 1)
    spans = spans_of(read_trace(run / "trace-0.json"))
    parts = [s.seconds for s in spans if s.name in ("gradients", "update")]
    computed = sum(parts) / len(parts) * 2
    assert sum(trainer_step(config, 3).seconds(speed)) == pytest.approx(computed, rel=0.1)
