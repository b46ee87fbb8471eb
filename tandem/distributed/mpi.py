"""Ranks that are joined by MPI. The one module that imports mpi4py, and only when ranks join.

A library of MPI waits by asking over and over, which takes a core from whoever still computes. Here
a rank waits for the others with pauses, and asks without any only while bytes move.
"""

import contextlib
import ctypes
import mmap
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tandem.distributed.group import PeerLost, RankGroup, Starter
from tandem.errors import InputError

INSTALL = (
    "install mpi4py and an MPI with `pip install mpi4py mpich`, or mpi4py for the cluster's own MPI"
)
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables that hold how many processes a starter has started.

Slurm's comes last: an mpirun in a job starts its own helpers by srun.
"""

_SPIN_SECONDS = 0.0005  # before a wait begins to pause
_FLUSH_SECONDS = 0.5  # for a message to get through before all is killed
_PAUSE_SECONDS = 0.001  # the longest pause
_BYTES_TAG = 1  # of messages between two ranks; all others have 0


def is_started_by_mpi() -> bool:
    """Return whether mpirun or srun has started this process as a rank."""
    # A shell within a job of Slurm is a step of one task.
    return any(n in os.environ for n in (*SIZES[:-1], "PMIX_RANK")) or _started() > 1


def _started() -> int:
    """Return how many processes were started together; 0 where the starter does not report it."""
    values = (os.environ.get(name, "") for name in SIZES)
    return next((int(value) for value in values if value.isdigit()), 0)


def find_mpirun() -> str | None:
    """Return the path of this Python's mpirun, or else of the system's; None without either."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


