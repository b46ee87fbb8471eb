"""Where a trainer's memory lies, the host's or a GPU's, and what follows from that.

The launcher makes a site for each trainer. It travels to the trainer's process, which opens it:
what comes out holds the parameters, the slots, and all that depends on where they are. Its loader
gets the part of the site that it fills.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from tandem.data.minibatch import MinibatchBuilder
from tandem.distributed import (
    AverageGradients,
    AverageParameters,
    Exchange,
    Group,
    SharedParameters,
)
from tandem.distributed.average import shard
from tandem.memory import HostBuffer, HostSlots, Slot, SlotLayout
from tandem.memory.cuda import CudaBuffer, CudaDriver, CudaSlot, CudaSlots, Driver, SlotUploader
from tandem.memory.flat import FlatLayout, Vectors
from tandem.training.input_pipeline import InProcessLoader, Loader, OrderedLoader, ProcessLoader
from tandem.training.run_spec import RunSpec

Shapes = Mapping[str, tuple[int, ...]]
Strategy = str


class Memory(Protocol):
    """A trainer's memory, opened.

    Attributes
    ----------
    vectors : Vectors
        Its parameters and gradients.
    slots : list of Slot
        By number.
    nbytes : int
        Of weights and momenta.
    device : str
        Where PyTorch computes.
    records : bool
        Whether functions are recorded over the slots, which are on a GPU.
    """

    device: str
    records: bool
    vectors: Vectors
    slots: list[Slot]
    nbytes: int

    def exchange(self, strategy: Strategy) -> Exchange:
        """What the trainers do together around the update. All make it together."""
        ...

    def updated(self, strategy: Strategy) -> Vectors | None:
        """The part that this trainer updates of what all share; None: it updates its own."""
        ...

    def loader(self, connection: Connection | None, filler: MinibatchBuilder) -> Loader:
        """What fills the slots: the process at the other end, or the trainer itself."""
        ...

    def wait(self) -> None:
        """Wait for all work on it so far."""
        ...

    def checksum(self) -> int:
        """Of the bits of weights and momenta."""
        ...

    def close(self) -> None:
        """Give it back; the trainers do so together, when they have agreed to end.

        No loader is left then. After any other failure a process just ends.
        """
        ...


class Site(Protocol):
    """Where a trainer's memory is to lie. It can be sent to a process that is being started."""

    def loader_side(self) -> Any:
        """What the trainer's loader opens."""
        ...

    def open(self, group: Group, shapes: Shapes, dtype: str) -> Memory:
        """Make the memory in the trainer's process. All trainers do so together.

        Parameters
        ----------
        group : Group
            The trainer's place.
        shapes : mapping of str to tuple of int
            Of the parameters.
        dtype : "float32" or "float64"
            Of the parameters.
        """
        ...

    def release(self) -> None:
        """Give up the launcher's share, once the processes are started."""
        ...


def make_sites(spec: RunSpec) -> list[Site]:
    """A site for each trainer of a spec, by rank."""
    slots = SlotLayout(spec.config.batch_size, spec.picture_size)
    if not spec.on_gpu:
        return [*host_sites(slots, spec.trainers, spec.config.exchange)]
    detours = tuple(HostBuffer.create(0, f"detour {rank}") for rank in range(spec.trainers))
    numbers = [int(device.partition(":")[2]) for device in spec.devices]
    return [CudaSite(number, slots, detours, spec.config.deterministic) for number in numbers]


def host_sites(slots: SlotLayout, trainers: int, strategy: Strategy) -> list["HostSite"]:
    """A site in host memory for each trainer, by rank."""
    ranks = range(trainers)
    if strategy == "shared":
        parameters = (HostBuffer.create(0, "parameters"),) * trainers
    else:
        parameters = tuple(HostBuffer.create(0, f"parameters {rank}") for rank in ranks)
    gradients = tuple(HostBuffer.create(0, f"gradients {rank}") for rank in ranks)
    return [HostSite(HostSlots.create(slots, rank), parameters, gradients) for rank in ranks]


