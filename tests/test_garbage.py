"""No garbage is collected where modules are imported."""

import gc
import subprocess
import sys

import pytest

from tandem.garbage import uncollected

IMPORTS = """
import gc

generations = []
gc.callbacks.append(lambda phase, about: generations.append(about["generation"]))
import tandem.backend

assert gc.isenabled()
print(sum(generation > 0 for generation in generations))
"""


@pytest.mark.parametrize("collects", [True, False])
def test_collections_are_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(gc, "isenabled", lambda: collects)
    monkeypatch.setattr(gc, "disable", lambda: said.append(False))
    monkeypatch.setattr(gc, "enable", lambda: said.append(True))
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert said == [False, True][: 1 + collects]


def test_importing_the_mode_collects_nothing() -> None:
    found = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) <= 1  # PyTensor's and PyTorch's modules alone would make dozens
