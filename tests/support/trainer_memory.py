"""The memory of one trainer on the host, and slots of noise, without a run."""

import numpy as np

from tandem.layers import Network
from tandem.memory import HostBuffer, HostSlots, Slot, SlotLayout
from tandem.memory.parameters import HostMemory
from tandem.optim import Optimizer
from tandem.optim.parameter_groups import ParameterGroups
from tandem.training.setup import parameter_layout


def host_memory(
    network: Network, optimizer: Optimizer, batch: int, freeze: tuple[str, ...] = ()
) -> HostMemory:
    """Memory for a network's parameters and for crops."""
    layout = parameter_layout(network, optimizer, ParameterGroups(freeze))
    slots = HostSlots.create(SlotLayout.of_pictures(batch, network.crop_size), rank=0)
    parameters, gradients = (
        [np.zeros(nbytes, np.uint8)] for nbytes in (layout.parameters_nbytes, layout.nbytes)
    )
    return HostMemory(slots, layout, parameters, gradients)


def noise_slot(network: Network, batch: int, valid: int, seed: int = 0) -> Slot:
    """A slot with crops of noise and any labels and indices."""
    rng = np.random.default_rng(seed)
    layout = SlotLayout.of_pictures(batch, network.crop_size)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    slot.pictures[...] = rng.integers(0, 256, slot.pictures.shape)
    slot.labels[...] = rng.integers(0, network.classes, batch)
    slot.indices[...] = rng.integers(0, 1000, batch)
    slot.valid[...] = valid
    return slot
