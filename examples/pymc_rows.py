"""A PyMC model whose rows are divided over processes.

python -m examples.pymc_rows                            a logistic regression, two workers
python -m examples.pymc_rows --rows 10000000 --draws 0  the time of a log-probability alone

Priors and sampler are PyMC's. The likelihood is an Op that has a data-parallel function compute the
sum over all rows, and its gradient, in one call. PyMC 6.0 takes the PyTensor of this project, and
needs Python 3.12.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.variable import TensorVariable

import tandem.parallel as synk
from tandem.backend import device_mode
from tandem.cli import count


class SumOverRows(Op):
    """The sum of a log-probability over rows, which all processes of a pool compute.

    Its inputs are the parameters, its outputs the sum and its gradient by each parameter, of which
    there is no second derivative.

    Parameters
    ----------
    log_probability : dtype (row,)
    rows : sequence of variable
        What it is computed from; their values are the Op's own.
    parameters : sequence of variable
    values : sequence of array (row, ...)
        Copied, once, to memory that all processes see.
    """

    def __init__(
        self,
        log_probability: TensorVariable,
        rows: Sequence[TensorVariable],
        parameters: Sequence[TensorVariable],
        values: Sequence[np.ndarray],
    ) -> None:
        total = log_probability.sum()
        gradients: Any = pytensor.grad(total, [*parameters])
        outputs = [total, *gradients]
        self._types = [output.type for output in outputs]
        self._sums = synk.function(
            [*rows], [(output, "sum") for output in outputs], bcast_inputs=[*parameters]
        )
        self._rows = [synk.data(value) for value in values]

    def make_node(self, *parameters: Any) -> Apply:
        given = [pt.as_tensor(parameter) for parameter in parameters]
        return Apply(self, given, [kind() for kind in self._types])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        for cell, value in zip(outputs, self._sums(*self._rows, *inputs), strict=True):
            cell[0] = value

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Any]
    ) -> list[Variable]:
        if not all(isinstance(each.type, DisconnectedType) for each in cotangents[1:]):
            raise NotImplementedError("the gradient has no derivative here")
        return [cotangents[0] * gradient for gradient in outputs[1:]]


def made_up(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs (row, column), answers 0 or 1, and the weights that gave them."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(rows, columns)), rng.normal(size=columns)
    return x, (rng.random(rows) < 1 / (1 + np.exp(-x @ weights))).astype(float), weights


def logistic(x: np.ndarray, y: np.ndarray) -> SumOverRows:
    """The likelihood of a logistic regression, of its weights."""
    inputs, answers, weights = pt.dmatrix("x"), pt.dvector("y"), pt.dvector("weights")
    before = inputs.dot(weights)
    return SumOverRows(answers * before - pt.softplus(before), [inputs, answers], [weights], [x, y])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=count, default=100_000)
    parser.add_argument("--columns", type=count, default=10)
    parser.add_argument("--workers", type=count, default=2, help="of one thread each")
    parser.add_argument("--draws", type=int, default=300, help="of each of two chains; 0: none")
    options = parser.parse_args(words)
    synk.fork(options.workers, use_gpu=False, threads=1)
    try:
        run(options)
    finally:
        synk.close()


def run(options: argparse.Namespace) -> None:
    """Time the log-probability, and sample the model, by the workers."""
    x, y, true = made_up(options.rows, options.columns)
    likelihood = logistic(x, y)
    times = []
    for _ in range(12):
        began = time.perf_counter()
        likelihood._sums(*likelihood._rows, np.zeros(options.columns))
        times.append(time.perf_counter() - began)
    print(f"log-probability and gradient: {1e3 * np.median(times[2:]):.2f} ms")
    if options.draws <= 0:
        return

    import pymc

    with pymc.Model():
        weights = pymc.Normal("weights", 0, 3, shape=options.columns)
        outputs: Any = likelihood(weights)
        pymc.Potential("likelihood", outputs[0])
        found = pymc.sample(
            options.draws,
            tune=options.draws,
            chains=2,
            cores=1,  # the workers have the others
            random_seed=1,
            progressbar=False,
            compile_kwargs={"mode": device_mode("cpu")},
        )
    drawn = np.asarray(found.posterior["weights"])
    mean, deviation = drawn.mean((0, 1)), drawn.std((0, 1))
    for n in range(options.columns):
        print(f"weight {n}: {mean[n]:7.4f} ± {deviation[n]:.4f}, made with {true[n]:7.4f}")


if __name__ == "__main__":
    main()
