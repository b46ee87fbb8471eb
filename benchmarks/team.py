"""Processes that do the tasks of a benchmark together, or in turn, and programs that it starts."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Self
from unittest.mock import patch

from benchmarks.measure import Measured, Step, measure
from tandem.errors import InputError
from tandem.processor import set_openmp

_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


@contextmanager
def program(command: Sequence[str], errors: IO[Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, as a process group of its own, that ends with the context.

    It is also killed when this process is, and its children see that; those that are stopped then
    stay so.
    """
    prctl = ctypes.CDLL(None).prctl
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_until(
    is_done: Callable[[], bool], command: Sequence[str], seconds: float, pause: float = 0.1
) -> None:
    """Run a program until something is done; then end all its processes.

    Raises InputError, with what it wrote to stderr, if it ends before or takes more than `seconds`.
    """
    begun = time.monotonic()
    with tempfile.TemporaryFile() as errors, program(command, errors) as process:
        while True:
            ended, took = process.poll() is not None, time.monotonic() - begun
            if is_done():
                return
            if ended or took > seconds:
                errors.seek(0)
                fate = f"ended with {process.returncode}" if ended else f"ran {seconds:g} s"
                said = errors.read().decode()
                raise InputError(f"{' '.join(command)} {fate} before it was done:\n{said}")
            time.sleep(pause)


class Team:
    """Processes that start once and then do one task after another, all at the same time.

    Each calls `member` with its own arguments and a pipe, which calls `serve`.
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

    @classmethod
    def of_group(cls, member: Callable[..., None], count: int, *arguments: Any) -> Self:
        """Make processes that are a group of trainers.

        Each calls `member` with its own `LocalGroup`, then the same arguments, then a pipe.
        """
        from tandem.distributed import local_groups

        groups = local_groups(count)
        team = cls(member, [(group, *arguments) for group in groups])
        for group in groups:  # the processes alone keep their ends open
            group.close()
        return team

    def do(self, task: str) -> list[Any]:
        """Have every process do a task; return the replies in order of processes."""
        try:
            for pipe in self._pipes:
                pipe.send(task)
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a process ended during {task!r}") from error

    def slowest(self, task: str) -> float:
        """Have every process do a task whose reply is its seconds; return the most."""
        return float(max(self.do(task)))

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
    """Do tasks by name and reply with their results, until the pipe is closed."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(tasks[task]())


@contextmanager
def gloo_ranks(store: Path, rank: int, size: int) -> Iterator[None]:
    """Context manager: join the ranks of torch.distributed, which find each other by a file."""
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    yield
    torch.distributed.destroy_process_group()


def measure_apart(
    contenders: Mapping[str, Callable[[], Step]],
    threads: int,
    rounds: int,
    warmups: int = 1,
    settle: float = 0.0,
) -> list[Measured]:
    """Time contenders in turn, each made in a process of its own.

    Those whose name begins with "ours" have OpenMP as a trainer sets it, others as it is.
    """
    with ExitStack() as stack:
        calls = {}
        for name, make in contenders.items():
            with patch.dict(os.environ):
                if name.startswith("ours"):
                    set_openmp(threads)
                team = stack.enter_context(Team(_contend, [(make, threads)]))
            calls[name] = partial(team.do, "call")
        return measure(calls, rounds, warmups=warmups, settle=settle)


def _contend(make: Callable[[], Step], threads: int, pipe: Connection) -> None:
    from tandem.backend import keep_freed_memory, set_threads

    keep_freed_memory()
    set_threads(threads)
    call = make()

    def silent() -> None:  # results are not sent
        call()

    serve(pipe, {"call": silent})
