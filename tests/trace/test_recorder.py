"""What a process records: spans of calls, in which steps, and in a bounded memory."""

import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.trace import recorder as module
from tandem.trace.chrome import read_trace
from tandem.trace.recorder import Recorder, clock
from tests.support.tiny import ROOT
from tests.support.traces import span_seconds


def make(path: Path, steps: tuple[int, int] = (0, 1), **changes: Any) -> Recorder:
    return Recorder("trainer 0", 0, path / "trace-0.json", steps, {"batch_size": 4}, **changes)


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [e for e in read_trace(path / "trace-0.json").events if e["ph"] == phase]


def spans(path: Path) -> list[str]:
    return [event["name"] for event in events(path, "X")]


def test_calls_are_recorded_in_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    recorder = make(tmp_path, (2, 4))
    step = recorder.wrap(lambda number: number * 2, "step")
    for number in range(6):
        recorder.begin_step()
        assert step(number) == 2 * number
        recorder.end_step()
    assert spans(tmp_path) == ["step", "step"]
    (header,) = read_trace(tmp_path / "trace-0.json").processes
    assert (header.steps, header.recorded_steps, header.dropped) == ((2, 4), 2, 0)
    assert header.run == {"batch_size": 4}
    assert header.kind == "trainer"


def test_the_file_is_there_only_after_the_last_step(tmp_path: Path) -> None:
    recorder = make(tmp_path, (0, 2))
    for there in (False, True):
        recorder.begin_step()
        recorder.end_step()
        assert recorder.path.exists() == there


