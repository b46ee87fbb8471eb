"""``tandem trace``: what it prints, writes and refuses."""

import json
import time
from pathlib import Path

import pytest

from tandem.__main__ import main
from tandem.trace.chrome import read_trace
from tandem.trace.recorder import Recorder

ABOUT = {"network": "alex_net:AlexNet", "batch_size": 128, "trainers": 2}
SPANS = """\
process  thread   span         calls  total s  median ms  of the steps
trainer  trainer  step             8    0.080     10.000        100.0%
trainer  trainer    wait           8    0.008      1.000         10.0%
trainer  trainer    gradients      8    0.064      8.000         80.0%
{lines}trainer  trainer    (rest)         8    0.008      1.000         10.0%
loader   loader   fill             8    0.040      5.000         50.0%
"""
LINES = "trainer  trainer      (lines)     16    0.064      4.000         80.0%\n"
LAYERS = """\
layer  phase    calls  total s  median ms  of the steps  GFLOP/s
conv1  forward      8    0.064      8.000         80.0%      2.5

Op      kind of work  calls  total s  median ms  of the steps  GFLOP/s  GB/s
Conv2d  convolution      16    0.064      4.000         80.0%      2.5   0.0
"""


def write(run: Path, ops: int = 0, steps: int = 4, recorded: int = 4, ranks: int = 2) -> None:
    """A run whose steps take 10 ms, with `ops` lines of a program in each."""
    run.mkdir(exist_ok=True)
    for rank in range(ranks):
        files = run / f"trace-{rank}.json", run / f"trace-{rank}-loader.json"
        trainer = Recorder(f"trainer {rank}", 2 * rank, files[0], (0, steps), ABOUT)
        loader = Recorder(f"loader {rank}", 2 * rank + 1, files[1], (0, steps), ABOUT)
        for step in range(recorded):
            begin = 10_000_000 * step
            trainer.begin_step()
            loader.begin_step()
            loader.add("fill", begin, begin + 5_000_000)
            trainer.add("wait", begin, begin + 1_000_000)
            trainer.add("gradients", begin + 1_000_000, begin + 9_000_000)
            for line in range(ops):
                args = {"op": "Conv2d", "layer": "conv1", "phase": "forward", "flops": 10_000_000}
                args |= {"bytes": 40_000, "kind": "convolution", "shape": [128, 96, 55, 55]}
                each = 8_000_000 // ops
                first = begin + 1_000_000 + line * each
                trainer.add("Conv2d", first, first + each, args)
            trainer.add("step", begin, begin + 10_000_000)
            trainer.end_step()
            loader.end_step()
        trainer.flush()
        loader.flush()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["trace", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["trace", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_run_is_merged_and_its_table_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    text = printed(capsys, str(tmp_path))
    assert text.startswith("network alex_net:AlexNet, batch_size 128, trainers 2\n")
    assert "trainer 0, loader 0, trainer 1, loader 1 on " in text
    assert SPANS.format(lines="") in text
    assert "GFLOP/s" not in text
    assert text.endswith(
        f"{tmp_path}/trace.json: open it in https://ui.perfetto.dev or chrome://tracing\n"
    )
    assert len(read_trace(tmp_path / "trace.json").processes) == 4


def test_with_ops_there_are_layers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, ops=2)
    text = printed(capsys, str(tmp_path))
    spans = SPANS.format(lines=LINES)
    assert f"{spans}\n{LAYERS}\n" in text


def test_the_output_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run")
    printed(capsys, str(tmp_path / "run"), "--output", str(tmp_path / "a.json"))
    assert len(read_trace(tmp_path / "a.json").processes) == 4
    assert not (tmp_path / "run" / "trace.json").exists()


def test_one_file_is_only_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    text = printed(capsys, str(tmp_path / "trace-0.json"))
    assert "\ntrainer 0 on " in text
    assert "trainer  trainer  step             4  " in text
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_all_rows_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, ops=2)
    found = json.loads(printed(capsys, str(tmp_path), "--json"))
    assert found["run"] == ABOUT
    assert [each["process"] for each in found["processes"]][:2] == ["trainer 0", "loader 0"]
    assert found["spans"][0]["path"] == ["trainer", "trainer", "step"]
    assert found["spans"][0]["median"] == pytest.approx(0.01)
    assert found["layers"][0]["path"] == ["conv1", "forward"]
    assert found["ops"][0]["flops"] == 16 * 10_000_000


def test_what_was_not_recorded_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, steps=20)
    path = tmp_path / "trace-1.json"
    path.write_text(path.read_text().replace('"dropped":0', '"dropped":1234'))
    lines = printed(capsys, str(tmp_path)).splitlines()
    assert lines[1].endswith("; steps 0 to 19, counted from 0 at the start")
    assert lines[2] == "trainer 0 wrote 4 of 20 steps"
    dropped = "dropped its 1,234 oldest events, as its buffer was full"
    assert lines[4] == f"{lines[2].replace('0 w', '1 w')} and {dropped}"


def test_what_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "found no trace-0.json" in refused(capsys, str(tmp_path))
    assert "found no such folder" in refused(capsys, str(tmp_path / "runs"))
    (tmp_path / "trace-0.json").write_text("{")
    assert "trace-0.json: not JSON" in refused(capsys, str(tmp_path))
    assert "trace-0.json: not JSON" in refused(capsys, str(tmp_path / "trace-0.json"))
    message = refused(capsys, str(tmp_path / "trace-0.json"), "--output", "a.json")
    assert "--output: found it with the file" in message


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    path = tmp_path / "file" / "a.json"
    path.parent.touch()
    message = refused(capsys, str(tmp_path), "--output", str(path))
    assert message.startswith(f"error: {path.parent}: the folder cannot be made: ")


def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    message = refused(capsys, str(tmp_path), "--output", str(tmp_path))
    assert message == f"error: {tmp_path}: cannot be written: Is a directory\n"
    before = (tmp_path / "trace-1.json").read_bytes()
    message = refused(capsys, str(tmp_path), "--output", str(tmp_path / "trace-1.json"))
    assert message.endswith("trace-1.json, which is one of the traces to merge\n")
    assert (tmp_path / "trace-1.json").read_bytes() == before


@pytest.mark.slow
def test_a_trace_with_many_lines_is_merged_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, ops=1000, steps=20, recorded=20)
    begin = time.process_time()
    printed(capsys, str(tmp_path))
    assert time.process_time() - begin < 4
