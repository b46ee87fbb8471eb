"""Synkhronos's demo of Lasagne on MNIST: a serial program, whose functions workers compute.

python -m examples.parallel_mnist                              a perceptron, two workers
python -m examples.parallel_mnist cnn --data fashion_mnist --epochs 3
python -m examples.parallel_mnist custom_mlp:3,400,.2,.5 --scattered

The rows of a minibatch lie in memory that all workers see, or with ``--scattered`` each worker has
its part of the data set, and takes its rows from there. Models, rates, batches and the order of
calls are the demo's (Stooke and Abbeel 2017, github.com/astooke/Synkhronos, demos/lasagne_mnist).
"""

import argparse
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import examples.lasagne_layers as lasagne
import tandem.parallel as synk
from tandem import datasets
from tandem.cli import count, exit_status
from tandem.parallel.extensions import updates

MODELS = "mlp, cnn or custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID"


def build_mlp(
    x: Any, depth: int = 2, width: int = 800, drop_input: float = 0.2, drop_hidden: float = 0.5
) -> lasagne.Layer:
    """Hidden layers with dropout."""
    network: lasagne.Layer = lasagne.InputLayer((None, 1, 28, 28), x)
    network = lasagne.DropoutLayer(network, drop_input)
    for _ in range(depth):
        network = lasagne.DropoutLayer(lasagne.DenseLayer(network, width), drop_hidden)
    return lasagne.DenseLayer(network, 10, nonlinearity=lasagne.softmax)


def build_cnn(x: Any) -> lasagne.Layer:
    """Two convolutions with pooling, and a hidden layer with dropout on both sides."""
    network: lasagne.Layer = lasagne.InputLayer((None, 1, 28, 28), x)
    for _ in range(2):
        network = lasagne.Pool2DLayer(lasagne.Conv2DLayer(network, 32, 5), 2)
    network = lasagne.DenseLayer(lasagne.DropoutLayer(network), 256)
    return lasagne.DenseLayer(lasagne.DropoutLayer(network), 10, nonlinearity=lasagne.softmax)


def build_network(model: str, x: Any) -> lasagne.Layer:
    """Build one of `MODELS`; raise ValueError if it is none."""
    if model == "mlp":
        return build_mlp(x)
    if model == "cnn":
        return build_cnn(x)
    if found := re.fullmatch(r"custom_mlp:(\d+),(\d+),(0?\.\d+|0),(0?\.\d+|0)", model):
        depth, width, *rates = found.groups()
        return build_mlp(x, int(depth), int(width), *map(float, rates))
    raise ValueError(f"found model {model}, expected {MODELS}")


class Functions:
    """The functions of training and of validation."""

    def __init__(self, model: str, held: tuple[Any, Any] | None = None) -> None:
        x, y = pt.tensor4("inputs", dtype="float32"), pt.ivector("targets")
        network = build_network(model, x)
        loss = lasagne.categorical_crossentropy(lasagne.get_output(network), y).mean()
        self.params = lasagne.get_all_params(network)
        gradients, steps, self.gradient = updates.nesterov_momentum(
            loss, self.params, learning_rate=0.01, momentum=0.9
        )
        gradients = [*gradients, *lasagne.get_state_updates(network)]
        given: dict[str, Any] = {}
        if held is not None:
            given = {"givens": list(zip((x, y), held, strict=True)), "sliceable_shareds": held}
        inputs = [] if given else [x, y]
        self.compute = synk.function(inputs, loss, updates=gradients, **given)
        self.update = synk.function([], updates=steps)
        guess = lasagne.get_output(network, deterministic=True)
        hit = pt.mean(pt.eq(pt.argmax(guess, axis=1), y), dtype="float32")
        cost = lasagne.categorical_crossentropy(guess, y).mean()
        self.validate = synk.function([x, y], [cost, hit])

    def step(self, *data: Any, **rows: Any) -> float:
        """Train on some rows; return their mean loss."""
        loss = self.compute(*data, **rows)
        synk.all_reduce(self.gradient)  # to the mean over all rows
        self.update()
        return float(loss)


def minibatches(rng: np.random.Generator, rows: int, batch: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of whole minibatches of an epoch."""
    order = rng.permutation(rows)
    for first in range(0, rows - batch + 1, batch):
        yield order[first : first + batch]


def train(
    model: str, data: Any, batch: int, epochs: int, scattered: bool = False
) -> tuple[list[float], list[Any]]:
    """Train, and print as the demo does; return the loss of each minibatch, and the parameters.

    `data` is that of `tandem.datasets.load`; the last sixth of its first part is for validation.
    """
    (pictures, classes), (x_test, y_test) = data
    cut = len(classes) * 5 // 6
    parts = [(pictures[:cut], classes[:cut]), (pictures[cut:], classes[cut:]), (x_test, y_test)]
    arrays = [(_images(x), y.astype(np.int32)) for x, y in parts]
    held = None
    if scattered:
        held = tuple(pytensor.shared(a[:1], name="held") for a in arrays[0])
    functions = Functions(model, held)
    synk.distribute()
    training, validation, test = (functions.validate.build_inputs(*pair) for pair in arrays)
    rows = cut
    if held is not None:
        synk.scatter(list(held), list(arrays[0]))
        workers = synk.get_lengths(held[1])
        rows, batch = min(workers), batch // len(workers)
    rng = np.random.default_rng(1)
    losses: list[float] = []
    for epoch in range(epochs):
        begun, first = time.monotonic(), len(losses)
        for chosen in minibatches(rng, rows, batch):
            if held is None:
                losses.append(functions.step(*training, batch=chosen))
            else:
                losses.append(functions.step(batch_s=chosen))
        loss, hits = functions.validate(*validation, num_slices=4)
        print(f"epoch {epoch + 1} of {epochs} took {time.monotonic() - begun:.3f} s")
        print(f"  training loss {np.mean(losses[first:]):.6f}")
        print(f"  validation loss {loss:.6f}, accuracy {hits:.2%}", flush=True)
    loss, hits = functions.validate(*test, num_slices=4)
    print(f"test loss {loss:.6f}, accuracy {hits:.2%}")
    return losses, functions.params


def _images(pictures: np.ndarray) -> np.ndarray:
    return (pictures / np.float32(256))[:, np.newaxis]


def main(arguments: list[str] | None = None) -> int:
    """Train by the command line's arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="mlp", help=MODELS)
    parser.add_argument("--batch", type=count, default=500, help="pictures of all workers together")
    parser.add_argument("--epochs", type=count, default=10)
    parser.add_argument("--data", choices=["mnist", "fashion_mnist"], default="mnist")
    parser.add_argument("--source", help="folder of the data (default: it is looked for)")
    parser.add_argument("--workers", type=count, default=2, help="this process and others")
    parser.add_argument("--scattered", action="store_true", help="each worker has its part")
    chosen = parser.parse_args(arguments)
    try:
        build_network(chosen.model, pt.tensor4(dtype="float32"))
    except ValueError as error:
        parser.error(str(error))
    data = datasets.load(chosen.data, chosen.source)
    most = len(data[0][1]) * 5 // 6
    if not max(1, chosen.workers) <= chosen.batch <= most:
        parser.error(f"--batch: found {chosen.batch}, expected {chosen.workers} to {most} pictures")
    synk.fork(chosen.workers, use_gpu=False, threads=1)
    try:
        train(chosen.model, data, chosen.batch, chosen.epochs, chosen.scattered)
    finally:
        synk.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
