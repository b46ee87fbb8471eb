"""Ranks that are joined by MPI. The one module that imports mpi4py, and only when ranks join.

A library of MPI waits by asking over and over, which takes a core from whoever still computes. Here
a rank waits for the others with pauses, and asks without any only while bytes move.
"""

import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tandem.distributed.frames import Frames
from tandem.distributed.group import Starter
from tandem.distributed.local import PeerLost
from tandem.errors import InputError

INSTALL = "install mpi4py and an MPI with `pip install .[mpi]`, or mpi4py for the cluster's own MPI"
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables by which starters tell how many processes they have started.

Slurm's comes last: an mpirun in a job starts its own helpers by srun.
"""

_SPIN_SECONDS = 0.0005  # before a wait begins to pause
_FLUSH_SECONDS = 0.5  # for a message to get through before all is killed
_PAUSE_SECONDS = 0.001  # the longest pause


def is_started_by_mpi() -> bool:
    """Whether mpirun or srun has started this process as a rank."""
    # A shell within a job of Slurm is a step of one task.
    return any(n in os.environ for n in (*SIZES[:-1], "PMIX_RANK")) or _started() > 1


def _started() -> int:
    """How many processes were started together, as far as the starter tells; 0 if it doesn't."""
    values = (os.environ.get(name, "") for name in SIZES)
    return next((int(value) for value in values if value.isdigit()), 0)


