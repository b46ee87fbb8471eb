"""Processes that work together on what a benchmark asks of them."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self


class Team:
    """Processes that are started once and then do one task after another, all at the same time.

    Parameters
    ----------
    member : callable
        What each process runs, with its arguments and a pipe. It calls `serve`.
    arguments : sequence of tuple
        Of each process.
    """

    def __init__(self, member: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for own in arguments:
            here, there = context.Pipe()
            process = context.Process(target=member, args=(*own, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def do(self, task: str) -> list[Any]:
        """Have every process do a task at once; give what each has answered, by number.

        Raises
        ------
        RuntimeError
            A process has ended; it has said why.
        """
        try:
            for pipe in self._pipes:
                pipe.send(task)
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a process has ended that was to do {task!r}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()


def serve(pipe: Connection, tasks: Mapping[str, Callable[[], Any]]) -> None:
    """Do tasks by name and answer with what they return, until nobody asks any more."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(tasks[task]())
