"""The workers of a pool: one message out and one answer back for each task."""

import atexit
import contextlib
import logging
import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, ClassVar, TypeVar

import numpy as np

from tandem.distributed import LocalGroup, PeerLost
from tandem.memory import HostBuffer
from tandem.parallel.buffers import SharedBuffers
from tandem.parallel.messages import Answer, ArrayLocation, Close, Fault, Message, Task, repetition
from tandem.parallel.residents import Access
from tandem.parallel.waiting import Waiter
from tandem.parallel.worker import RankSettings, serve
from tandem.processes.fork_server import pays
from tandem.processes.supervisor import find_end
from tandem.processes.watchdog import Watchdog
from tandem.processes.worker_pool import WorkerPool

log = logging.getLogger(__name__)

Own = TypeVar("Own")


class WorkerLost(RuntimeError):
    """A worker process has ended, or gave no sign of life and was ended. The pool is closed."""


class Team(ABC):
    """The workers of a pool, as the master sends them tasks and has their answers."""

    sees_memory: ClassVar[bool]  # whether workers read and write the master's `buffers`

    def __init__(self, buffers: SharedBuffers) -> None:
        self.buffers, self.is_busy, self.is_open = buffers, False, True
        self.waited = 0.0  # seconds: between the master's own work on the last task and all answers
        self.answers: Mapping[int, Answer | Fault] = {}  # to the last task, also if it has failed
        self._pid = os.getpid()

    def run(
        self, task: Task | None, own: Callable[[], Own], updated: Sequence[str] = ()
    ) -> tuple[Own, Mapping[int, Answer]]:
        """Have all workers do a task while the master does its own part.

        Without workers there is no task to send. `updated` are the names of variables that the
        task writes, for messages. Returns what the master's part returns, and the answers of the
        workers by rank.

        Raises
        ------
        Exception
            That of the first rank whose part failed, when all have answered.
        WorkerLost
            A worker has ended. The pool is closed, as it is by an interrupt.
        """
        self.is_busy = True
        try:
            if task is not None:
                self._send(task)
            error: Exception | None = None
            try:
                result = own()
            except PeerLost:
                raise
            except Exception as found:
                error = found
            began = time.perf_counter()
            answers = self.answers = self._answers()
            self.waited = time.perf_counter() - began
        except (ConnectionError, PeerLost) as broken:
            # Not TimeoutError, which a handler of the user may raise.
            raise self._lost(broken) from broken
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            self.is_busy = False
        faults = [rank for rank in sorted(answers) if isinstance(answers[rank], Fault)]
        if error is None and faults:
            error = _raised(faults[0], answers[faults[0]])
        if error is not None:
            if updated:
                error.add_note(
                    f"undefined until the next broadcast: {', '.join(updated)}, which the call "
                    "was to update"
                )
            raise error
        return result, answers  # type: ignore[return-value]

    @abstractmethod
    def result(self, rank: int, place: Any) -> np.ndarray:
        """Return a worker's result by its place in the answer; the caller may change it."""

    @abstractmethod
    def close(self, kill: bool = False) -> None:
        """End all workers; at once, where they may be in the middle of a task."""

    @abstractmethod
    def _send(self, task: Task) -> None: ...

    @abstractmethod
    def _answers(self) -> dict[int, Answer | Fault]:
        """Receive an answer from every worker; raise OSError or PeerLost when one has ended."""

    @abstractmethod
    def _lost(self, error: Exception) -> "WorkerLost":
        """Close the pool, and find out which worker has ended, and how."""


class PoolWorkers(Team):
    """Worker processes, and the messages between them and the master.

    Whatever ends a worker breaks its pipe, so that no wait is longer than the life of the workers;
    a watchdog ends those that give no sign of life.
    """

    sees_memory = True

    def __init__(
        self,
        settings: Sequence[RankSettings],
        master: int,
        access: Sequence[Access],
        buffers: SharedBuffers,
        timeout: float,
    ) -> None:
        super().__init__(buffers)
        self._results = {s.rank: HostBuffer.create(0, "results") for s in settings}
        self._pipes: dict[int, tuple[int, Connection]] = {}
        others = [s for s in settings if s.rank != master]
        self._closing = contextlib.ExitStack()
        self._pool = self._closing.enter_context(
            WorkerPool([f"worker {s.rank}" for s in others], timeout)
        )
        # Before any worker is started: multiprocessing would wait for one that nobody has ended.
        atexit.register(self.close)
        try:
            are_copies = settings[master].gpu is None and pays(len(others))
            senders = []
            for each in others:
                memory = access[each.rank], self._results[each.rank]
                name = f"worker {each.rank}"
                sender = self._pool.start(name, serve, each, *memory, is_copy=are_copies)
                senders.append(sender)
                if isinstance(memory[0], LocalGroup):  # whose ends are the worker's alone
                    memory[0].close()
            for sender in senders:  # its settings are a worker's first message
                sender.join()
        except BaseException:
            self.close(kill=True)
            raise
        self._watchdog = Watchdog(self._pool)
        self._watchdog.start()
        self._pipes = {
            handle.connection.fileno(): (each.rank, handle.connection)
            for each, handle in zip(others, self._pool.handles, strict=True)
        }
        self._repeated: Task | None = None  # what an empty message means
        self._waiter = Waiter(self._pipes, settings[master].spin)

    def result(self, rank: int, place: ArrayLocation) -> np.ndarray:
        # The next answer overwrites it.
        return self._results[rank].array(place.shape, np.dtype(place.dtype), place.offset).copy()

    def _send(self, task: Task) -> None:
        new, dropped = self.buffers.changes()
        repeats = type(task) is type(self._repeated) and task == self._repeated
        if new or dropped or not repeats:
            data = pickle.dumps(Message(task, tuple(new), dropped))
            self._repeated = task
        else:
            data = b""
        for _, connection in self._pipes.values():
            connection.send_bytes(data)
            for buffer in new.values():
                reduction.send_handle(connection, buffer.fileno(), None)

    def _answers(self) -> dict[int, Answer | Fault]:
        answers: dict[int, Answer | Fault] = {}
        while len(answers) < len(self._pipes):
            for descriptor in self._waiter.wait():
                rank, connection = self._pipes[descriptor]
                try:
                    data = connection.recv_bytes()
                    former = self.answers.get(rank)
                    answers[rank] = repetition(data, former) or pickle.loads(data)
                except EOFError as error:
                    raise BrokenPipeError(str(error)) from error
        return answers

    def _lost(self, error: Exception) -> WorkerLost:
        cause = find_end(self._pool, self._watchdog.killed)
        self.close(kill=True)
        return WorkerLost(f"{cause.who} {cause.message}")

    def close(self, kill: bool = False) -> None:
        if not self.is_open or os.getpid() != self._pid:
            return
        self.is_open = False
        atexit.unregister(self.close)
        if not kill:
            with contextlib.suppress(OSError):
                self._send(Close())
        for handle in self._pool.handles:
            handle.finished = not kill
        with contextlib.suppress(AttributeError):
            self._watchdog.stop()
        try:
            self._closing.close()
        finally:
            for handle in self._pool.handles:
                handle.connection.close()


def _raised(rank: int, fault: Answer | Fault) -> Exception:
    """The exception of a worker, to be raised in the master."""
    assert isinstance(fault, Fault)
    error = fault.error or RuntimeError(fault.description)
    error.add_note(f"in worker {rank}:\n{fault.traceback.rstrip()}")
    return error
