"""Every test of settings runs in an empty folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No config.yaml lies in the current folder, unless a test puts one there."""
    monkeypatch.chdir(tmp_path)
