"""What the launcher makes of faults in its children."""

import logging
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import proc_load
from tandem.config.schema import Config
from tandem.launch.console import SilentReporter, ValidationReporter
from tandem.launch.local import WorkerHandle, WorkerPool, _cause, explain, launch, run_pool
from tandem.launch.prepare import prepare_run
from tandem.launch.ranks import TrainerThread
from tandem.processes import heartbeat
from tandem.training.messages import Failed, Finished
from tandem.training.run_spec import RunSpec
from tests.support.tiny import prepare


def plan_of(folder: Path, **settings: object) -> RunSpec:
    config = Config(
        data_folder=str(prepare(folder / "data")),
        weights_dir=str(folder / "run"),
        crop_size=67,
        width=0.05,
        batch_size=2,
        devices=("cpu", "cpu"),
        threads=1,
        **settings,
    )
    (folder / "run").mkdir()
    return prepare_run(config)


def test_an_exception_in_a_trainer_is_told_with_its_own_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = plan_of(tmp_path, network="tests.support.broken_network:BrokenAlexNet")
    with caplog.at_level(logging.INFO):
        assert launch(spec, proc_load.serve, ValidationReporter(spec)).status == 1
    messages = [record.getMessage() for record in caplog.records]
    assert messages[-1] == (
        "error: the run has ended: trainer 1: ZeroDivisionError: broken on purpose"
    )
    assert messages[-2].startswith("trainer 1 failed:\nTraceback")
    assert "broken_network.py" in messages[-2]


def test_bad_input_that_a_trainer_finds_has_exit_status_2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = plan_of(tmp_path)
    spec = replace(spec, config=spec.config.model_copy(update={"crop_size": 40}))
    with caplog.at_level(logging.INFO):
        assert launch(spec, proc_load.serve, ValidationReporter(spec)).status == 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("error: crop_size, width: AlexNet: at crop_size 40")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_trainer_that_is_a_thread_has_no_heart_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lives as long as its process, however long that is."""
    monkeypatch.setattr(heartbeat, "START_SECONDS", 0.3)
    spec = SimpleNamespace(config=SimpleNamespace(peer_timeout_seconds=0.3), job="train")

    def start(pool: WorkerPool) -> None:
        here, there = multiprocessing.Pipe()

        def work() -> None:
            time.sleep(1.5)
            there.send(Finished(0))

        thread = TrainerThread(work, here)
        thread.start()
        pool.members.append(WorkerHandle("trainer 0", thread, here))

    names = ("launcher", "trainer 0")
    outcome = run_pool(cast(RunSpec, spec), names, None, start, SilentReporter(), explain)
    assert outcome.failure is None


def test_who_could_not_say_anything_is_nearer_to_the_cause() -> None:
    """As a trainer that had no memory left even to tell of it."""
    lost = Failed("trainer 0", "consequence", "PeerLost: trainer 1 ended", "Traceback")
    exits = [Failed(f"trainer {n}", "consequence", "ended with exit status 1", "") for n in (0, 1)]
    alone = cast(WorkerPool, SimpleNamespace(members=[]))
    assert _cause(alone, [lost, *exits]) == exits[1]
    assert _cause(alone, [lost, exits[0]]) == lost
    killed = Failed("loader 1", "death", "was killed by SIGKILL", "")
    assert _cause(alone, [lost, exits[1], killed]) == killed
