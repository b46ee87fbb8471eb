"""Processes that do not run the program that starts them."""

import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from tandem.processes.signals import StopSignals
from tandem.processes.spawn import SPAWN, hidden_main


def report(connection: Connection) -> None:
    main = sys.modules["__main__"]
    connection.send((main.__name__, getattr(main, "__file__", None)))


@pytest.mark.parametrize("origin", ["file", "spec"])
def test_a_process_does_not_import_main(
    origin: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = ModuleType("__main__")
    if origin == "file":
        main.__file__ = str(tmp_path / "main.py")
        Path(main.__file__).write_text("raise SystemExit('the program runs again')\n")
    else:
        main.__spec__ = subprocess.__spec__
    monkeypatch.setitem(sys.modules, "__main__", main)
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=report, args=(there,))
    process.start()
    assert here.poll(30)
    assert here.recv() == ("__main__", None)
    process.join()
    assert process.exitcode == 0
    assert sys.modules["__main__"] is main


def test_other_threads_see_their_main_meanwhile() -> None:
    main = sys.modules["__main__"]
    main.of_this_test = 1  # type: ignore[attr-defined]
    seen: list[object] = []

    def look() -> None:
        import __main__

        seen.append(__main__.of_this_test)
        __main__.of_this_test = 2

    with hidden_main():
        hidden = sys.modules["__main__"]
        assert not hasattr(hidden, "__file__")
        assert hidden.__spec__ is None
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert (seen, main.of_this_test) == ([1], 2)  # type: ignore[attr-defined]
    assert sys.modules["__main__"] is main
    del main.of_this_test  # type: ignore[attr-defined]


def test_one_thread_at_a_time_hides_main() -> None:
    """Otherwise one would put back what hides it for the other."""
    main, inside = sys.modules["__main__"], threading.Event()

    def hide() -> None:
        with hidden_main():
            inside.set()

    thread = threading.Thread(target=hide)
    with hidden_main():
        thread.start()
        assert not inside.wait(0.1)
    thread.join()
    assert inside.is_set()
    assert sys.modules["__main__"] is main


def test_signals_are_not_counted_on_another_thread() -> None:
    counts: list[int] = []

    def enter() -> None:
        with StopSignals() as signals:
            counts.append(signals.poll())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert counts == [0]
