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

    `total` is None if it is unknown; `done` is what an earlier run has done. Yields a function to
    call with each further amount, or None where no bar is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    # Only here: importing it is a tenth of a program's start.
    from rich import progress
    from rich.console import Console

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> str:
            return f"{task.finished_speed or task.speed or 0:.1f} {unit}/s"

    columns = [
        progress.TaskProgressColumn(),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        Rate(),
    ]
    # Long log lines are not broken, so that a path in them can be copied.
    bar = progress.Progress(*columns, console=Console(stderr=True, soft_wrap=True))
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
