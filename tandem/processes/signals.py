"""Signals: requests to stop, by the user, a cluster or a closed terminal, and names of all."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Requests to stop in good order; SIGHUP is that of a closed terminal or a lost connection."""

REPEAT_SECONDS = 1.0  # within which a second signal repeats the first


class StopSignals:
    """Context manager: count the signals of `STOPPING` instead of being interrupted by them.

    The first is a request to stop in good order, the second to end at once. Signals within a second
    are one request: a wrapper may pass on a signal that the group of processes has had already.

    The main thread enters and leaves it. Any thread may `poll`, also while the main thread is
    inside a long call: Python runs its handlers only between instructions of the main thread, but
    writes the number of a signal to a pipe as soon as it arrives. `count` is of the requests until
    the last `poll`, `last` the last signal. Entered on another thread, which can install no
    handler, it counts none. A SIGHUP that is ignored, as under ``nohup``, stays ignored.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, signal.SIGINT
        self._interrupts = False
        self._latest = -math.inf

    def __enter__(self) -> Self:
        self._receiver, self._sender = os.pipe()
        for descriptor in (self._receiver, self._sender):
            os.set_blocking(descriptor, False)
        self._former: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        self._former_wakeup = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._former = {
            number: signal.signal(number, self._arrive)
            for number in STOPPING
            if not (number == signal.SIGHUP and _is_ignored(number))
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup)
        self.poll()
        os.close(self._receiver)
        os.close(self._sender)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Context manager: in the main thread the second request raises KeyboardInterrupt."""
        self._interrupts = threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self._interrupts = False

    def _arrive(self, *_: object) -> None:
        if self._interrupts and self.poll() > 1:
            self._interrupts = False
            raise KeyboardInterrupt

    def poll(self) -> int:
        """Count the requests so far."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._receiver, 4096):
                if number in STOPPING:
                    now = time.monotonic()
                    self.count += now - self._latest >= REPEAT_SECONDS
                    self._latest, self.last = now, signal.Signals(number)
        return self.count

    @property
    def exit_status(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, as in a shell."""
        return 128 + self.last


@contextlib.contextmanager
def exits_at(*numbers: signal.Signals) -> Iterator[None]:
    """Context manager: signals that would kill the process raise SystemExit, as 128 + number."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    former = {n: signal.signal(n, end) for n in numbers if not _is_ignored(n)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def signal_name(number: int) -> str:
    """Name a signal; Python has no names for most real-time signals."""
    if number in set(signal.Signals):
        return signal.Signals(number).name
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"signal {number} (SIGRTMIN+{number - signal.SIGRTMIN})"
    return f"signal {number}"
