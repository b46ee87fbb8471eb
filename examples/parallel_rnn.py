"""A recurrent network by data-parallel functions: it learns to add two numbers of a sequence.

python -m examples.parallel_rnn                  two workers
python -m examples.parallel_rnn --workers 1      the same weights, up to rounding

The adding problem of Hochreiter and Schmidhuber 1997, "Long short-term memory": in each step of a
sequence comes a number from 0 to 1 and a mark, and the result is the sum of the two marked numbers.
The answer 1 has a mean squared error of 1/6. The network is that of Le, Jaitly and Hinton 2015, "A
simple way to initialize recurrent networks of rectified linear units" (arXiv 1504.00941).
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

import tandem.parallel as synk
from tandem.cli import count
from tandem.parallel.extensions import updates
from tandem.parallel.extensions.train import make_train_function

STEPS, UNITS, SEQUENCES, BATCH = 8, 24, 1024, 64
Weights = dict[str, Any]  # shared variables


def sequences(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw sequences, float64 (sequence, step, number and mark), and their sums (sequence,)."""
    numbers, marks = rng.random((SEQUENCES, STEPS)), np.zeros((SEQUENCES, STEPS))
    marked = rng.permuted(np.tile(np.arange(STEPS), (SEQUENCES, 1)), axis=1)[:, :2]
    np.put_along_axis(marks, marked, 1.0, axis=1)
    return np.stack([numbers, marks], axis=2), (numbers * marks).sum(axis=1)


def initial_weights(rng: np.random.Generator) -> Weights:
    """Make the weights; a hidden unit begins by keeping what it holds."""
    values = {
        "inputs": rng.normal(0, 0.3, (2, UNITS)),
        "hidden": np.eye(UNITS),
        "bias": np.zeros(UNITS),
        "output": rng.normal(0, UNITS**-0.5, UNITS),
    }
    return {name: synk.shared(value, name) for name, value in values.items()}


def predict(x: TensorVariable, weights: Weights) -> TensorVariable:
    """The network: ``h[t] = relu(x[t] W + h[t - 1] U + b)``, and the result from the last h."""

    def step(x: TensorVariable, h: TensorVariable) -> TensorVariable:
        return pt.maximum(x @ weights["inputs"] + h @ weights["hidden"] + weights["bias"], 0)

    zeros = pt.zeros((x.shape[0], UNITS), dtype=x.dtype)
    hidden = pytensor.scan(step, x.swapaxes(0, 1), outputs_info=zeros, return_updates=False)
    return hidden[-1] @ weights["output"]


def train(weights: Weights, epochs: int, rng: np.random.Generator) -> Iterator[float]:
    """Yield the squared error of each minibatch, which all workers share."""
    x, y = pt.dtensor3("x"), pt.dvector("y")
    error = pt.sqr(predict(x, weights) - y).mean()
    step = make_train_function(error, list(weights.values()), x, y, updates.adam, lr=0.005)
    synk.distribute()
    inputs, sums = map(synk.data, sequences(rng))
    for _ in range(epochs):
        for rows in rng.permutation(SEQUENCES).reshape(-1, BATCH):
            yield float(step(inputs, sums, batch=rows))


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the error of each epoch; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=count, default=2, help="this process and others")
    parser.add_argument("--epochs", type=count, default=20)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(1)
    synk.fork(options.workers, use_gpu=False, threads=1)
    try:
        errors = list(train(initial_weights(rng), options.epochs, rng))
    finally:
        synk.close()
    for number, mean in enumerate(np.reshape(errors, (options.epochs, -1)).mean(axis=1)):
        print(f"epoch {number + 1}: squared error {mean:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
