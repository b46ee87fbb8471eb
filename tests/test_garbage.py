"""No garbage is collected while a process is set up."""

import gc
from functools import partial

import pytest

from tandem.garbage import uncollected


def test_what_is_there_is_frozen_before_collections_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name in ("disable", "freeze", "enable"):
        monkeypatch.setattr(gc, name, partial(said.append, name))
    with pytest.raises(KeyError), uncollected():
        raise KeyError(*said)
    assert said == ["disable", "freeze", "enable"]
