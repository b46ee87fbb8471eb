"""Processes that use the GPU beside the one of the tests."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """Run processes side by side; return what each sends."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(process(target, *given))[1] for given in arguments]
        return [receive(pipe) for pipe in pipes]
