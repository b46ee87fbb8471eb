"""A pool whose ranks mpirun or torchrun has started, on one machine or several.

Every rank executes the same script, up to where the pool is made. There the master goes on, and the
others do what it asks for, until it closes the pool; then they end. Each rank is sent its rows of a
call, and answers with its results. Ranks of one machine share the memory of resident variables,
where the system permits it.
"""

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from tandem.config.hardware import available_cores
from tandem.distributed import PeerLost, gloo
from tandem.distributed import ranks as started
from tandem.distributed.group import RankGroup
from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.parallel.buffers import SharedBuffers
from tandem.parallel.devices import check_request, choose_devices
from tandem.parallel.messages import Answer, ArrayLocation, Close, Fault, Publish, Task
from tandem.parallel.rank_messages import Messenger, part_of
from tandem.parallel.residents import RankMemory
from tandem.parallel.team import Team
from tandem.parallel.worker import Link, RankSettings, work
from tandem.processes.child import show_name
from tandem.processes.rank_heartbeat import RankHeartbeat

log = logging.getLogger(__name__)

_FEW_BYTES = 4096  # of a result that travels without NumPy's pickling
_EXIT_SECONDS = 0.5  # for what has killed a rank to be reported by its starter first


def is_rank() -> bool:
    """Return whether mpirun or torchrun has started this process, and no child has inherited it."""
    return multiprocessing.parent_process() is None and started.is_rank()


join = functools.cache(started.join)  # a process joins once


def choose_rank_devices(
    group: RankGroup, ranks: int | None, use_gpu: bool | None, devices: Sequence[str] | None
) -> list[str]:
    """Choose the device of each rank, as `choose_devices` does it on one machine. Collective.

    Raises InputError, TypeError or ValueError at all ranks.
    """
    check_request(ranks, use_gpu, devices)
    given = ranks if devices is None else len(devices)
    if given not in (None, group.size):
        raise ValueError(
            f"{given} ranks are asked for, and {group.starter} has started {group.size}: start as "
            "many, or leave the number out"
        )
    here, reason, own = group.local, "", ""
    try:
        if devices is None:
            own = choose_devices(here.size, use_gpu, None)[here.rank]
        else:
            own = choose_devices(None, None, [devices[group.rank]])[0]
    except InputError as error:
        reason = str(error)
    every = group.all_gather_object((own, reason))
    for rank, (_, refused) in enumerate(every):
        if refused:
            raise InputError(f"rank {rank}: {refused}")
    chosen = [device for device, _ in every]
    if len({device == "cpu" for device in chosen}) > 1:
        raise InputError(f"devices are {', '.join(chosen)}; either all are GPUs or all cpu")
    return chosen


