"""Resident variables in the memory of GPUs, averaged and summed from GPU to GPU."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.distributed import LocalGroup
from tandem.distributed.gpu_kernel import MOST_TRAINERS, Kernel
from tandem.distributed.group import RankGroup
from tandem.distributed.peer_to_peer import PeerToPeerAllReduce, PeerVectors, WaitingBarrier
from tandem.errors import InputError
from tandem.memory.cuda import CudaBuffer
from tandem.memory.flat import ALIGNMENT
from tandem.parallel.gpu import RankGpu
from tandem.parallel.messages import Extent
from tandem.parallel.residents import Residents, met

log = logging.getLogger(__name__)

LEAST_BLOCK = 2 << 20  # bytes: memory that is shared with other processes takes no less


@dataclass(frozen=True)
class _Opened:
    """A block of all ranks' memory."""

    vectors: PeerVectors
    all_reduce: PeerToPeerAllReduce

    def close(self) -> None:
        self.all_reduce.close()
        self.vectors.close()


class CudaResidents(Residents):
    """Resident variables on GPUs: each rank has the same blocks, each of one dtype.

    Memory of a GPU can't grow, so a block is added when the last one of a dtype is full. The others
    open a block when it is first reduced. Values of other ranks are read and written by these.

    An average or a sum of float32 or float64 is work of the GPUs; other reductions, and all where
    the system does not permit processes to share a GPU's memory, go through the host. A rank waits
    for its own GPU before it meets the others, so no GPU ever waits for a process, which may end.
    Ranks of mpirun or torchrun reduce by messages of the host.
    """

    is_seen = False

    def __init__(self, gpu: RankGpu) -> None:
        self._gpu = gpu
        self._group: LocalGroup | None = None
        self._buffers: list[CudaBuffer] = []
        self._last: dict[np.dtype, tuple[int, int]] = {}  # the block of a dtype, and its end
        self._kernels: dict[np.dtype, Kernel] = {}
        self._opened: dict[int, _Opened | None] = {}  # by block; None: they can't be

    def join(self, access: LocalGroup | RankGroup, rank: int) -> None:
        if isinstance(access, RankGroup):
            self.ranks = access
        else:
            self._group = access
        self._gpu.enter()

    def allocate(self, nbytes: int, dtype: np.dtype) -> tuple[int, int]:
        block, start = self._last.get(dtype, (0, 0))
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if dtype not in self._last or start + size > self._buffers[block].nbytes:
            block, start = len(self._buffers), 0
            self._add(max(size, LEAST_BLOCK))
        self._last[dtype] = block, start + size
        return block, start

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(buffer.nbytes for buffer in self._buffers)

    def extend(self, blocks: Sequence[int]) -> None:
        for nbytes in blocks[len(self._buffers) :]:
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        self._buffers.append(CudaBuffer.create(self._gpu.driver, nbytes, "residents"))

    def variable(self, extent: Extent, name: str | None) -> Any:
        from tandem.backend import device_shared

        buffer = self._buffers[extent.block]
        array = buffer.array(extent.shape, np.dtype(extent.dtype), extent.offset)
        return device_shared(None, name, self._gpu.device, self._gpu.gpu.memory(array))

    # Reductions

    def is_open(self, extent: Extent, op: str) -> bool:
        is_done = self._size == 1 or not _is_averaged(extent, op)
        return is_done or extent.block in self._opened

    def reduces(self, extent: Extent, op: str) -> bool:
        if self._size == 1:
            return self._group is not None
        return _is_averaged(extent, op) and self._opened.get(extent.block) is not None

    def open(self, extent: Extent) -> None:
        if extent.block not in self._opened:
            with met():
                opened, refused = self._try_to_open(extent)
            if not self._opened:
                how = f"by way of the host: {refused}" if refused else "from GPU to GPU"
                log.info("resident variables are averaged and added %s", how)
            self._opened[extent.block] = opened

    def _try_to_open(self, extent: Extent) -> tuple[_Opened | None, str]:
        """Open a block of all ranks, or none; then a text says why. Collective."""
        group, own, kind = self._joined, self._buffers[extent.block], np.dtype(extent.dtype)
        refused, vectors, kernel = "", None, None
        if group.size > MOST_TRAINERS:
            refused = f"there are more than {MOST_TRAINERS} ranks"
        try:
            own.handle()
            kernel = self._kernel(kind)
        except InputError as error:
            refused = str(error)
        refused = _first(group, refused)
        if not refused:
            try:
                vectors = PeerVectors(group, self._gpu.driver, own, kind.name)
            except InputError as error:
                refused = str(error)
            refused = _first(group, refused)
        if vectors is None:
            return None, refused
        if refused:
            vectors.close()
            return None, refused
        barrier = WaitingBarrier(group)
        all_reduce = PeerToPeerAllReduce(vectors, self._gpu.stream, kernel, barrier)
        return _Opened(vectors, all_reduce), ""

    def _kernel(self, dtype: np.dtype) -> Kernel:
        if dtype not in self._kernels:
            self._kernels[dtype] = self._gpu.gpu.compile_average(self._gpu.driver, dtype)
        return self._kernels[dtype]

    def reduce(self, extent: Extent, op: str, shares: Sequence[float]) -> None:
        opened = self._opened.get(extent.block)
        if opened is None:  # of one rank
            return
        first = extent.offset // np.dtype(extent.dtype).itemsize
        size = int(np.prod(extent.shape, dtype=np.int64))
        with met():
            opened.all_reduce.of(slice(first, first + size)).average(None, shares)

    # The end

    @property
    def has_opened(self) -> bool:
        return any(self._opened.values())

    def release(self) -> None:
        while self._opened:
            _, opened = self._opened.popitem()
            if opened is not None:
                opened.close()

    def leave(self) -> None:
        self.release()
        self._gpu.leave()
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def _joined(self) -> LocalGroup:
        assert self._group is not None
        return self._group

    @property
    def _size(self) -> int:
        return 1 if self._group is None else self._group.size


def _is_averaged(extent: Extent, op: str) -> bool:
    """Return whether the kernel of the exchange is made for a reduction."""
    return op in ("avg", "sum") and np.dtype(extent.dtype).name in ("float32", "float64")


def _first(group: LocalGroup, refused: str) -> str:
    """The first text that a rank gives, if any does. Collective."""
    return next(filter(None, group.all_gather_object(refused)), "")
