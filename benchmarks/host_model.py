"""A trainer's compiled network over flat vectors in host memory, without a run."""

import numpy as np

from examples.resident_step import Sizes
from tandem.config.schema import Config
from tandem.memory import HostBuffer
from tandem.memory.flat import FlatLayout, Vectors
from tandem.memory.slot import Slot, SlotLayout
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork


def host_model(sizes: Sizes, device_crops: bool = False) -> CompiledNetwork:
    """Compile a trainer's functions on the CPU; `device_crops` as with `use_data_layer`."""
    config = Config(batch_size=sizes.batch, crop_size=sizes.crop, width=sizes.width)
    net = sizes.network()
    layout = FlatLayout.of(
        {k: v.type.shape for k, v in net.parameters.items()}, "float32", states=SGD.states
    )
    parameters, gradients = (HostBuffer.create(n * layout.nbytes) for n in (2, 1))
    mean = np.full((3, sizes.stored, sizes.stored), 117, np.float32)
    vectors = Vectors.on(layout, parameters, gradients)
    model = CompiledNetwork(net, config, SGD(), mean, vectors, device_crops=device_crops)
    for name, value in net.initial_values(seed=1):
        model.load({name: value})
    return model


def noise_slot(sizes: Sizes) -> Slot:
    """Make a slot with a minibatch of cropped noise."""
    layout = SlotLayout(sizes.batch, sizes.crop)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    rng = np.random.default_rng(1)
    slot.pictures[...] = rng.integers(0, 256, slot.pictures.shape, np.uint8)
    slot.labels[...] = rng.integers(0, sizes.classes, sizes.batch)
    slot.indices[...] = np.arange(sizes.batch)
    slot.valid[...] = sizes.batch
    return slot


def train_step(model: CompiledNetwork, slot: Slot, rate: float = 1e-4) -> None:
    """Make the step of a single trainer."""
    model.compute_gradients(slot, epoch=0)
    if not model.is_finite():
        raise FloatingPointError("the loss or a gradient is not finite")
    model.update(rate)
