"""Synkhronos's demo of Lasagne's ResNet-50 on noise: images per second of one worker and of two.

python -m examples.parallel_resnet --workers 1
python -m examples.parallel_resnet --workers 2 --batch 16 --steps 10

Each worker has a batch of its own in a step, as each GPU there. The network is the demo's, version
1 of He et al. 2016 (arXiv 1512.03385). Unlike there, where a vector of the same size was reduced to
take the time, gradients are what workers reduce.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor.tensor as pt

import examples.lasagne_layers as lasagne
import tandem.parallel as synk
from tandem.cli import count
from tandem.parallel.extensions import updates

STAGES = (3, 4, 6, 3)


def build_simple_block(
    layer: lasagne.Layer, filters: int, size: int, stride: int, pad: int, rows: int, **options: Any
) -> lasagne.Layer:
    """A convolution with batch normalisation."""
    convolved = lasagne.Conv2DLayer(
        layer, filters, size, stride, pad, nonlinearity=None, **{"b": None} | options
    )
    return lasagne.BatchNormLayer(convolved, rows)


def build_residual_block(
    layer: lasagne.Layer, filters: int, stride: int, projected: bool, rows: int
) -> lasagne.Layer:
    """Convolutions of 1x1, 3x3 and 1x1 beside the shortcut."""
    right = lasagne.NonlinearityLayer(build_simple_block(layer, filters, 1, stride, 0, rows))
    right = lasagne.NonlinearityLayer(build_simple_block(right, filters, 3, 1, 1, rows))
    last = build_simple_block(right, 4 * filters, 1, 1, 0, rows)
    left = build_simple_block(layer, 4 * filters, 1, stride, 0, rows) if projected else layer
    return lasagne.NonlinearityLayer(lasagne.ElemwiseSumLayer([left, last]))


def build_resnet(side: int = 224, filters: int = 64, classes: int = 1000, rows: int = 32) -> Any:
    """ResNet-50, whose statistics cover `rows` rows; returns the layer of probabilities."""
    net: lasagne.Layer = lasagne.InputLayer((None, 3, side, side))
    net = lasagne.NonlinearityLayer(build_simple_block(net, filters, 7, 2, 3, rows, b=0.0))
    net = lasagne.Pool2DLayer(net, 3, 2, ignore_border=False)
    for stage, blocks in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            net = build_residual_block(net, filters * 2**stage, stride, not block, rows)
    net = lasagne.Pool2DLayer(net, net.output_shape[2], 1, mode="average_exc_pad")
    return lasagne.DenseLayer(net, classes, nonlinearity=lasagne.softmax)


class Functions:
    """The functions of training and of validation."""

    def __init__(self, network: lasagne.Layer, rate: float) -> None:
        x, y = pt.tensor4("x", dtype="float32"), pt.imatrix("y")
        shape = network.source.output_shape
        images = pt.specify_shape(x, shape)
        target = y.flatten()
        guess = lasagne.get_output(network, images)
        loss = lasagne.categorical_crossentropy(guess, target).mean()
        self.params, self.averages = (
            get(network) for get in (lasagne.get_all_params, lasagne.get_all_averages)
        )
        gradients, steps, self.gradient = updates.sgd(loss, self.params, learning_rate=rate)
        state = lasagne.get_state_updates(network)
        self.compute = synk.function([x, y], loss, updates=[*gradients, *state])
        self.update = synk.function([], updates=steps)
        guess = lasagne.get_output(network, images, deterministic=True)
        cost = lasagne.categorical_crossentropy(guess, target).mean()
        missed = pt.mean(pt.neq(pt.argmax(guess, axis=1), target), dtype="float32")
        self.validate = synk.function([x, y], [cost, missed])

    def step(self, *data: Any, batch: Any) -> float:
        """Train on some rows; return their mean loss."""
        loss = self.compute(*data, batch=batch)
        synk.all_reduce(self.gradient)
        self.update()
        return float(loss)


def noise(count: int, side: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Make up pictures, float32 (picture, RGB, row, column), and classes, int32 (picture, 1)."""
    rng = np.random.default_rng(1)
    pictures = rng.random((count, 3, side, side), np.float32)
    return pictures, rng.integers(0, classes, (count, 1)).astype(np.int32)


def train(functions: Functions, data: Any, batch: int, steps: int) -> Iterator[tuple[float, float]]:
    """Yield the loss and the seconds of each step of `batch` rows of all workers."""
    synk.distribute()
    synk.broadcast(functions.params)
    count = len(data[0])
    for step in range(steps):
        rows = np.arange(step * batch, (step + 1) * batch) % count
        begun = time.perf_counter()
        loss = functions.step(*data, batch=rows)
        yield loss, time.perf_counter() - begun


def main(arguments: list[str] | None = None) -> int:
    """Train by the command line's arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=count, default=2, help="this process and others")
    parser.add_argument("--batch", type=count, default=32, help="pictures of each worker")
    parser.add_argument("--steps", type=count, default=10)
    parser.add_argument("--side", type=count, default=224, help="pixels")
    parser.add_argument("--filters", type=count, default=64, help="of the first convolution")
    parser.add_argument("--classes", type=count, default=1000)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    chosen = parser.parse_args(arguments)
    workers = synk.fork(chosen.workers, use_gpu=False, threads=1)
    try:
        network = build_resnet(chosen.side, chosen.filters, chosen.classes, chosen.batch)
        functions = Functions(network, chosen.rate)
        whole = chosen.batch * workers
        data = [synk.data(a) for a in noise(2 * whole, chosen.side, chosen.classes)]
        seconds = []
        for number, (loss, took) in enumerate(train(functions, data, whole, chosen.steps)):
            print(f"step {number + 1}: loss {loss:.4f} nats, {whole / took:.2f} images/s")
            seconds.append(took)
        synk.all_reduce(functions.averages)
        loss, missed = functions.validate(*data, num_slices=2)
        print(f"validation: loss {loss:.4f} nats, error {missed:.2%}")
        rate = whole / np.median(seconds[1:] or seconds)  # the first step compiles
        print(f"{workers} workers: {rate:.2f} images/s", flush=True)
    finally:
        synk.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