def test_the_end_writes_what_the_file_lacks(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.close()
    assert not recorder.path.exists()
    recorder.begin_step()
    recorder.wrap(int, "step")()
    late = recorder.wrap(recorder.end_step, "write")
    late()
    assert spans(tmp_path) == ["step"]
    recorder.close()
    assert spans(tmp_path) == ["step", "write"]
    recorder.path.unlink()
    recorder.close()
    assert not recorder.path.exists()


def test_within_the_steps_the_file_is_written_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(module, "_FLUSH_SHARE", 1e9)
    recorder = make(tmp_path, (0, 100))
    for count in range(1, 4):
        recorder.begin_step()
        recorder.wrap(int, "step")()
        recorder.end_step()
        assert len(spans(tmp_path)) == count
        assert read_trace(recorder.path).processes[0].recorded_steps == count


def test_writing_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0

    def tick() -> int:
        nonlocal now
        now += 1_000_000_000
        return now

    monkeypatch.setattr(module, "clock", tick)
    recorder = make(tmp_path, (0, 1000))
    recorder.begin_step()
    flushes: list[int] = []
    write = recorder.flush
    recorder.flush = lambda: (flushes.append(now), write())  # type: ignore[assignment,func-returns-value]
    for _ in range(500):
        recorder.begin_step()
        recorder.end_step()
    # A flush takes a second of this clock: the next comes 200 s later.
    assert len(flushes) == 3
    assert all(b - a >= 200e9 for a, b in itertools.pairwise(flushes))


def test_spans_have_their_times_threads_and_arguments(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.begin_step()
    recorder.add("gradients", 5_000, 7_500, {"layer": "conv1"})
    with ThreadPoolExecutor(1, "checkpoint") as pool:
        pool.submit(recorder.wrap(int, "write")).result()
    recorder.wrap(int, "fill", thread="loader")()
    recorder.end_step()
    first, write, fill = events(tmp_path, "X")
    assert first["ts"] == 5
    assert first["dur"] == 2.5
    assert first["args"] == {"layer": "conv1"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(tmp_path, "M")[2::2]}
    assert [named[e["pid"], e["tid"]] for e in (first, write, fill)] == [
        "trainer",
        "checkpoint",
        "loader",
    ]
    assert events(tmp_path, "M")[0]["args"] == {"name": "trainer 0"}


def test_methods_of_one_object_are_recorded(tmp_path: Path) -> None:
    class Owner:
        def wait(self, seconds: float) -> float:
            return seconds

    owner, other = Owner(), Owner()
    recorder = make(tmp_path)
    recorder.record_calls(owner, wait="wait")
    recorder.begin_step()
    assert owner.wait(3) == other.wait(3) == 3
    recorder.end_step()
    assert spans(tmp_path) == ["wait"]


def test_a_call_that_raises_is_recorded(tmp_path: Path) -> None:
    recorder = make(tmp_path)

    def fail() -> None:
        raise ValueError("bad")

    recorder.begin_step()
    with pytest.raises(ValueError, match="bad"):
        recorder.wrap(fail, "step")()
    recorder.end_step()
    assert spans(tmp_path) == ["step"]


def test_counters_and_both_ends_of_a_flow(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.count("memory", {"resident": 1})  # before the first step: not recorded
    recorder.flow(0, True)
    recorder.begin_step()
    recorder.count("memory", {"resident": 2e9})
    begin = partial(recorder.flow, 7, begins=True, thread="loader")
    recorder.wrap(int, "fill", within=begin, thread="loader")()
    recorder.wrap(int, "wait", within=lambda: recorder.flow(7, False))()
    recorder.end_step()
    (memory,) = events(tmp_path, "C")
    assert memory["args"] == {"resident": 2e9}
    fill, wait = events(tmp_path, "X")
    (start,), (end,) = events(tmp_path, "s"), events(tmp_path, "f")
    assert start["id"] == end["id"] == 7
    for span, flow in ((fill, start), (wait, end)):
        assert span["ts"] <= flow["ts"] <= span["ts"] + span["dur"]
        assert span["tid"] == flow["tid"]


def test_flows_of_other_ranks_are_others(tmp_path: Path) -> None:
    found = set()
    for number in (0, 1, 2, 3):
        recorder = Recorder("trainer", number, tmp_path / "trace-0.json", (0, 1), {})
        recorder.begin_step()
        recorder.flow(5, True)
        recorder.end_step()
        found.add(events(tmp_path, "s")[0]["id"])
    assert found == {5, (1 << 32) + 5}


def test_the_newest_events_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    recorder = make(tmp_path, capacity=10)
    recorder.begin_step()
    for number in range(25):
        recorder.add(f"span {number}", clock(), clock())
    recorder.end_step()
    assert spans(tmp_path) == [f"span {number}" for number in range(15, 25)]
    assert read_trace(recorder.path).processes[0].dropped == 15


def test_threads_record_while_the_file_is_written(tmp_path: Path) -> None:
    recorder = make(tmp_path, (0, 2))
    recorder.begin_step()
    call = recorder.wrap(int, "call")
    done = threading.Event()

    def work() -> None:
        for _ in range(5000):
            call()
        done.set()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not done.is_set():
        recorder.flush()
    for thread in threads:
        thread.join()
    recorder.flush()
    assert len(spans(tmp_path)) == 15000
    assert read_trace(recorder.path).processes[0].dropped == 0


def test_a_failed_write_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make(tmp_path, (0, 9))
    recorder.begin_step()
    recorder.flush()
    before = recorder.path.read_bytes()
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorder.flush()
    assert recorder.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace-0.json"]


WRITER = """
import itertools, sys
from pathlib import Path
from tandem.trace.recorder import Recorder
recorder = Recorder("trainer 0", 0, Path(sys.argv[1]) / "trace-0.json", (0, 10**9), {})
for step in itertools.count():
    recorder.begin_step()
    for _ in range(20_000):
        recorder.add("call", step, step + 1)
    recorder.flush()
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(tmp_path: Path) -> None:
    for wanted in ("*", "trace-0.json"):  # when it has begun to write, and when it has written
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT)
        while not [*tmp_path.glob(wanted)]:
            assert writer.poll() is None
        writer.kill()
        writer.wait()
        if wanted != "*" or (tmp_path / "trace-0.json").exists():
            (header,) = read_trace(tmp_path / "trace-0.json").processes
            assert len(spans(tmp_path)) == 20_000 * header.recorded_steps
        for path in tmp_path.iterdir():
            path.unlink()


def test_a_span_costs_microseconds() -> None:
    assert 0 < span_seconds() < 20e-6


def test_calls_cost_little_while_nothing_is_recorded(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    call = recorder.wrap(int, "call")
    begin = clock()
    for _ in range(10_000):
        call()
    assert (clock() - begin) / 10_000 < 5_000
    assert not recorder.path.exists()