@dataclass(frozen=True)
class HostSite:
    """In host memory that all trainers see.

    Attributes
    ----------
    slots : HostSlots
        The trainer's.
    parameters, gradients : tuple of HostBuffer
        Every trainer's flat vectors, by rank. Each trainer sizes its own. The parameters of all may
        be one buffer.
    """

    slots: HostSlots
    parameters: tuple[HostBuffer, ...]
    gradients: tuple[HostBuffer, ...]

    def loader_side(self) -> HostSlots:
        """See `Site`."""
        return self.slots

    def open(self, group: Group, shapes: Shapes, dtype: str) -> "HostMemory":
        """See `Site`."""
        return HostMemory(self, group, FlatLayout.of(shapes, dtype, states=("momentum",)))

    def release(self) -> None:
        """See `Site`."""
        for buffer in (*self.slots.buffers, *self.parameters, *self.gradients):
            buffer.close()


class HostMemory:
    """Host memory of one trainer. A `Memory`."""

    device, records = "cpu", False

    def __init__(self, site: HostSite, group: Group, layout: FlatLayout) -> None:
        self._site, self._meeting, self._layout = site, group, layout
        self._parameters = site.parameters[group.rank]
        self._parameters.resize(layout.parameters_nbytes)
        site.gradients[group.rank].resize(layout.nbytes)
        # The others may map these buffers only once they have their size.
        group.barrier()
        self.vectors = Vectors.on(layout, self._parameters, site.gradients[group.rank])
        self.slots = site.slots.arrays
        self.nbytes = layout.parameters_nbytes

    def exchange(self, strategy: Strategy) -> Exchange:
        """See `Memory`."""
        if strategy == "average":
            return AverageParameters(self._meeting, self._arrays(self._site.parameters))
        kind = SharedParameters if strategy == "shared" else AverageGradients
        return kind(self._meeting, self._arrays(self._site.gradients))

    def updated(self, strategy: Strategy) -> Vectors | None:
        """See `Memory`."""
        if strategy != "shared":
            return None
        gradients = self._site.gradients
        part = shard(self._layout.size, len(gradients), self._meeting.rank)
        return Vectors.within(self._layout, self._parameters, gradients[0], part)

    def loader(self, connection: Connection | None, filler: MinibatchBuilder) -> Loader:
        """See `Memory`."""
        if connection is not None:
            return ProcessLoader(connection)
        return InProcessLoader(filler, self._site.slots)

    def wait(self) -> None:
        """See `Memory`: the host's kernels are done when their calls return."""

    def checksum(self) -> int:
        """See `Memory`."""
        return zlib.crc32(self._parameters.array(self.nbytes, np.uint8).data)

    def close(self) -> None:
        """Nothing: host memory goes with its last user."""

    def _arrays(self, buffers: Sequence[HostBuffer]) -> list[np.ndarray]:
        dtype = np.dtype(self._layout.dtype)
        return [buffer.array((buffer.nbytes // dtype.itemsize,), dtype) for buffer in buffers]


@dataclass(frozen=True)
class CudaSite:
    """On a GPU, in memory that the trainer allocates and the others open.

    Attributes
    ----------
    device : int
        The GPU's number.
    slots : SlotLayout
        Of the two slots.
    detours : tuple of HostBuffer
        By which trainers pass shards whose GPUs can't reach each other, by rank.
    deterministic : bool
        Whether kernels are to compute the same bits every time.
    """

    device: int
    slots: SlotLayout
    detours: tuple[HostBuffer, ...]
    deterministic: bool = False

    def loader_side(self) -> CudaSlots:
        """See `Site`."""
        return CudaSlots(self.device, self.slots)

    def open(self, group: Group, shapes: Shapes, dtype: str) -> "CudaMemory":
        """See `Site`. From now on PyTorch's work in this process goes to one stream of this GPU."""
        from tandem.backend import deterministic, on_stream, use_device

        name = f"cuda:{self.device}"
        deterministic(self.deterministic)
        driver = CudaDriver(self.device)
        use_device(name)
        layout = FlatLayout.of(shapes, dtype, channels_last=True, states=("momentum",))
        return self.memory(group, layout, driver, lambda s: on_stream(name, s.handle))

    def memory(self, group: Group, layout: FlatLayout, *where: Any) -> "CudaMemory":
        """The memory on a driver, and with the context of PyTorch's work, see `CudaMemory`."""
        return CudaMemory(self, group, layout, *where)

    def release(self) -> None:
        """See `Site`."""
        for buffer in self.detours:
            buffer.close()


class CudaMemory:
    """Memory of one trainer on its GPU. A `Memory`.

    From now on PyTorch's work in this process goes to one stream.

    Parameters
    ----------
    site : CudaSite
    group : Group
    layout : FlatLayout
        Of the parameters.
    driver : Driver
        Of the GPU.
    use : callable
        Gives the context in which PyTorch works on a stream.
    """

    records = True

    def __init__(
        self,
        site: CudaSite,
        group: Group,
        layout: FlatLayout,
        driver: Driver,
        use: Callable[[Any], AbstractContextManager],
    ) -> None:
        self._site, self._meeting, self._layout, self._driver = site, group, layout, driver
        self.device = f"cuda:{site.device}"
        self._stream = driver.stream()
        self._use, self._context = use, use(self._stream)
        self._context.__enter__()
        self._parameters = CudaBuffer.create(driver, layout.parameters_nbytes, "parameters")
        self._gradients = CudaBuffer.create(driver, layout.nbytes, "gradients")
        self.vectors = Vectors.on(layout, self._parameters, self._gradients)
        self._slots = [CudaSlot.create(driver, site.slots, f"slot {number}") for number in (0, 1)]
        self.slots = [slot.arrays for slot in self._slots]
        self.nbytes = layout.parameters_nbytes
        self._to_close: list[Callable[[], None]] = []

    def exchange(self, strategy: Strategy) -> Exchange:
        """See `Memory`."""
        from tandem.distributed.peer_to_peer import (
            PeerAverageGradients,
            PeerAverageParameters,
            PeerVectors,
            detours_by,
        )

        if len(self._site.detours) == 1:
            return Exchange()
        own = self._gradients if strategy == "gradients" else self._parameters
        detours = detours_by(self._site.detours, self._meeting)
        vectors = PeerVectors(self._meeting, self._driver, own, self._layout.dtype, detours)
        kind = PeerAverageGradients if strategy == "gradients" else PeerAverageParameters
        exchange = kind(vectors, self._stream, self._average())
        self._to_close += [exchange.close, vectors.close]
        return exchange

    def updated(self, strategy: Strategy) -> Vectors | None:
        """See `Memory`. Each GPU has its own."""
        return None

    def loader(self, connection: Connection | None, filler: MinibatchBuilder) -> Loader:
        """See `Memory`."""
        if connection is None:
            uploader = SlotUploader(self._driver, self._slots)
            return OrderedLoader(InProcessLoader(filler, uploader), self._slots, self._stream)
        connection.send(tuple(slot.handle() for slot in self._slots))
        return OrderedLoader(ProcessLoader(connection), self._slots, self._stream)

    def wait(self) -> None:
        """See `Memory`."""
        self._stream.synchronize()

    def checksum(self) -> int:
        """See `Memory`."""
        copy = np.empty(self.nbytes, np.uint8)
        self._driver.download(copy, self._parameters.address, self._stream)
        self._stream.synchronize()
        return zlib.crc32(copy.data)

    def close(self) -> None:
        """See `Memory`."""
        self._stream.synchronize()
        for close in self._to_close:
            close()
        # Everybody has given up the others' memory before anyone gives back its own.
        self._meeting.barrier()
        for slot in self._slots:
            slot.close()
        for buffer in (self._parameters, self._gradients):
            buffer.close()
        self._context.__exit__(None, None, None)

    def _average(self) -> Any:
        """The exchange's kernel; None has it compiled."""
        return None
