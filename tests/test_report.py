"""The page of a run, in a browser."""

import math
import re
from pathlib import Path

import pytest

from tandem.artifacts.metrics_log import MetricsLog, ValidationRecord
from tandem.config.command_line import load_config
from tandem.config.schema import save_config
from tandem.report import run_report
from tandem.trace.chrome import Header, Trace, names, write_trace
from tests.support.browser import assert_self_contained
from tests.support.tiny import settings
from tests.test_plot import record_run, save_filters


def write_traces(run: Path) -> None:
    """Two steps of 3 ms of a trainer, of 1 ms of gradients and 2 ms of update."""
    header = Header(process="trainer 0", rank=0, number=0, steps=(0, 2), recorded_steps=2)
    events = names(header, ["trainer"])
    for step in range(2):
        for name, begin, length in (("step", 0, 3), ("gradients", 0, 1), ("update", 1, 2)):
            place = {"ph": "X", "name": name, "pid": 0, "tid": 1}
            events.append({**place, "ts": 1000.0 * (3 * step + begin), "dur": 1000.0 * length})
    write_trace(run / "trace-0.json", Trace([header], events))


def test_the_page_of_a_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record_run(tmp_path / "mine")
    save_filters(run)
    save_config(load_config(settings(data, run)), run)
    write_traces(run)
    assert run_report([str(run)], None) == 0
    assert f"wrote {run}/report.html" in capsys.readouterr().err
    headings = ["Result", "Curves", "Filters of the first layer", "Training pictures"]
    headings += ["Timeline", "Settings", "Machine"]
    text = assert_self_contained(run / "report.html", headings, pictures=4)
    assert "The first 2 steps of trainer 0." in text
    assert "Run mine" in text
    assert str(data) in text


def test_a_run_without_checkpoint_trace_and_data(tmp_path: Path) -> None:
    run = record_run(tmp_path / "young")
    save_config(load_config(settings(tmp_path / "gone", run)), run)
    assert run_report([str(run), "--output", str(tmp_path / "page.html")], None) == 0
    text = (tmp_path / "page.html").read_text()
    headings = [part.partition("<")[0] for part in text.split("<h2>")[1:]]
    assert headings == ["Result", "Curves", "Settings"]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report([str(tmp_path)], None) == 2
    assert f"error: {tmp_path}/record.jsonl" in capsys.readouterr().err


def test_epochs_without_a_validation_are_no_result(tmp_path: Path) -> None:
    nan = math.nan
    errors = {1: nan, 2: 0.5, 3: nan, 4: 0.25, 5: 0.75, 6: nan}
    with MetricsLog(record_run(tmp_path / "run", epochs=0) / "record.jsonl") as log:
        for epoch, error in errors.items():
            measured = (1.0, error, error, 0 if math.isnan(error) else 9)
            log.append(ValidationRecord(epoch, 10 * epoch, *measured))
    save_config(load_config(settings(tmp_path / "gone", tmp_path / "run")), tmp_path / "run")
    assert run_report([str(tmp_path / "run")], None) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    table = re.sub(r"<[^>]+>", " ", text.split("<h2>Result")[1].split("<h2>")[0])
    assert re.search(r"last\s+5\s+50 .*best by top-1 error\s+4\s+40 .*25\.00 %", table, re.DOTALL)
    assert "nan" not in table