def share_cores(group: RankGroup) -> int:
    """Divide the cores of machines among their ranks: what every rank can have. Collective."""
    leader = group.local.all_gather_object(group.rank)[0]
    every = group.all_gather_object((leader, available_cores()))
    return max(1, min(len(cores) // every.count((machine, cores)) for machine, cores in every))


def share_memory(group: RankGroup) -> RankMemory | RankGroup:
    """Let the ranks of one machine open each other's memory; return what each is given. Collective.

    The group alone, where they are on several, in containers that do not see each other's
    processes, or where the system does not permit it.
    """
    if len(set(group.all_gather_object(gloo.machine()))) > 1 or not Path("/proc/self/fd").exists():
        return group
    own = HostBuffer.create(0, f"residents {group.rank}")
    paths = group.all_gather_object(own.path)
    try:
        buffers = [
            own if rank == group.rank else HostBuffer.open(path, f"residents {rank}")
            for rank, path in enumerate(paths)
        ]
    except InputError as error:
        log.warning("ranks of this machine share no memory: %s", error)
        buffers = []
    # The paths are valid until all have opened them.
    return RankMemory(group, buffers) if all(group.all_gather_object(bool(buffers))) else group


class RankTeam(Team):
    """The other ranks, as the master uses them. Made once, by all ranks together.

    A rank that ends or is silent ends all of them: neither MPI nor gloo goes on without it.
    """

    sees_memory = False
    is_worker: ClassVar[bool] = False  # whether this process is one of them, not the master
    _is_made = False

    @classmethod
    def check_none(cls, group: RankGroup) -> None:
        """Raise RuntimeError if this process has had a pool of ranks."""
        if cls._is_made:
            raise RuntimeError(
                f"the ranks that {group.starter} has started are one pool, which has been made; a "
                "closed one is not started again, since the other ranks end with it"
            )

    def __init__(self, group: RankGroup, buffers: SharedBuffers, timeout: float) -> None:
        super().__init__(buffers)
        RankTeam._is_made = True
        self._group = group
        self._task: Task | None = None
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self._messenger = Messenger(group)
        self._heartbeat = _heartbeat(group, group.rank, timeout)
        atexit.register(self._leave)

    def result(self, rank: int, place: Any) -> np.ndarray:
        if isinstance(place, tuple):
            dtype, shape, data = place
            return np.frombuffer(bytearray(data), dtype).reshape(shape)
        array: np.ndarray = place if place.flags.writeable else place.copy()
        return array

    def _send(self, task: Task) -> None:
        self._task, size = task, self._group.size
        self._messenger.send({r: part_of(task, r, size, self.buffers) for r in self._others})

    def _answers(self) -> dict[int, Answer | Fault]:
        answers = {}
        for rank in self._others:
            try:
                answer = answers[rank] = self._messenger.receive(rank)
            except PeerLost as error:
                raise PeerLost(f"worker {rank} has ended: {error}") from error
            if isinstance(self._task, Publish) and isinstance(answer, Answer):
                for places, value in zip(self._task.places, answer.results or (), strict=False):
                    self.buffers.array(places[rank])[...] = value
        return answers

    def _lost(self, error: Exception) -> NoReturn:
        time.sleep(_EXIT_SECONDS)
        _abort(self._group, str(error))

    def close(self, kill: bool = False) -> None:
        if not self.is_open or os.getpid() != self._pid:
            return
        self.is_open = False
        if kill:
            log.error("the pool is in the middle of a task", exc_info=True)
            is_interrupt = isinstance(sys.exc_info()[1], KeyboardInterrupt)
            self._group.abort(130 if is_interrupt else 1)
        with contextlib.suppress(PeerLost):
            self._messenger.send({rank: (Close(), []) for rank in self._others})

    def _leave(self) -> None:
        """Let the others end, who wait for it: MPI's own end takes a core of who waits."""
        if os.getpid() != self._pid:
            return
        self.close()
        with contextlib.suppress(PeerLost):
            self._group.barrier()
        self._heartbeat.stop()


def serve_master(
    settings: RankSettings,
    group: RankGroup,
    access: RankMemory | RankGroup,
    master: int,
    timeout: float,
) -> NoReturn:
    """Do what the master asks for until it closes the pool and ends; then end this process."""
    RankTeam.is_worker = True
    show_name(f"worker {group.rank}")
    link = RankLink(Messenger(group), master)
    heartbeat = _heartbeat(group, master, timeout)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the master decides
    try:
        work(settings, access, link)
    except PeerLost as error:
        _abort(group, str(error))
    except BaseException:
        log.exception("worker %d failed", group.rank)
        _abort(group, f"worker {group.rank} has failed")
    with contextlib.suppress(PeerLost):
        group.barrier()
    heartbeat.stop()
    raise SystemExit


class RankLink(Link):
    """The messages between a rank and the master."""

    def __init__(self, messenger: Messenger, master: int) -> None:
        self._messenger, self._master = messenger, master
        self.buffers = ReceivedArrays()

    def receive(self) -> Task:
        task: Task
        task, self.buffers.arrays = self._messenger.receive(self._master)
        return task

    def send(self, answer: Answer | Fault) -> None:
        self._messenger.send({self._master: answer})

    def stored(self, results: Sequence[Any]) -> tuple[Any, ...]:
        # NumPy's pickles of small arrays would take as long as the rest of the answer.
        return tuple(
            (value.dtype.str, value.shape, value.tobytes())
            if value is not None and value.nbytes < _FEW_BYTES
            else value
            for value in results
        )

    def published(self, rank: Any, task: Publish) -> Answer:
        if task.rank not in (None, rank.number):
            return Answer()
        return Answer(tuple(rank.variables[n].get_value(borrow=True) for n in task.variables))

    def finish(self) -> None:
        pass


class ReceivedArrays:
    """The arrays of a message, by their numbers."""

    def __init__(self) -> None:
        self.arrays: Sequence[np.ndarray] = ()

    def array(self, place: ArrayLocation) -> np.ndarray:
        """Return an array by its place."""
        return self.arrays[place.buffer]

    def buffer(self, number: int) -> None:
        """Return None: they lie in no buffer."""


def _heartbeat(group: RankGroup, master: int, timeout: float) -> RankHeartbeat:
    pids = dict(group.local.all_gather_object((group.rank, os.getpid())))
    own = group.split(0)

    def end(reason: str, _: bool) -> None:
        _abort(own, reason)

    heartbeat = RankHeartbeat(own, pids, timeout, end, master, "worker")
    heartbeat.start()
    return heartbeat


def _abort(group: RankGroup, reason: str) -> NoReturn:
    log.error("error: the pool has ended: %s", reason)
    group.abort(1)
