"""Ranks that are started by torchrun and joined by gloo, without MPI; NCCL for vectors on GPUs.

PyTorch is imported only when ranks join, since that takes seconds. Of `torch.distributed` the
process groups are used, and nothing that is global to a process.

gloo waits without taking a core, but can't be asked whether something has come. So heartbeats go by
the store at which torchrun's ranks find each other.
"""

import os
import queue
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tandem.distributed.group import PeerLost, RankGroup, Starter
from tandem.errors import InputError
from tandem.memory import HostBuffer

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables in which torchrun passes a rank the address of the others."""

_AGENT = "TORCHELASTIC_RUN_ID"  # that torchrun itself is the starter
_JOIN_TIMEOUT = timedelta(minutes=5)
_LAST_SECONDS = 2.0  # for the store's last answer
_MOST_BYTES = 1 << 40  # of a message: no rank sends more
_PAUSE_SECONDS = 0.02  # between looks at the store
_TIMEOUT = timedelta(days=365)  # no step is too slow; dead ranks are found by heartbeats


def is_started_by_torchrun() -> bool:
    """Test if torchrun, or what sets the same variables, has started this process as a rank."""
    return _AGENT in os.environ or all(name in os.environ for name in VARIABLES)


def join() -> "GlooGroup":
    """Become a rank among all that were started together.

    Raises InputError if PyTorch is missing or has no gloo, or the others are not to be found.
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
        text = str(error).splitlines()[0]
        raise InputError(
            f"the ranks can't be joined by the variables {', '.join(VARIABLES)}: {text}; start "
            "all of them with one torchrun on each machine, with the same --master-addr"
        ) from error


