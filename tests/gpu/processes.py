"""Processes that use the GPU beside the one of the tests."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

WAIT = 120.0  # seconds for a process to start and do its part


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Any]]:
    """A process whose target takes a pipe to the test last; killed if it does not end by itself."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(*arguments, there), daemon=True)
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.join(20)
        child.kill()
        child.join()


def receive(pipe: Any) -> Any:
    """The next message, if it comes in time."""
    assert pipe.poll(WAIT), "the process has not answered"
    return pipe.recv()


def run_all(target: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run processes side by side; give what each one sends."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in arguments]
    children = [
        context.Process(target=target, args=(*given, there), daemon=True)
        for given, (_, there) in zip(arguments, pipes, strict=True)
    ]
    for child, (_, there) in zip(children, pipes, strict=True):
        child.start()
        there.close()
    try:
        return [receive(here) for here, _ in pipes]
    finally:
        for child in children:
            child.join(20)
            child.kill()
            child.join()
