"""Where a rank's memory lies; how it is exchanged is checked by real ranks, `check_ranks`."""

from typing import Any

import pytest

from tandem.config.schema import Config
from tandem.memory import SlotLayout
from tandem.training.memory import CudaSite
from tandem.training.rank_memory import CudaRankSite


def test_what_an_earlier_trainer_has_left_is_given_back_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr("tandem.backend.give_back_memory", lambda: done.append("given back"))
    monkeypatch.setattr(CudaSite, "open", lambda *_: done.append("opened"))
    anything: Any = None
    site = CudaRankSite(0, SlotLayout(1, 8), (), config=Config(), engine=anything)
    site.open(anything, {}, "float32")
    assert done == ["given back", "opened"]