def join() -> "MpiGroup":
    """Become a rank among all that were started together.

    Raises
    ------
    InputError
        mpi4py is missing, or its MPI is not the one that started this process, or that can't serve
        several threads.
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
            "this MPI lets one thread only use it (MPI_THREAD_MULTIPLE is needed, for signs of "
            "life beside the training); use another build of it"
        )
    engine = MpiGroup(world.Dup())
    engine.local.barrier()
    if engine.local.rank == 0:
        _forget_names()
    return engine


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


class MpiGroup(Frames):
    """The ranks of a communicator. A `RankGroup`, and the `PointToPoint` of rules that need one.

    Use `join` to get one.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm
        Of this engine alone.

    Attributes
    ----------
    rank, size : int
        This rank's number and how many there are.
    """

    starter: Starter = "mpirun"

    def __init__(self, communicator: Any) -> None:
        self._comm, self._mpi = communicator, _import_mpi()
        self._made: list[MpiGroup] = []
        self._windows: list[Any] = []
        super().__init__(communicator.rank, communicator.size)

    @cached_property
    def local(self) -> "MpiGroup":
        """The ranks of this machine, in the same order. All ranks ask for it together."""
        return self._make(self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank))

    def group(self, number: int) -> "MpiGroup":
        """Those ranks that give the same number, in the same order. All ranks call it together."""
        return self._make(self._comm.Split(number, self.rank))

    def copy(self) -> "MpiGroup":
        """The same ranks, for another thread. All ranks call it together."""
        return self._make(self._comm.Dup())

    def _make(self, communicator: Any) -> "MpiGroup":
        self._made.append(MpiGroup(communicator))
        return self._made[-1]

    def _pass_on(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        """See `Frames`: begin, and pause until all ranks are there."""
        self._do(
            self._comm.Iallgatherv, (self._mpi.IN_PLACE, [vector, _extents(parts)]), _PAUSE_SECONDS
        )

    def close(self) -> None:
        """See `RankGroup`: MPI has a few thousand communicators, and keeps what is not freed."""
        if not self._comm:  # closed before what it was made of
            return
        for made in self._made:
            made.close()
        for window in self._windows:
            window.Free()
        self._comm.Free()

    # As an engine

    def all_reduce(self, vector: np.ndarray) -> None:
        """See `Engine`."""
        self._move(self._comm.Iallreduce, self._mpi.IN_PLACE, vector)

    def all_to_all(self, vector: np.ndarray, received: np.ndarray, parts: Sequence[slice]) -> None:
        """See `Engine`."""
        self._move(self._comm.Ialltoallv, [vector, _extents(parts)], [received, _rows(received)])

    def all_gather(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        """See `Engine`."""
        self._move(self._comm.Iallgatherv, self._mpi.IN_PLACE, [vector, _extents(parts)])

    def on_gpus(self, wait: Callable[[], None]) -> "MpiGpuGroup":
        """The same ranks for vectors on GPUs, where `takes_gpu_memory`.

        Parameters
        ----------
        wait : callable
            Waits for all that was begun to be computed on the vectors.
        """
        return MpiGpuGroup(self, self._comm, wait)

    def takes_gpu_memory(self) -> bool:
        """Whether this MPI says that it takes vectors on GPUs (is CUDA-aware)."""
        try:
            return bool(ctypes.CDLL(self._mpi.__file__).MPIX_Query_cuda_support())
        except (AttributeError, OSError):  # which is no part of the standard
            return False

    def shared(self, nbytes: int) -> list[np.ndarray]:
        """Memory that the ranks of one machine share, zero at first.

        Parameters
        ----------
        nbytes : int
            Of each rank's part, the same at all.

        Returns
        -------
        list of uint8 (nbytes,)
            Every rank's part, by rank.
        """
        window = self._mpi.Win.Allocate_shared(nbytes, 1, comm=self._comm)
        self._windows.append(window)
        self.barrier()
        if self.rank == 0:
            _forget_names()
        parts = [np.asarray(window.Shared_query(rank)[0]) for rank in range(self.size)]
        parts[self.rank].fill(0)
        self.barrier()
        return parts

    def abort(self, status: int) -> NoReturn:
        """End all ranks, everywhere, this one too.

        What was just written to stderr goes through mpirun, which drops what it has not passed on.
        """
        sys.stderr.flush()
        time.sleep(_FLUSH_SECONDS)
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    # From one rank to another

    def send(self, vector: np.ndarray, rank: int) -> Any:
        """Begin to send a vector to a rank; a request that tells when it may be changed again."""
        return self._comm.Isend(vector, rank)

    def receive(self, vector: np.ndarray) -> int | None:
        """Receive a vector that a rank has begun to send, if there is one; from whom."""
        status = self._mpi.Status()
        if not self._comm.Iprobe(status=status):
            return None
        self._do(self._comm.Irecv, (vector, status.source), 0.0)  # its bytes are moving
        return int(status.source)

    # StoreHeartbeat of life

    def beat(self, rank: int) -> None:
        """Send another rank a sign of life. Returns at once."""
        self._comm.Isend([None, 0, self._mpi.BYTE], rank).Free()

    def heard(self) -> set[int]:
        """Who has sent a sign of life since the last call."""
        status, ranks = self._mpi.Status(), set()
        while self._comm.Iprobe(status=status):
            ranks.add(status.source)
            self._comm.Recv([None, 0, self._mpi.BYTE], status.source)
        return ranks

    def _move(self, begin: Callable[..., Any], *arguments: Any) -> None:
        """Move bytes, once all ranks are there.

        MPI's blocking operations would not let others have the core: with more processes than cores
        they were seen to take twenty times as long.
        """
        self.barrier()
        self._do(begin, arguments, 0.0)

    def _do(self, begin: Callable[..., Any], arguments: Sequence[Any], pause: float) -> None:
        try:
            request, begun = begin(*arguments), time.perf_counter()
            while not request.Test():
                waited = time.perf_counter() - begun
                if pause and waited > _SPIN_SECONDS:
                    time.sleep(min(waited / 8, pause))
                else:
                    os.sched_yield()
        except self._mpi.Exception as error:
            raise PeerLost(f"trainer {self.rank} lost the others: {error}") from error


class MpiGpuGroup:
    """Ranks of an MPI that takes vectors where they are, on GPUs. An `Engine` of tensors.

    Use `MpiGroup.on_gpus` to get one. The ranks first wait for each other, and then block: Open
    MPI takes GPUs' memory in blocking collectives only.
    """

    def __init__(self, engine: MpiGroup, communicator: Any, wait: Callable[[], None]) -> None:
        self.rank, self.size, self.all_gather_object = (
            engine.rank,
            engine.size,
            engine.all_gather_object,
        )
        self._comm, self._mpi, self._wait = communicator, _import_mpi(), wait

    def all_reduce(self, vector: Any) -> None:
        """See `Engine`."""
        self._move(self._comm.Allreduce, self._mpi.IN_PLACE, vector)

    def all_to_all(self, vector: Any, received: Any, parts: Sequence[slice]) -> None:
        """See `Engine`."""
        self._move(self._comm.Alltoallv, [vector, _extents(parts)], [received, _rows(received)])

    def all_gather(self, vector: Any, parts: Sequence[slice]) -> None:
        """See `Engine`."""
        self._move(self._comm.Allgatherv, self._mpi.IN_PLACE, [vector, _extents(parts)])

    def _move(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._wait()
        self.all_gather_object(None)
        try:
            call(*arguments)
        except self._mpi.Exception as error:
            raise PeerLost(f"trainer {self.rank} lost the others: {error}") from error


def _extents(parts: Sequence[slice]) -> tuple[list[int], list[int]]:
    """Counts and first elements of parts of a vector."""
    return [part.stop - part.start for part in parts], [part.start for part in parts]


def _rows(matrix: Any) -> tuple[list[int], list[int]]:
    """Counts and first elements of a matrix's rows."""
    rows, columns = matrix.shape
    return [columns] * rows, [columns * row for row in range(rows)]
