"""How the launcher reports failures of trainers."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.schema import Config
from tandem.launch.console import ValidationReporter
from tandem.launch.local import LocalLauncher
from tandem.launch.prepare import prepare_run
from tandem.training.run_spec import RunSpec
from tests.support.tiny import prepare


def spec_of(folder: Path, **settings: object) -> RunSpec:
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


def test_an_exception_in_a_trainer_is_reported_with_its_own_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tmp_path, network="tests.support.broken_network:BrokenAlexNet")
    with caplog.at_level(logging.INFO):
        assert LocalLauncher().launch(spec, ValidationReporter(spec)).status == 1
    messages = [record.getMessage() for record in caplog.records]
    assert messages[-1] == (
        "error: the run has ended: trainer 1: ZeroDivisionError: broken on purpose"
    )
    assert messages[-2].startswith("trainer 1 failed:\nTraceback")
    assert "broken_network.py" in messages[-2]


def test_bad_input_that_a_trainer_finds_has_exit_status_2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tmp_path)
    spec = replace(spec, config=spec.config.model_copy(update={"crop_size": 40}))
    with caplog.at_level(logging.INFO):
        assert LocalLauncher().launch(spec, ValidationReporter(spec)).status == 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("error: crop_size, width: AlexNet: at crop_size 40")
    assert list((tmp_path / "run").iterdir()) == []
