"""Child processes that do not run the user's program again.

`multiprocessing` names the module ``__main__`` to a new process, which imports it before it works:
a script without a guard, ``if __name__ == "__main__"``, would start the same run in every child.
Here a process is started while a stand-in without file and name takes the place of ``__main__``.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

_starting = threading.Lock()


class _StandIn(ModuleType):
    """Hides where ``__main__`` came from; all else is that of `main`, for other threads."""

    def __init__(self, main: ModuleType) -> None:
        super().__init__("__main__")  # its __spec__ is None
        self.__dict__["_main"] = main

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self.__dict__["_main"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_main"], name, value)


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Hide ``__main__`` from the processes that this thread starts."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = _StandIn(main)
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class OwnProcess(process.BaseProcess):
    """A process that does not import ``__main__``, in whichever way it is started."""

    def start(self) -> None:
        with hidden_main():
            super().start()


class _Process(OwnProcess, SpawnProcess):
    pass


def _forget_children() -> None:
    """In a child of `os.fork`, forget the parent's: multiprocessing would end them at its exit."""
    others = {child for child in process._children if not isinstance(child, OwnProcess)}  # type: ignore[attr-defined]
    process._children = others  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_children)


class _Context(SpawnContext):
    Process = _Process


SPAWN = _Context()
"""Context of `multiprocessing` whose processes do not import ``__main__``."""


def start_new(target: Callable[..., None], args: tuple[Any, ...], name: str) -> SpawnProcess:
    """Start a process that ends with this one."""
    process = SPAWN.Process(target=target, args=args, name=name, daemon=True)
    process.start()
    return process
