"""How the launcher reports a failure of a trainer."""

import logging
from pathlib import Path

import pytest

from tandem.config.schema import Config
from tandem.launch.console import ValidationReporter
from tandem.launch.local import LocalLauncher
from tandem.launch.prepare import prepare_run
from tests.support.tiny import prepare


@pytest.mark.slow
def test_an_exception_in_a_trainer_is_reported_with_its_own_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(
        data_folder=str(prepare(tmp_path / "data")),
        weights_dir=str(tmp_path),
        crop_size=67,
        width=0.05,
        batch_size=2,
        devices=("cpu", "cpu"),
        threads=1,
        network="tests.support.broken_network:BrokenAlexNet",
    )
    spec = prepare_run(config)
    with caplog.at_level(logging.INFO):
        assert LocalLauncher().launch(spec, ValidationReporter(spec)).status == 1
    failed, ended = caplog.messages[-2:]
    assert failed.startswith("trainer 1 failed:\nTraceback")
    assert "broken_network.py" in failed
    assert ended == "error: the run has ended: trainer 1: ZeroDivisionError: broken on purpose"
