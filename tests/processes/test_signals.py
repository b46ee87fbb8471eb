"""Requests to stop, counted while the main thread computes."""

import hashlib
import os
import signal
import threading
import time

import pytest

from tandem.processes import signals as module
from tandem.processes.signals import StopSignals, exits_at, signal_name


def test_another_thread_sees_a_signal_during_a_long_call_of_the_main_thread() -> None:
    seen: list[float] = []

    def watch() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        while not signals.poll():
            time.sleep(0.01)
        seen.append(time.monotonic())

    with StopSignals() as signals:
        thread = threading.Thread(target=watch)
        thread.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)  # one call, without an instruction
        ended = time.monotonic()
        thread.join(10)
    assert seen[0] < ended
    assert (signals.count, signals.exit_status) == (1, 143)


def test_signals_soon_after_each_other_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignals() as signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert signals.poll() == 1
        monkeypatch.setattr(module, "REPEAT_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.poll() == 2
    assert signals.exit_status == 130


def test_a_closed_terminal_is_a_request_too() -> None:
    former = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("not taken for a request"))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.poll() == 1
        assert signals.exit_status == 129
    finally:
        signal.signal(signal.SIGHUP, former)


def test_under_nohup_a_closed_terminal_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals, exits_at(signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.poll() == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGRTMIN, "SIGRTMIN"),
        (signal.SIGRTMIN + 3, "signal 37 (SIGRTMIN+3)"),
        (signal.SIGRTMAX - 1, "signal 63 (SIGRTMIN+29)"),
        (signal.SIGRTMAX, "SIGRTMAX"),
        (33, "signal 33"),  # of the C library
        (99, "signal 99"),
    ],
)
def test_every_signal_has_a_name(number: int, expected: str) -> None:
    assert signal_name(number) == expected


def test_the_former_handlers_are_restored() -> None:
    former = signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) is not former
    assert signal.getsignal(signal.SIGINT) is former
    assert signal.set_wakeup_fd(-1) == -1
