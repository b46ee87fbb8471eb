"""The channel between the GPUs of one machine: each trainer copies from the others' memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.distributed.channel import CheckedChannel, HostChannel, RegionChannel, Shape
from tandem.distributed.group import Group
from tandem.distributed.peer_to_peer import DeviceBarrier, PeerVectors, device_barrier
from tandem.memory.cuda import CudaBuffer, CudaDriver, Stream

if TYPE_CHECKING:
    from torch import Tensor

FIRST_SIZE = 2 << 20  # bytes of a region for each trainer: no allocation of a driver is smaller


def make_peer_channel(group: Group, driver: CudaDriver, stream: Stream) -> CheckedChannel:
    """Make the channel of trainers on GPUs, by way of the host where two can't reach each other.

    Collective. Raises InputError if the system does not permit processes to share device memory.
    """
    regions = [_region(group, driver, FIRST_SIZE) for _ in range(2)]
    if regions[0].is_any_apart:
        for region in regions:
            _give_up(region)
        return HostChannel(group)
    return PeerChannel(group, regions, device_barrier(regions[0]), stream)


class PeerChannel(RegionChannel):
    """Trainers on GPUs of one machine, by device memory that the others have opened.

    Copies to and from a region are work on `stream`, on which PyTorch works in this thread. What
    all wait for is a barrier of the devices, so no host waits for its own; the hosts have one, too.
    """

    def __init__(
        self, group: Group, regions: list[PeerVectors], barrier: DeviceBarrier, stream: Stream
    ) -> None:
        super().__init__(group)
        self._regions, self._device_barrier, self._stream = regions, barrier, stream
        self._driver = regions[0].driver

    def close(self) -> None:
        """Wait for this trainer's work, and give up all memory. Collective."""
        self._stream.synchronize()
        self._device_barrier.close()
        for region in self._regions:
            _give_up(region)
        super().close()

    def _pass(self, message: Any) -> Sequence[Any]:
        return self._device_barrier.cross(self._stream, message)

    def _capacity(self, turn: int) -> int:
        return self._regions[turn].own.nbytes

    def _enlarge(self, turn: int, nbytes: int) -> None:
        # Until this stream has done its work, it may read the region.
        self._stream.synchronize()
        _give_up(self._regions[turn])
        self._regions[turn] = _region(self._group, self._driver, nbytes)

    def _write(self, turn: int, start: int, block: "Tensor") -> None:
        # If this is a copy, its memory is used again only for later work on the same stream.
        block = block.contiguous()
        address = self._regions[turn].address(self.rank, start)
        self._driver.copy(address, block.data_ptr(), block.nbytes, self._stream)

    def _read(self, turn: int, rank: int, start: int, shape: Shape, like: "Tensor") -> "Tensor":
        block = self._new(shape, like)
        address = self._regions[turn].address(rank, start)
        self._driver.copy(block.data_ptr(), address, block.nbytes, self._stream)
        return block

    def _new(self, shape: Shape, like: "Tensor") -> "Tensor":
        """Make memory on this trainer's device, of another tensor's dtype."""
        return like.new_empty(shape)


def _region(group: Group, driver: CudaDriver, nbytes: int) -> PeerVectors:
    """Make memory on each trainer's device that all others open. Collective."""
    own = CudaBuffer.create(driver, nbytes, "conversions")
    return PeerVectors(group, driver, own, "uint8")


def _give_up(region: PeerVectors) -> None:
    """Free this trainer's memory when the others have closed it. Collective."""
    region.close()
    region.group.barrier()
    region.own.close()
