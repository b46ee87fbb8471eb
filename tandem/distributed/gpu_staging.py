"""A rank's flat vector on a GPU: averaged from GPU to GPU, or by way of page-locked host memory."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tandem.distributed.allreduce import AllReduce
from tandem.distributed.group import Group
from tandem.distributed.peer_to_peer import PeerToPeerAllReduce, PeerVectors
from tandem.distributed.rank_vector import Access, RankVector, Wait
from tandem.memory import HostBuffer
from tandem.memory.cuda import Event
from tandem.memory.parameters import CudaMemory


class GpuVector(RankVector):
    """A vector on a GPU: of a trainer's memory, its parameters or gradients.

    Ranks of one machine copy from GPU to GPU. Messages go from GPU to GPU where the MPI of all
    ranks takes GPU memory, or NCCL does, and by page-locked host memory elsewhere. One that is
    apart is averaged by another thread while the trainer computes, on a stream of its own.
    """

    def __init__(
        self,
        memory: CudaMemory,
        name: Literal["parameters", "gradients"],
        group: Group,
        is_apart: bool = False,
    ) -> None:
        self._memory, self._name, self._group, self._driver = memory, name, group, memory.driver
        self._buffer = memory.buffers[name]
        self._dtype = np.dtype(memory.layout.dtype)
        self.is_common = name == "parameters"
        self._is_apart = is_apart
        self.stream = memory.driver.stream() if is_apart else memory.stream
        # All ranks do the same, whatever another's machine has.
        self._is_direct = all(group.all_gather_object(group.takes_gpu_memory()))
        self._closing = contextlib.ExitStack()
        self._free: list[Event] = []
        self._averaged = self._driver.event()

    @cached_property
    def own(self) -> Any:
        import torch

        return torch.as_tensor(self._memory.flat[self._name], device=self._memory.device)

    @cached_property
    def _whole_copy(self) -> np.ndarray:
        return self._host_copy(self._buffer.nbytes // self._dtype.itemsize)

    def by_memory(self, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        vectors = PeerVectors(group, self._driver, self._buffer, self._dtype.name)
        peers = PeerToPeerAllReduce(vectors, self.stream, self._memory.kernel)
        self._closing.callback(vectors.close)
        self._closing.callback(peers.close)
        return [peers.of(part) for part in parts]

    def by_messages(
        self, parts: Sequence[slice], make: Callable[[Any], AllReduce]
    ) -> list[AllReduce]:
        if self._is_direct:
            return [make(self.own[part]) for part in parts]
        copy = self._whole_copy
        return [StagedAllReduce(self, copy[part], part.start, make(copy[part])) for part in parts]

    def on_host(self, size: int) -> tuple[np.ndarray, Access]:
        copy = self._host_copy(size)
        return copy, lambda: self.staged(copy)

    @contextlib.contextmanager
    def staged(self, copy: np.ndarray, start: int = 0) -> Iterator[None]:
        """Context in which a page-locked copy stands for elements of the vector, from `start`.

        It is copied both ways, also for those who only read or only write.
        """
        address = self._buffer.address + start * self._dtype.itemsize
        self._driver.download(copy, address, self.stream)
        self.wait()
        yield
        self._driver.upload(address, copy, self.stream)
        # The copy is written to next time: what is read of it now must have been read.
        self.wait()

    def wait(self) -> None:
        self.stream.synchronize()

    def mark(self) -> Wait:
        event = self._free.pop() if self._free else self._driver.event()
        event.record(self._memory.stream)

        def wait() -> None:
            with self._driver.borrowed():
                self.stream.wait_for_event(event)
            self._free.append(event)

        return wait

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        with self._driver.borrowed(), self._memory.use(self.stream):
            yield
            if self._is_apart:
                self._averaged.record(self.stream)

    def rejoin(self) -> None:
        if self._is_apart:
            self._memory.stream.wait_for_event(self._averaged)

    def close(self) -> None:
        self.wait()
        self._closing.close()
        # All have given up the others' memory before any frees its own.
        self._group.barrier()

    def _host_copy(self, size: int) -> np.ndarray:
        """Copy the first elements into page-locked host memory."""
        # A page can be locked once only, so no other memory may lie in one of these.
        buffer = HostBuffer.create(size * self._dtype.itemsize, "staging")
        copy = buffer.array(size, self._dtype)
        pages = copy.view(np.uint8)
        self._driver.lock_pages(pages)
        self._closing.callback(self._driver.unlock_pages, pages)
        self._driver.download(copy, self._buffer.address, self.stream)
        self.wait()
        return copy


class StagedAllReduce(AllReduce):
    """Average part of a vector on a GPU, from `start`, by way of a page-locked copy on the host."""

    def __init__(
        self, vector: GpuVector, copy: np.ndarray, start: int, all_reduce: AllReduce
    ) -> None:
        self._vector, self._copy, self._start = vector, copy, start
        self._all_reduce = all_reduce

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        with self._vector.staged(self._copy, self._start):
            self._all_reduce.average(self._copy, shares)