def join() -> "MpiGroup":
    """Become a rank among all that were started together.

    Raises InputError if mpi4py is missing, or its MPI is not the one that started this process, or
    that can't serve several threads.
    """
    mpi = _import_mpi()
    world = mpi.COMM_WORLD
    started = _started()
    if started not in (0, world.size):
        raise InputError(
            f"{started} processes were started together, but the MPI that mpi4py uses sees "
            f"{world.size}: what started them belongs to another MPI. Use the mpirun beside this "
            f"Python ({Path(sys.executable).parent}), with srun its --mpi option, or {INSTALL}"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise InputError(
            "this MPI lets one thread only use it (MPI_THREAD_MULTIPLE is needed, for "
            "heartbeats beside the training); use another build of it"
        )
    group = MpiGroup(world.Dup())
    group.local.barrier()
    if group.local.rank == 0:
        _forget_names()
    return group


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise InputError(f"MPI can't be used: {text}; {INSTALL}") from error
    return MPI


def _forget_names() -> None:
    """Remove the name of the memory by which MPICH's ranks of a machine talk.

    All have it open by now. A job that is killed would leave it behind for ever.
    """
    maps = Path("/proc/self/maps")
    if maps.exists():
        for path in set(re.findall(r"/dev/shm/mpich_shm\S+", maps.read_text())):
            with contextlib.suppress(OSError):
                Path(path).unlink()


class MpiGroup(RankGroup):
    """The ranks of a communicator, of this group alone. Use `join` to get one."""

    starter: Starter = "mpirun"

    def __init__(self, communicator: Any, lost: list[str] | None = None) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._comm, self._mpi = communicator, _import_mpi()
        self._lost = [] if lost is None else lost  # see `lose`; one list of all groups of a rank
        self._windows: list[Any] = []

    @cached_property
    def local(self) -> "MpiGroup":
        communicator = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        return self._keep(MpiGroup(communicator, self._lost))

    def split(self, color: int) -> "MpiGroup":
        return self._keep(MpiGroup(self._comm.Split(color, self.rank), self._lost))

    def close(self) -> None:
        if not self._comm:  # closed before the group that it was split from
            return
        super().close()
        for window in self._windows:  # MPI has a few thousand of them, and of communicators
            window.Free()
        self._comm.Free()

    def all_reduce(self, vector: Any) -> None:
        self._move("allreduce", vector, self._mpi.IN_PLACE, vector)

    def all_to_all(self, vector: Any, received: Any, parts: Sequence[slice]) -> None:
        self._move("alltoallv", vector, [vector, _extents(parts)], [received, _rows(received)])

    def all_to_all_parts(
        self, sent: Any, sent_parts: Sequence[slice], received: Any, parts: Sequence[slice]
    ) -> None:
        arguments = [sent, _extents(sent_parts)], [received, _extents(parts)]
        self._move("alltoallv", sent, *arguments)

    def all_gather(self, vector: Any, parts: Sequence[slice]) -> None:
        self._move("allgatherv", vector, self._mpi.IN_PLACE, [vector, _extents(parts)])

    def takes_gpu_memory(self) -> bool:
        try:
            return bool(ctypes.CDLL(self._mpi.__file__).MPIX_Query_cuda_support())
        except (AttributeError, OSError):  # the function is no part of the standard
            return False

    def shared_memory(self, nbytes: int) -> list[np.ndarray]:
        # Parts lie side by side, from any address on: a page more keeps their bytes in pages apart.
        size = (-(-nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        window = self._mpi.Win.Allocate_shared(size, 1, comm=self._comm)
        self._windows.append(window)
        self.barrier()
        if self.rank == 0:
            _forget_names()
        areas = (window.Shared_query(rank)[0] for rank in range(self.size))
        parts = [np.asarray(area)[:nbytes] for area in areas]
        parts[self.rank].fill(0)
        self.barrier()
        return parts

    def abort(self, status: int) -> NoReturn:
        """End all ranks, everywhere.

        What was just written to stderr goes through mpirun, which drops what it has not passed on.
        """
        sys.stderr.flush()
        time.sleep(_FLUSH_SECONDS)
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    # From one rank to another, at any time

    def send(self, vector: np.ndarray, rank: int) -> Any:
        """Begin to send a vector to a rank; return an mpi4py.MPI.Request.

        Its ``Test()`` is true when the vector may be changed again.
        """
        return self._comm.Isend(vector, rank)

    def receive(self, vector: np.ndarray) -> int | None:
        """Receive a vector that a rank has begun to send, if any; return that rank."""
        status = self._mpi.Status()
        if not self._comm.Iprobe(status=status):
            return None
        self._do(self._comm.Irecv, (vector, status.source), 0.0)  # its bytes are moving
        return int(status.source)

    def send_bytes(self, sent: Sequence[tuple[int, np.ndarray]]) -> None:
        requests = [self._comm.Isend(vector, rank, _BYTES_TAG) for rank, vector in sent]
        try:
            while not self._mpi.Request.Testall(requests):
                os.sched_yield()
        except self._mpi.Exception as error:
            raise self._peer_lost(error) from error

    def receive_bytes(self, rank: int) -> np.ndarray:
        status, waiting = self._mpi.Status(), _Wait(_PAUSE_SECONDS)
        try:
            while (message := self._comm.Improbe(rank, _BYTES_TAG, status)) is None:
                waiting.pause()
        except self._mpi.Exception as error:
            raise self._peer_lost(error) from error
        vector = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._do(message.Irecv, (vector,), 0.0)  # its bytes are moving
        return vector

    def lose(self, reason: str) -> bool:
        self._lost.append(reason)  # MPI would wait for ever
        return True

    def beat(self, rank: int) -> None:
        self._comm.Isend([None, 0, self._mpi.BYTE], rank).Free()

    def beats(self) -> set[int]:
        status, ranks = self._mpi.Status(), set()
        while self._comm.Iprobe(status=status):
            ranks.add(status.source)
            self._comm.Recv([None, 0, self._mpi.BYTE], status.source)
        return ranks

    def _gather_bytes(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        """Begin, and pause until all ranks have come."""
        arguments = self._mpi.IN_PLACE, [vector, _extents(parts)]
        self._do(self._comm.Iallgatherv, arguments, _PAUSE_SECONDS)

    def _move(self, operation: str, vector: Any, *arguments: Any) -> None:
        """Move bytes, once all ranks have come.

        MPI's blocking operations would not let others have the core: with more processes than cores
        they were seen to take twenty times as long. For tensors on GPUs they are used all the same:
        Open MPI takes GPU memory in blocking collectives only.
        """
        if isinstance(vector, np.ndarray):
            self.barrier()
            self._do(getattr(self._comm, f"I{operation}"), arguments, 0.0)
            return
        _wait_for_stream(vector)
        self.barrier()
        try:
            getattr(self._comm, operation.capitalize())(*arguments)
        except self._mpi.Exception as error:
            raise self._peer_lost(error) from error

    def _do(self, begin: Callable[..., Any], arguments: Sequence[Any], pause: float) -> None:
        try:
            request, waiting = begin(*arguments), _Wait(pause)
            while not request.Test():
                if self._lost:
                    raise PeerLost(self._lost[0])
                waiting.pause()
        except self._mpi.Exception as error:
            raise self._peer_lost(error) from error

    def _peer_lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"trainer {self.rank} lost the others: {error}")


class _Wait:
    """Lets others have the core between two tests; from a moment on by pauses, up to `longest`."""

    def __init__(self, longest: float) -> None:
        self._longest, self._begun = longest, time.perf_counter()

    def pause(self) -> None:
        waited = time.perf_counter() - self._begun
        if self._longest and waited > _SPIN_SECONDS:
            time.sleep(min(waited / 8, self._longest))
        else:
            os.sched_yield()


def _wait_for_stream(tensor: Any) -> None:
    """Wait for all work so far on the stream on which this thread uses a tensor."""
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()


def _extents(parts: Sequence[slice]) -> tuple[list[int], list[int]]:
    """Counts and first elements of parts of a vector."""
    return [part.stop - part.start for part in parts], [part.start for part in parts]


def _rows(matrix: Any) -> tuple[list[int], list[int]]:
    """Counts and first elements of a matrix's rows."""
    rows, columns = matrix.shape
    return [columns] * rows, [columns * row for row in range(rows)]
