"""The traces of several processes as one, by one clock."""

from pathlib import Path
from typing import Any

import pytest

from tandem.errors import InputError
from tandem.trace.chrome import Trace, read_trace, write_trace
from tandem.trace.merge import merge, remove_traces, trace_file
from tandem.trace.recorder import Recorder

ABOUT = {"network": "alex_net:AlexNet", "trainers": 2}


def write(run: Path, number: int, offset: int = 0, name: str = "", **changes: Any) -> None:
    """One process's trace: two spans, at 10 and 20 microseconds of its own clock, and a flow."""
    kind = ("trainer", "loader")[number % 2]
    path = run / (name or trace_file(number // 2, kind == "loader"))
    recorder = Recorder(f"{kind} {number // 2}", number, path, (0, 2), ABOUT | changes)
    recorder.clock_offset_ns = offset
    recorder.begin_step()
    recorder.add("step", 10_000 - offset, 15_000 - offset)
    recorder.add("step", 20_000 - offset, 25_123 - offset)
    recorder.flow(3, begins=kind == "loader")
    recorder.flush()


def test_clocks_are_shifted_by_the_offset_of_the_trainer(tmp_path: Path) -> None:
    for number, offset in ((3, 0), (2, -7_000_001), (0, 0), (1, 0)):
        write(tmp_path, number, offset)
    trace = merge(tmp_path)
    assert [h.process for h in trace.processes] == [
        "trainer 0",
        "loader 0",
        "trainer 1",
        "loader 1",
    ]
    begin = {
        pid: [e["ts"] for e in trace.events if e["ph"] == "X" and e["pid"] == pid]
        for pid in range(4)
    }
    assert begin[0] == begin[1] == begin[2]
    # The loader of rank 1 has the clock of its trainer, whose offset moves it.
    assert begin[3] == [pytest.approx(ts - 7000.001) for ts in begin[0]]
    assert min(min(times) for times in begin.values()) == 0
    assert {h.clock_offset_ns for h in trace.processes} == {0}
    assert trace.run == ABOUT


def test_a_merged_trace_can_be_written_and_read(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path, number)
    trace = merge(tmp_path)
    write_trace(tmp_path / "trace.json", trace)
    assert read_trace(tmp_path / "trace.json") == trace
    assert merge(tmp_path).events == trace.events  # the merged one is not merged again
    ends = {(e["ph"], e["id"]) for e in trace.events if e["ph"] in "sf"}
    assert ends == {("s", 3), ("f", 3), ("s", (1 << 32) + 3), ("f", (1 << 32) + 3)}


def refused(run: Path) -> str:
    with pytest.raises(InputError) as caught:
        merge(run)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{run}", "RUN")


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    expected = "expected the folder of a run with the setting trace: steps or ops"
    assert refused(tmp_path) == f"RUN: found no trace-0.json, {expected}"
    assert refused(tmp_path / "a") == f"RUN: found no such folder, {expected}"


def test_traces_of_different_runs_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 4, trainers=3)
    assert refused(tmp_path) == (
        "RUN/trace-2.json: trainers is 3, but 2 in trace-0.json; expected traces of one run: remove"
        " those of an earlier one"
    )


def test_a_process_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 0, name="trace-5.json")
    assert refused(tmp_path) == (
        "RUN/trace-5.json: found the trace of trainer 0, expected it to be named trace-0.json"
    )


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 0)
    for name in ("trace-before.json", "trace-0.old.json", "trace-0-loader.json.txt"):
        (tmp_path / name).write_text("{")
    assert len(merge(tmp_path).processes) == 1


def test_a_merged_trace_among_them_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 0)
    header = read_trace(tmp_path / "trace-0.json").processes[0]
    write_trace(tmp_path / "trace-1.json", Trace([header, header], []))
    assert refused(tmp_path) == "RUN/trace-1.json: found 2 processes, expected one"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1)
    path = tmp_path / "trace-0-loader.json"
    path.write_bytes(path.read_bytes()[:300])
    assert refused(tmp_path).startswith("RUN/trace-0-loader.json: not JSON: ")


def test_the_files_of_an_earlier_start_are_removed(tmp_path: Path) -> None:
    kept = {"trace.json", "trace-before.json", "record.jsonl"}
    for name in ("trace-0.json", "trace-11-loader.json", *kept):
        (tmp_path / name).write_text("")
    remove_traces(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_traces(tmp_path / "missing")
