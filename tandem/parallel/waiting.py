"""Waiting for messages: awake for a moment, since waking a process takes longer than a message."""

import select
import time
from collections.abc import Iterable

SPIN_SECONDS = 3e-4
"""For which a process that waits stays awake, where each rank has a core of its own."""

_PAUSE = 15


class Waiter:
    """Waits until one of some pipes can be read, or has been closed at the other end.

    A process that sleeps in the system takes tens of microseconds to wake, and its waker as long to
    wake it. So it asks again and again for `spin` seconds, and then sleeps.
    """

    def __init__(self, descriptors: Iterable[int], spin: float) -> None:
        self._spin, self._poll = spin, select.poll()
        self._pause = 0  # waits during which it does not try to stay awake
        for descriptor in descriptors:
            self._poll.register(descriptor, select.POLLIN)

    def wait(self) -> list[int]:
        """Return the descriptors that can be read, when there is any."""
        poll, clock = self._poll.poll, time.perf_counter
        found: list[tuple[int, int]] = []
        if self._pause:
            self._pause -= 1
        elif self._spin:
            end = clock() + self._spin
            while not (found := poll(0)) and clock() < end:
                pass
            self._pause = 0 if found else _PAUSE
        return [descriptor for descriptor, _ in found or poll()]
