"""A minibatch whose loss is not finite, by what is reported of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.config.schema import Config
from tandem.training.not_finite import NotFinite, Position, Refusals


def test_a_data_folder_that_is_gone_does_not_hide_the_fault(tmp_path: Path) -> None:
    records: list[Any] = []
    reports: Any = SimpleNamespace(record=records.append)
    group: Any = SimpleNamespace(barrier=lambda: None)
    config = Config(data_folder=str(tmp_path / "gone"))
    with pytest.raises(NotFinite, match=r"not finite in step 8 .* picture 5, picture 2"):
        Refusals(config, 0, group, reports, True).refuse(Position(1, 3, 7), 0.1, [5, 2])
    assert records[0]().pictures == ("picture 5", "picture 2")


def test_another_trainer_can_name_the_pictures_that_were_skipped(tmp_path: Path) -> None:
    """For a line that trainer 0 owes when it is lost."""
    records: list[Any] = []
    reports: Any = SimpleNamespace(record=records.append, notice=lambda text: None)
    config: Any = Config(data_folder=str(tmp_path), on_nan="skip")
    group: Any = SimpleNamespace()
    Refusals(config, 1, group, reports, True).refuse(Position(1, 3, 7), 0.1, [5, 2])
    line = records[0]()
    assert (line.action, line.step, line.pictures) == ("skip", 8, ("picture 5", "picture 2"))
