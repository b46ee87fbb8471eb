"""Ranks that are started by torchrun and joined by gloo, without MPI; NCCL for vectors on GPUs.

The one module of this room that imports PyTorch, and only when ranks join: that takes seconds. Of
`torch.distributed` the groups of processes are used, and nothing that is global to a process.

gloo waits without taking a core, but can't be asked whether something has come. So signs of life go
by the store at which torchrun's ranks find each other.
"""

import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tandem.distributed.frames import Frames
from tandem.distributed.group import Starter
from tandem.distributed.local import PeerLost
from tandem.errors import InputError
from tandem.memory import HostBuffer

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which a starter of PyTorch's tells a rank where the others are."""

_AGENT = "TORCHELASTIC_RUN_ID"  # that torchrun itself is the starter
_JOIN_TIMEOUT = timedelta(minutes=5)
_PAUSE_SECONDS = 0.02  # between looks at the store
_TIMEOUT = timedelta(days=365)  # no step is too slow; who is dead is told by signs of life


def is_started_by_torchrun() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process as a rank."""
    return _AGENT in os.environ or all(name in os.environ for name in VARIABLES)


def join() -> "GlooGroup":
    """Become a rank among all that were started together.

    Raises
    ------
    InputError
        PyTorch is missing or has no gloo, or the others are not to be found.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise InputError(f"ranks of torchrun need PyTorch, which can't be used: {error}") from error
    if not (dist.is_available() and dist.is_gloo_available()):
        raise InputError(
            "this PyTorch is built without torch.distributed and gloo, by which ranks of torchrun "
            "are joined: install another build, or use mpirun"
        )
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=_JOIN_TIMEOUT))
        return GlooGroup(store, rank, size, f"tandem/{agree(store, rank, size)}")
    except (RuntimeError, ValueError) as error:
        told = str(error).splitlines()[0]
        raise InputError(
            f"the ranks can't be joined as the variables {', '.join(VARIABLES)} say: {told}; start "
            "all of them with one torchrun on each machine, with the same --rdzv-endpoint"
        ) from error


