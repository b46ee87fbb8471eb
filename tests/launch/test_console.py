"""Lines for the user where there is no terminal."""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.artifacts.metrics_log import TrainRecord
from tandem.launch.console import TerminalReporter, TrainingReporter, ValidationReporter
from tandem.launch.local import LocalLauncher
from tandem.launch.status import total_memory
from tandem.processes.heartbeat import HeartbeatTable
from tandem.processes.supervisor import ProgressReporter
from tandem.training.messages import STAGES, Activity, Notice, Progress, Stage
from tests.launch.test_live_view import spec_of


@pytest.mark.parametrize("kind", [TrainingReporter, ValidationReporter])
def test_a_notice_is_a_line(
    kind: type[TerminalReporter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        kind(spec_of(tmp_path)).report(Notice("cuda:0 keeps the pictures"))
    assert caplog.messages == ["cuda:0 keeps the pictures"]


def test_each_stage_before_the_first_step_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = TrainingReporter(spec_of(tmp_path))
    with caplog.at_level(logging.INFO):
        for activity in (Activity.STARTING, Activity.COMPILING_GRADIENT, Activity.FIRST_STEP):
            reporter.report(Stage(activity))
        reporter.report(Progress("train", 1, 1, 7))
        reporter.report(Stage(Activity.COMPILING_VALIDATION))  # the live view alone shows it
    seconds, stages = zip(*(line.split(" s: ") for line in caplog.messages), strict=True)
    assert stages == ("starting processes", "compiling gradient", "first step")
    assert all(0 <= float(number) < 10 for number in seconds)


def test_after_ten_steps_a_line_has_what_the_run_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(spec_of(tmp_path), most_steps=20)
    reporter = TrainingReporter(spec)
    reporter.begin(HeartbeatTable.create(("launcher",), 60), {"trainer 0": os.getpid()})
    record = TrainRecord(1, 1, 2.5, 0.75, 0.01, 130.5, 18.0, 0.5, 1.5)
    with caplog.at_level(logging.INFO):
        for step in range(1, 21):
            reporter.report(replace(record, step=step))
            reporter.report(Progress("train", 1, step, 20))
    assert "left" not in caplog.messages[0]  # nothing is known yet
    (estimate,) = [line for line in caplog.messages if line.startswith("about ")]
    assert caplog.messages.index(estimate) == 10
    assert re.fullmatch(
        r"about \d+(\.\d+)? [MG]B of memory in 1 process here, \d:\d\d for the training of an"
        r" epoch, \d:\d\d left",
        estimate,
    )
    assert re.search(r"exchange 1\.50; \d:\d\d left$", caplog.messages[-1])


def test_memory_that_processes_share_counts_once() -> None:
    one = total_memory([os.getpid()])
    assert one > 10e6
    assert total_memory([os.getpid()] * 3) == pytest.approx(one, rel=0.2)
    assert total_memory([2**30]) == 0  # nobody's


@pytest.mark.slow
def test_a_run_reports_its_stages_in_order(tmp_path: Path) -> None:
    spec = replace(spec_of(tmp_path, width=0.05), most_steps=2)
    config = spec.config.model_copy(update={"weights_dir": str(tmp_path), "n_epochs": 1})
    spec = replace(spec, config=config)
    seen: list[Activity] = []

    class Stages(ProgressReporter):
        def report(self, message: object) -> None:
            if isinstance(message, Stage):
                seen.append(message.activity)

    assert LocalLauncher().launch(spec, Stages()).status == 0
    gradient, update, _, validation = [each for each in STAGES if "COMPILING" in each.name]
    assert seen == [Activity.STARTING, gradient, update, Activity.FIRST_STEP, validation]
