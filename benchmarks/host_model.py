"""A trainer's compiled network over flat vectors in host memory, without a run."""

import numpy as np

from examples.resident_step import Sizes
from tandem.config.schema import Config
from tandem.cost.loading import write_noise
from tandem.layers import Network
from tandem.memory import HostBuffer, Slot, SlotLayout
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork
from tests.support.trainer_memory import host_memory


def host_model(
    sizes: Sizes, device_crops: bool = False, network: Network | None = None
) -> CompiledNetwork:
    """Compile a trainer's functions on the CPU, of AlexNet or a given network.

    `device_crops` is as with `use_data_layer`.
    """
    config = Config(
        batch_size=sizes.batch,
        crop_size=sizes.crop,
        width=sizes.width,
        use_data_layer=device_crops,
    )
    net = network or sizes.network()
    memory = host_memory(net, SGD(), sizes.batch, side=sizes.stored if device_crops else sizes.crop)
    mean = np.full((3, sizes.stored, sizes.stored), 117, np.float32)
    model = CompiledNetwork(net, config, SGD(), mean, memory)
    for name, value in net.initial_values(seed=1):
        model.load({name: value})
    return model


def noise_slot(sizes: Sizes) -> Slot:
    """Make a slot with a minibatch of cropped noise."""
    layout = SlotLayout.of_pictures(sizes.batch, sizes.crop)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    write_noise(slot, sizes.classes)
    return slot


def train_step(model: CompiledNetwork, slot: Slot, rate: float = 1e-4) -> None:
    """Make the step of a single trainer."""
    model.compute_gradients(slot, epoch=0)
    if not model.is_finite():
        raise FloatingPointError("the loss or a gradient is not finite")
    model.update(rate)
