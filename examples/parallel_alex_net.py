"""AlexNet by data-parallel functions: a serial program, whose functions several processes compute.

python -m examples.parallel_alex_net                                    noise, two workers
python -m examples.parallel_alex_net --data_folder data/small --workers 4

All pictures are in memory that every worker sees; of a minibatch each takes its own rows. The
weights are those of `train.py` up to rounding, whatever the number of workers.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

import tandem.parallel as synk
from alex_net import AlexNet
from tandem.cli import count, exit_status
from tandem.data.augment import Augmentation, windows
from tandem.data.dataset import open_split
from tandem.data.manifest import read_manifest
from tandem.data.mean_image import read_mean
from tandem.data.order import epoch_order, global_minibatch, minibatch_count
from tandem.data.reader import PictureReader
from tandem.layers import Training
from tandem.ops import crop_mirror, momentum_step

SEED, MOMENTUM, DECAY = 1, 0.9, 0.0005


class ParallelAlexNet:
    """A training step as functions; every worker has weights, momenta and gradients of its own.

    Made after `synk.fork`. `mean` is the mean of whole pictures, float (RGB, row, column); `rate`
    is the learning rate of weights, of which biases have twice as much.
    """

    def __init__(self, net: AlexNet, mean: np.ndarray, rate: float = 0.01) -> None:
        self.crop_size, first = net.crop_size, dict(net.initial_values(SEED))
        shapes = {name: value.shape for name, value in first.items()}
        self.weights, self.momenta, self.gradients = (
            synk.flat(shapes, net.dtype, name) for name in ("weights", "momenta", "gradients")
        )
        for name, value in first.items():
            self.weights.views[name].set_value(value)
        pictures = pt.tensor("pictures", dtype="uint8", shape=(None, *mean.shape[1:], 3))
        labels, origins = pt.lvector("labels"), pt.lmatrix("origins")
        mirrored = pt.tensor("mirrored", dtype="uint8", shape=(None,))
        epoch, minibatch = pt.lscalar("epoch"), pt.lvector("minibatch")

        inputs = [pictures, synk.shared(mean.astype(net.dtype), "mean"), origins, mirrored]
        images = crop_mirror(*inputs, crop_size=net.crop_size, dtype=net.dtype)
        # A picture drops its own units in every epoch, whichever worker has it.
        numbers = minibatch[synk.row_index()]
        training = Training(pt.constant(np.int64(SEED)), epoch, numbers)
        cost = net.cost(net.logits(images, training), labels, labels.shape[0])
        gradients: Any = pt.grad(cost, list(net.parameters.values()))
        self.compute = synk.function(
            [pictures, labels, origins, mirrored],
            cost,
            bcast_inputs=[epoch, minibatch],
            updates=list(zip(self.gradients.views.values(), gradients, strict=True)),
            givens={v: self.weights.views[name] for name, v in net.parameters.items()},
            name="gradients",
        )
        self.update = synk.function([], updates=self._updates(net, rate), name="update")
        synk.distribute()

    def _updates(self, net: AlexNet, rate: float) -> list[Any]:
        updates: list[Any] = []
        for name, parameter in net.parameters.declared.items():
            old = self.weights.views[name], self.momenta.views[name]
            is_bias = parameter.kind == "bias"
            own = np.asarray(2 * rate if is_bias else rate, net.dtype)
            decay = 0.0 if is_bias else DECAY
            new = momentum_step(*old, self.gradients.views[name], own, MOMENTUM, decay, False)
            updates += zip(old, new, strict=True)
        return updates

    def step(self, inputs: list[Any], epoch: int, rows: np.ndarray) -> float:
        """Train on some rows of pictures, labels, origins and mirrors; return their mean loss."""
        loss = self.compute(*inputs, np.int64(epoch), rows, batch=rows)
        synk.all_reduce(self.gradients.vector)  # to the mean over all rows
        self.update()
        return float(loss)


class Pictures(NamedTuple):
    """A data set in memory."""

    pixels: np.ndarray  # uint8 (picture, row, column, RGB)
    labels: np.ndarray  # int64 (picture,)
    mean: np.ndarray  # float32 (RGB, row, column)
    counts: tuple[int, ...]  # pictures in each file, by which an epoch is shuffled


def read(folder: Path) -> Pictures:
    """Read the training pictures that preprocessing wrote."""
    found = open_split(read_manifest(folder / "manifest.json"), folder, "train", folder / "labels")
    reader, everything = PictureReader(found), np.arange(found.size)
    pixels = np.empty((found.size, *reader.picture_shape), np.uint8)
    reader.read(everything, pixels)
    mean = read_mean(folder / "misc" / "img_mean.npy", found.image_size)
    return Pictures(pixels, reader.labels(everything), mean, found.counts)


def noise(count: int = 16, side: int = 72, classes: int = 5) -> Pictures:
    """Make up pictures."""
    rng = np.random.default_rng(SEED)
    pixels = rng.integers(0, 256, (count, side, side, 3), np.uint8)
    labels, mean = rng.integers(0, classes, count), np.full((3, side, side), 127.5, np.float32)
    return Pictures(pixels, labels, mean, (count,))


def train(model: ParallelAlexNet, data: Pictures, epochs: int, batch: int) -> Iterator[float]:
    """Yield the loss of each minibatch, in nats; `batch` is the pictures of all workers."""
    pictures, labels = synk.data(data.pixels), synk.data(data.labels)
    augmentation = Augmentation(model.crop_size, True, True, False, SEED)
    for epoch in range(epochs):
        everything, side = np.arange(len(data.labels)), data.mean.shape[1]
        crops = windows(augmentation, side, "train", epoch, 0, everything)
        inputs = [pictures, labels, *map(synk.data, crops)]
        order = epoch_order(data.counts, "files", SEED, epoch)
        for number in range(minibatch_count(len(order), batch)):
            rows = global_minibatch(order, number, batch)
            yield model.step(inputs, epoch, rows)


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the loss of each minibatch; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_folder", type=Path, help="prepared pictures; noise without")
    parser.add_argument("--workers", type=count, default=2, help="this process and others")
    parser.add_argument("--epochs", type=count, default=3)
    parser.add_argument("--batch", type=count, default=8, help="pictures of all workers together")
    parser.add_argument("--crop_size", type=count, default=67, help="pixels")
    parser.add_argument("--width", type=float, default=0.1, help="factor on the network's sizes")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args(arguments)
    synk.fork(options.workers, use_gpu=False)
    try:
        data = read(options.data_folder) if options.data_folder else noise()
        classes = int(data.labels.max()) + 1
        net = AlexNet(options.crop_size, classes, options.width, options.dtype)
        model = ParallelAlexNet(net, data.mean)
        for number, loss in enumerate(train(model, data, options.epochs, options.batch)):
            print(f"step {number + 1}: loss {loss:.4f} nats")
    finally:
        synk.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
