"""The memory of one trainer on the host, and slots of noise, without a run."""

import numpy as np

from tandem.cost.loading import write_noise
from tandem.layers import Network
from tandem.memory import HostBuffer, HostSlots, Slot, SlotLayout
from tandem.memory.parameters import HostMemory
from tandem.optim import Optimizer
from tandem.optim.parameter_groups import ParameterGroups
from tandem.training.setup import parameter_layout


def host_memory(
    network: Network,
    optimizer: Optimizer,
    batch: int,
    freeze: tuple[str, ...] = (),
    side: int | None = None,
) -> HostMemory:
    """Memory for a network's parameters, and for crops, or pictures of another side."""
    layout = parameter_layout(network, optimizer, ParameterGroups(freeze))
    slots = HostSlots.create(SlotLayout.of_pictures(batch, side or network.crop_size), rank=0)
    parameters, gradients = (
        [np.zeros(nbytes, np.uint8)] for nbytes in (layout.parameters_nbytes, layout.nbytes)
    )
    return HostMemory(slots, layout, parameters, gradients)


def noise_slot(network: Network, batch: int, valid: int, seed: int = 0) -> Slot:
    """A slot with crops of noise, any labels, and indices of its own."""
    layout = SlotLayout.of_pictures(batch, network.crop_size)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    write_noise(slot, network.classes, seed)
    slot.valid[...] = valid
    return slot