def agree(store: Any, rank: int, size: int) -> str:
    """Find a name that these ranks have, and none that have used the store before.

    torchrun's agents keep the store when they start all ranks again, and each counts restarts by
    itself. So every rank calls with a number of its own, and finds the name under that number.
    Raises RuntimeError if not all have come in five minutes.
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


class GlooGroup(RankGroup):
    """Ranks joined by gloo, which find each other at a store. Use `join` to get one.

    `prefix`, of the names in the store, is this group's alone.
    """

    starter: Starter = "torchrun"

    def __init__(self, store: Any, rank: int, size: int, prefix: str) -> None:
        import torch.distributed as dist

        super().__init__(rank, size)
        self._store: Any = store.clone()
        self._prefix = prefix
        self._groups = 0
        self._nccl: Any = None
        names = dist.PrefixStore(f"{prefix}/gloo", self._store)
        self._gloo: Any = dist.ProcessGroupGloo(names, rank, size, _TIMEOUT)
        self._heartbeat: StoreHeartbeat | None = None
        self._parent = os.getppid()

    @cached_property
    def local(self) -> "GlooGroup":
        machines = self.all_gather_object(machine())
        return self.split(machines.index(machines[self.rank]))

    def split(self, color: int) -> "GlooGroup":
        colors = self.all_gather_object(color)
        self._groups += 1
        rank, size = colors[: self.rank].count(color), colors.count(color)
        prefix = f"{self._prefix}/{self._groups}-{color}"
        return self._keep(GlooGroup(self._store, rank, size, prefix))

    def open_nccl(self) -> None:
        """Join the ranks by NCCL too: from now on `all_reduce` takes tensors on GPUs. Collective.

        NCCL's work is put on the stream on which PyTorch works in this thread, and nobody waits.
        Raises InputError if PyTorch is built without NCCL.
        """
        import torch.distributed as dist

        if not dist.is_nccl_available():
            raise InputError(
                "collective: nccl needs a PyTorch that is built with NCCL: install one for CUDA on "
                "Linux, or use collective: asa"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        names = dist.PrefixStore(f"{self._prefix}/nccl", self._store)
        self._nccl = dist.ProcessGroupNCCL(names, self.rank, self.size, options)

    def close(self) -> None:
        super().close()
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None
        self._gloo = self._store = None  # which closes their connections

    def all_reduce(self, vector: Any) -> None:
        import torch

        if isinstance(vector, np.ndarray):
            self._do(lambda: [self._gloo.allreduce([torch.from_numpy(vector)])])
        else:
            self._do(lambda: [self._nccl.allreduce([vector])])

    def average_by_nccl(self, vector: Any) -> None:
        """Replace every rank's tensor on a GPU by the average of all. Collective."""
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        self._do(lambda: [self._nccl.allreduce([vector], options)])

    def all_to_all(self, vector: np.ndarray, received: np.ndarray, parts: Sequence[slice]) -> None:
        received[self.rank] = vector[parts[self.rank]]
        others = self._others()
        self._move({r: received[r] for r in others}, {r: vector[parts[r]] for r in others})

    def all_to_all_parts(
        self,
        sent: np.ndarray,
        sent_parts: Sequence[slice],
        received: np.ndarray,
        parts: Sequence[slice],
    ) -> None:
        received[parts[self.rank]] = sent[sent_parts[self.rank]]
        others = self._others()
        self._move(
            {r: received[parts[r]] for r in others}, {r: sent[sent_parts[r]] for r in others}
        )

    def all_gather(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        others, own = self._others(), vector[parts[self.rank]]
        self._move({r: vector[parts[r]] for r in others}, dict.fromkeys(others, own))

    def shared_memory(self, nbytes: int) -> list[np.ndarray]:
        own = HostBuffer.create(nbytes, f"rank {self.rank}")
        buffers = [
            own if rank == self.rank else HostBuffer.open(path, f"rank {rank}")
            for rank, path in enumerate(self.all_gather_object(own.path))
        ]
        arrays = [buffer.array(nbytes, np.uint8) for buffer in buffers]
        self.barrier()  # the paths are valid until the descriptors here are closed
        return arrays

    def send_bytes(self, sent: Sequence[tuple[int, np.ndarray]]) -> None:
        for rank, vector in sent:
            self._move({}, {rank: np.array([vector.size])})
            self._move({}, {rank: vector})

    def receive_bytes(self, rank: int) -> np.ndarray:
        size = np.empty(1, np.int64)
        self._move({rank: size}, {})
        if not 0 <= size[0] <= _MOST_BYTES:
            raise PeerLost(f"found a message of {size[0]} bytes, expected up to {_MOST_BYTES}")
        vector = np.empty(size[0], np.uint8)
        self._move({rank: vector}, {})
        return vector

    def beat(self, rank: int) -> None:
        if self._heartbeat is None:
            prefix = f"{self._prefix}/heartbeats"
            self._heartbeat = StoreHeartbeat(self._store.clone(), prefix, self.rank)
            self._heartbeat.start()
            # Also at Python's end, which a thread inside PyTorch's code would turn into an abort.
            weakref.finalize(self, self._heartbeat.stop)
        self._heartbeat.swap(rank)

    def beats(self) -> set[int]:
        # Without torchrun nobody ends the ranks of this machine when one of another fails.
        if _AGENT in os.environ and os.getppid() != self._parent:
            raise PeerLost("torchrun, which has started this rank, is gone: has it been killed?")
        return set() if self._heartbeat is None else self._heartbeat.new()

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that not all begin with the same."""
        return [(self.rank + n) % self.size for n in range(1, self.size)]

    def _move(self, received: dict[int, np.ndarray], sent: dict[int, np.ndarray]) -> None:
        """Receive from ranks, and send to ranks.

        Of any size and dtype: gloo's own collectives support neither uneven parts nor uint16.
        """
        self._do(
            lambda: [
                *(self._gloo.recv([_bytes(v)], r, 0) for r, v in received.items() if v.size),
                *(self._gloo.send([_bytes(v)], r, 0) for r, v in sent.items() if v.size),
            ]
        )

    def _do(self, begin: Callable[[], list[Any]]) -> None:
        try:
            for work in begin():
                work.wait()
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise PeerLost(f"trainer {self.rank} lost the others: {text}") from error


class StoreHeartbeat(threading.Thread):
    """Thread that counts this rank's heartbeats at the store, and fetches the counts of others.

    It is a thread because the store's machine may have vanished, and then no call returns. The
    store is for this thread alone.
    """

    def __init__(self, store: Any, prefix: str, rank: int) -> None:
        super().__init__(name="store heartbeat", daemon=True)
        self._store, self._prefix, self._rank = store, prefix, rank
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._counts: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            while (other := self._requests.get()) is not None:
                self._store.add(f"{self._prefix}/{self._rank}-{other}", 1)
                self._counts[other] = self._store.add(f"{self._prefix}/{other}-{self._rank}", 0)
        except RuntimeError as error:
            self._error = error

    def swap(self, rank: int) -> None:
        """Count a heartbeat for a rank, and ask for its own. Returns at once."""
        if self._error is not None:
            raise PeerLost("the store of torchrun is gone: has torchrun been killed?")
        self._requests.put(rank)

    def stop(self) -> None:
        """End the thread, unless the store does not answer."""
        self._requests.put(None)
        if threading.current_thread() is not self:  # in which the group may be collected
            self.join(_LAST_SECONDS)

    def new(self) -> set[int]:
        """Whose count has grown since the last call."""
        counts = dict(self._counts)
        found = {rank for rank, count in counts.items() if count > self._known.get(rank, 0)}
        self._known = counts
        return found


def machine() -> tuple[str, ...]:
    """Return what identifies this machine: ranks with the same see each other's processes."""
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
