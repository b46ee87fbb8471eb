"""Packages that few files need, imported when a test first uses them, not where tests are found."""

import importlib
from typing import Any


class Lazily:
    """A module that is imported by the first look at one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks of its own
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