def agree(store: Any, rank: int, size: int) -> str:
    """Find a name that these ranks have, and none that have used the store before.

    torchrun's agents keep the store when they start all ranks again, and each counts restarts by
    itself. So every rank calls out a number of its own, and is given the name under that number.

    Parameters
    ----------
    store : torch.distributed.Store
        It may hold what earlier ranks have left.
    rank, size : int
        This rank's number and how many there are.

    Returns
    -------
    str
        The same at all of them.

    Raises
    ------
    RuntimeError
        Not all have come in five minutes.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"tandem/call/{rank}", own)
        store.wait([f"tandem/answer/{own}"], _JOIN_TIMEOUT)
        name = store.get(f"tandem/answer/{own}").decode()
        store.set(f"tandem/here/{name}/{rank}", "")
        return name
    missing, deadline = set(range(1, size)), time.monotonic() + _JOIN_TIMEOUT.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"tandem/call/{other}"]):
                # Of the last one to call, who may be an earlier rank still.
                store.set(f"tandem/answer/{store.get(f'tandem/call/{other}').decode()}", own)
        missing = {other for other in missing if not store.check([f"tandem/here/{own}/{other}"])}
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(missing)} of {size} ranks have not come")
        time.sleep(_PAUSE_SECONDS)
    return own


class GlooGroup(Frames):
    """Ranks joined by gloo. A `RankGroup`. Use `join` to get one.

    Parameters
    ----------
    store : torch.distributed.Store
        Where all ranks of it find each other. It is not used but for a copy.
    rank, size : int
        This rank's number and how many there are.
    prefix : str
        Of the names in the store: this engine's alone.

    Attributes
    ----------
    rank, size : int
        This rank's number and how many there are.
    gloo : torch.distributed.ProcessGroupGloo
        What joins them.
    """

    starter: Starter = "torchrun"

    def __init__(self, store: Any, rank: int, size: int, prefix: str) -> None:
        import torch.distributed as dist

        super().__init__(rank, size)
        self._store: Any = store.clone()
        self._prefix = prefix
        self._groups = 0
        self._made: list[GlooGroup] = []
        self._nccl: list[Any] = []
        place = dist.PrefixStore(f"{prefix}/gloo", self._store)
        self.gloo: Any = dist.ProcessGroupGloo(place, rank, size, _TIMEOUT)
        self._signs: StoreHeartbeat | None = None
        self._parent = os.getppid()

    @cached_property
    def local(self) -> "GlooGroup":
        """The ranks of this machine, in the same order. All ranks ask for it together."""
        machines = self.all_gather_object(machine())
        return self.group(machines.index(machines[self.rank]))

    def group(self, number: int) -> "GlooGroup":
        """Those ranks that give the same number, in the same order. All ranks call it together."""
        numbers = self.all_gather_object(number)
        self._groups += 1
        rank, size = numbers[: self.rank].count(number), numbers.count(number)
        prefix = f"{self._prefix}/{self._groups}-{number}"
        self._made.append(GlooGroup(self._store, rank, size, prefix))
        return self._made[-1]

    def copy(self) -> "GlooGroup":
        """The same ranks, for another thread. All ranks call it together."""
        return self.group(0)

    def nccl(self) -> "NcclGroup":
        """The same ranks for vectors on GPUs. All ranks call it together."""
        import torch.distributed as dist

        if not dist.is_nccl_available():
            raise InputError(
                "collective: nccl needs a PyTorch that is built with NCCL: install one for CUDA on "
                "Linux, or use collective: asa"
            )
        self._groups += 1
        place = dist.PrefixStore(f"{self._prefix}/{self._groups}-nccl", self._store)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        self._nccl.append(dist.ProcessGroupNCCL(place, self.rank, self.size, options))
        return NcclGroup(self._nccl[-1])

    def close(self) -> None:
        """See `RankGroup`. Shared memory goes with its last user."""
        for made in self._made:
            made.close()
        for group in self._nccl:
            group.shutdown()
        self._made, self._nccl = [], []
        self.gloo = self._store = None  # which closes their connections

    # As an engine

    def all_reduce(self, vector: np.ndarray) -> None:
        """See `Engine`."""
        import torch

        self._do(lambda: [self.gloo.allreduce([torch.from_numpy(vector)])])

    def all_to_all(self, vector: np.ndarray, received: np.ndarray, parts: Sequence[slice]) -> None:
        """See `Engine`."""
        received[self.rank] = vector[parts[self.rank]]
        others = self._others()
        self._move({r: received[r] for r in others}, {r: vector[parts[r]] for r in others})

    def all_gather(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        """See `Engine`."""
        others, own = self._others(), vector[parts[self.rank]]
        self._move({r: vector[parts[r]] for r in others}, dict.fromkeys(others, own))

    _pass_on = all_gather

    def shared(self, nbytes: int) -> list[np.ndarray]:
        """See `RankGroup`."""
        own = HostBuffer.create(nbytes, f"rank {self.rank}")
        paths = self.all_gather_object(own.path)
        buffers = [
            own if rank == self.rank else HostBuffer.open(path, f"rank {rank}")
            for rank, path in enumerate(paths)
        ]
        arrays = [buffer.array(nbytes, np.uint8) for buffer in buffers]
        self.barrier()  # all have opened what goes with its descriptor here
        return arrays

    def abort(self, status: int) -> NoReturn:
        """End this rank; torchrun sees it, and ends the others everywhere."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # StoreHeartbeat of life

    def beat(self, rank: int) -> None:
        """See `RankGroup`."""
        if self._signs is None:
            self._signs = StoreHeartbeat(self._store.clone(), f"{self._prefix}/signs", self.rank)
            self._signs.start()
        self._signs.swap(rank)

    def heard(self) -> set[int]:
        """See `RankGroup`."""
        # Without torchrun nobody ends the ranks of this machine when one of another fails.
        if _AGENT in os.environ and os.getppid() != self._parent:
            raise PeerLost("torchrun, which has started this rank, is gone: has it been killed?")
        return set() if self._signs is None else self._signs.new()

    # Bytes

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that not all begin with the same."""
        return [(self.rank + n) % self.size for n in range(1, self.size)]

    def _move(self, received: dict[int, np.ndarray], sent: dict[int, np.ndarray]) -> None:
        """Receive from ranks, and send to ranks.

        Of any size and kind: gloo's own collectives know neither uneven parts nor uint16.
        """
        self._do(
            lambda: [
                *(self.gloo.recv([_bytes(v)], r, 0) for r, v in received.items() if v.size),
                *(self.gloo.send([_bytes(v)], r, 0) for r, v in sent.items() if v.size),
            ]
        )

    def _do(self, begin: Callable[[], list[Any]]) -> None:
        try:
            for work in begin():
                work.wait()
        except RuntimeError as error:
            told = str(error).splitlines()[0]
            raise PeerLost(f"trainer {self.rank} lost the others: {told}") from error


class StoreHeartbeat(threading.Thread):
    """Leaves signs of life at the store, and fetches those of others.

    A thread of its own does, for the store's machine may have vanished, and then nothing returns.

    Parameters
    ----------
    store : torch.distributed.Store
        For this thread alone.
    prefix : str
        Of the names in the store.
    rank : int
        Whose signs are left.
    """

    def __init__(self, store: Any, prefix: str, rank: int) -> None:
        super().__init__(name="signs", daemon=True)
        self._store, self._prefix, self._rank = store, prefix, rank
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._counts: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._error: Exception | None = None

    def run(self) -> None:
        """Leave and fetch, as told, until the store is gone."""
        try:
            while True:
                other = self._wanted.get()
                self._store.add(f"{self._prefix}/{self._rank}-{other}", 1)
                self._counts[other] = self._store.add(f"{self._prefix}/{other}-{self._rank}", 0)
        except RuntimeError as error:
            self._error = error

    def swap(self, rank: int) -> None:
        """Leave a sign for a rank, and look for one of it. Returns at once."""
        if self._error is not None:
            raise PeerLost("the store of torchrun is gone: has torchrun been killed?")
        self._wanted.put(rank)

    def new(self) -> set[int]:
        """Of whom there was a new sign since the last call."""
        counts = dict(self._counts)
        found = {rank for rank, count in counts.items() if count > self._known.get(rank, 0)}
        self._known = counts
        return found


class NcclGroup:
    """Ranks of a group of PyTorch's, such as NCCL's, for tensors where they are. An `Adder`.

    What it does is put in turn on the stream on which PyTorch works in this thread, and nobody
    waits.

    Parameters
    ----------
    group : torch.distributed.ProcessGroupNCCL or ProcessGroupGloo
        The ranks.
    """

    def __init__(self, group: Any) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group

    def all_reduce(self, vector: Any) -> None:
        """See `Adder`."""
        try:
            self._group.allreduce([vector]).wait()
        except RuntimeError as error:
            raise PeerLost(f"trainer {self.rank} lost the others: {error}") from error


def machine() -> tuple[str, ...]:
    """What tells this machine from others: ranks with the same see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return (socket.gethostname(),)
    # Containers of one machine see other processes each, or other networks.
    spaces = (str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))
    return boot.read_text(), *spaces


def _bytes(vector: np.ndarray) -> Any:
    """The same memory as a tensor of bytes."""
    import torch

    return torch.from_numpy(vector.view(np.uint8))
