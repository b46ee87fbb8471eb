"""A progress bar on a terminal, with log lines above it."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    unit: str, total: float | None, done: float = 0
) -> Iterator[Callable[[float], None] | None]:
    """Show a progress bar on stderr, with rate and time left, if that is a terminal.

    Parameters
    ----------
    unit : str
        What is counted, in the plural.
    total : float or None
        None where it is unknown.
    done : float
        What an earlier run has done.

    Yields
    ------
    callable or None
        Called with each further count that is done; None where no bar is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    # Only here: importing it is a tenth of a program's start.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.finished_speed or task.speed or 0:.1f} {unit}/s")

    columns = (
        TaskProgressColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        Rate(),
    )
    # Long log lines are not broken, so that a path in them can be copied.
    bar = Progress(*columns, console=Console(stderr=True, soft_wrap=True))
    task = bar.add_task("", total=total, completed=done)  # type: ignore[arg-type]
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
    ]
    former = sys.stderr
    with bar:
        try:
            for handler in handlers:
                handler.setStream(sys.stderr)  # which prints above the bar
            yield functools.partial(bar.advance, task)
        finally:
            for handler in handlers:
                handler.setStream(former)
