"""Runs of preprocessing that stop in the middle, as if they were killed."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest


class _Stop(BaseException):
    """Nothing may catch it, as nothing catches SIGKILL."""


def stopping(function: Callable, call: int, *, after: bool) -> Callable:
    """`function`, but its call number `call` (from 0) stops the run, before or after it works."""
    calls = iter(range(1_000_000))

    def stopped(*args: object) -> object:
        stop = next(calls) == call
        if stop and not after:
            raise _Stop
        result = function(*args)
        if stop:
            raise _Stop
        return result

    return stopped


def stop(
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str],
    module: ModuleType,
    name: str,
    call: int = 0,
    after: bool = False,
) -> None:
    """Start make_hkl.py with options; it stops at a call of a function of a module."""
    import make_hkl

    with monkeypatch.context() as patch:
        patch.setattr(module, name, stopping(getattr(module, name), call, after=after))
        with pytest.raises(_Stop):
            make_hkl.main(options)
