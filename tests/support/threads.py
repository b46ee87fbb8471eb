"""Calls side by side, each in a thread of its own."""

import threading
from collections.abc import Callable, Sequence


def run_threads(calls: Sequence[Callable[[], None]], seconds: float = 30) -> None:
    """Run all at once; raise the first error of any."""
    errors: list[BaseException] = []

    def guard(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(c,), daemon=True) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert errors or not thread.is_alive()
    if errors:
        raise errors[0]
