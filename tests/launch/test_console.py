"""Lines for the user where there is no terminal."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.launch.console import TerminalReporter, TrainingReporter, ValidationReporter
from tandem.training.messages import Notice


@pytest.mark.parametrize("kind", [TrainingReporter, ValidationReporter])
def test_a_notice_is_a_line(kind: type[TerminalReporter], caplog: pytest.LogCaptureFixture) -> None:
    spec: Any = SimpleNamespace(config=SimpleNamespace(live_view=False))
    with caplog.at_level(logging.INFO):
        kind(spec).report(Notice("cuda:0 keeps the pictures"))
    assert caplog.messages == ["cuda:0 keeps the pictures"]
