"""How fast are programs of small arrays and loops, and against whom?

    python -m benchmarks.programs

Each program is computed by `device_mode("cpu", regions=True)` and by PyTensor's own Numba and C
modes, in one thread, as a sampler calls it: with `trust_input`. The peer is the faster of the two.
Numba's mode computes with its approximate mathematics (``numba__fastmath``), as PyTensor has it;
ours does not. At the end are training steps of one recurrent layer of 128 units over 100 steps,
against PyTorch's layer.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import Comparison, compare, measure, run

SECONDS = 0.02  # of a contender in a round
TARGET = 1 / 1.5  # of each; of all together 1.5


@dataclass(frozen=True)
class Program:
    """A graph, and values for its inputs."""

    name: str
    inputs: list[Any]
    outputs: Any
    values: list[np.ndarray]


def programs(seed: int = 0) -> Iterator[Program]:
    """State the programs; symbols are new in each."""
    import pytensor
    import pytensor.tensor as pt

    rng = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape))

    x, y, matrix, weights = pt.dvector("x"), pt.dvector("y"), pt.dmatrix("m"), pt.dmatrix("w")
    yield Program("sum of vectors, 10", [x, y], x + y, [some(10), some(10)])
    chain = pt.exp(-(x**2)) * pt.sin(y) + pt.tanh(x * y)
    for length in (10, 1000, 1_000_000):
        values = [some(length), some(length)]
        yield Program(f"elementwise chain, {length:,}", [x, y], chain, values)
    for length in (100, 1_000_000):
        yield Program(f"logsumexp, {length:,}", [x], pt.logsumexp(x), [some(length)])

    coefficients, scale = pt.dvector("coefficients"), pt.dscalar("scale")
    rows, targets = pt.as_tensor(some(1000, 20)), pt.as_tensor(some(1000))
    residuals = (targets - rows @ coefficients) / pt.exp(scale)
    density = (-0.5 * residuals**2 - scale).sum() - 0.5 * (coefficients**2).sum()
    outputs = [density, *pytensor.grad(density, [coefficients, scale])]
    values = [some(20), np.array(0.1)]
    yield Program("linear regression 1000 x 20", [coefficients, scale], outputs, values)

    mean, deviation, counties = pt.dscalar("mean"), pt.dscalar("deviation"), pt.dvector("counties")
    county, floor = rng.integers(0, 85, 919), pt.as_tensor(some(919))
    levels = (mean + counties * pt.exp(deviation))[county] + floor * mean
    density = -0.5 * ((pt.as_tensor(some(919)) - levels) ** 2).sum()
    density -= 0.5 * ((counties**2).sum() + deviation**2 + mean**2)
    inputs = [mean, counties, deviation]
    outputs = [density, *pytensor.grad(density, inputs)]
    values = [np.array(0.1), some(85), np.array(0.2)]
    yield Program("hierarchical regression (radon)", inputs, outputs, values)

    for length in (20, 300):
        covariance = matrix @ matrix.T + length * pt.eye(length)
        factor = pt.linalg.cholesky(covariance)
        solved = pt.linalg.solve_triangular(factor, x, lower=True)
        values = [some(length, length), some(length)]
        outputs = [pt.log(pt.diag(factor)).sum(), solved]
        yield Program(f"Gaussian process, {length}", [matrix, x], outputs, values)
    yield Program("product 500 x 500", [matrix], matrix @ matrix, [some(500, 500)])

    chosen = pt.special.softmax(matrix @ weights, axis=1)[:, 0]
    slope = pytensor.grad(-pt.log(chosen).mean(), weights)
    for length in (50, 5000):
        values = [some(length, 50), some(50, 10)]
        yield Program(f"softmax regression, {length:,} rows", [matrix, weights], slope, values)

    states = pytensor.scan(
        lambda step, state, weights: pt.tanh(step + state @ weights),
        sequences=[matrix],
        outputs_info=[pt.zeros(32)],
        non_sequences=[weights],
        return_updates=False,
    )
    values = [some(100, 32), 0.1 * some(32, 32)]
    yield Program("RNN, 100 steps of 32 units", [matrix, weights], states[-1], values)
    slope = pytensor.grad(states[-1].sum(), weights)
    yield Program("gradient of the RNN", [matrix, weights], slope, values)


def compare_programs(rounds: int, least: float = SECONDS) -> Iterator[Comparison]:
    """Compare each program with PyTensor's faster mode, which `least` seconds of a round go to."""
    import pytensor

    from tandem.backend import device_mode, set_threads

    set_threads(1)
    modes = {"regions": device_mode("cpu", regions=True), "Numba": "NUMBA", "C": "CVM"}
    ratios = []
    for program in programs():
        steps = {}
        for name, mode in modes.items():
            function = pytensor.function(
                program.inputs, program.outputs, mode=mode, trust_input=True
            )
            steps[name] = partial(function, *program.values)
        (first,) = measure({"regions": steps["regions"]}, 1, warmups=2)
        repeats = max(1, int(least / first.median))
        ours, *peers = measure(steps, rounds, repeats)
        best = min(peers, key=lambda peer: peer.median)
        yield compare(program.name, ours, best, target=TARGET)
        ratios.append(best.median / ours.median)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    sys.stderr.write(f"geometric mean of {len(ratios)} ratios: {mean:.2f}\n")


def compare_recurrent(rounds: int, least: float = SECONDS) -> Iterator[Comparison]:
    """Compare steps of gradient descent on the mean square of all states."""
    import pytensor
    import pytensor.tensor as pt
    import torch

    from tandem.backend import device_mode, device_shared
    from tandem.ops import gru, lstm

    steps, units, rate = 100, 128, np.float32(0.01)
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    for kind, batch in itertools.product(("LSTM", "GRU"), (16, 64)):
        wide = (4 if kind == "LSTM" else 3) * units
        shapes = {"kernel": (units, wide), "weight": (units, wide), "bias": (2, wide)}
        weights = {name: device_shared(some(*shape), name) for name, shape in shapes.items()}
        x, zeros = pt.tensor3(dtype="float32"), pt.zeros((batch, units), dtype="float32")
        first, second = weights["bias"][0], weights["bias"][1]
        bias = first + second if kind == "LSTM" else first
        rows = x.reshape((steps * batch, units)) @ weights["kernel"] + bias
        z = rows.reshape((steps, batch, wide))
        if kind == "LSTM":
            h, _ = lstm(z, weights["weight"], zeros, zeros)
        else:
            h = gru(z, weights["weight"], second, zeros)
        slopes = pytensor.grad((h * h).mean(dtype="float32"), [*weights.values()])
        updates = [(w, w - rate * g) for w, g in zip(weights.values(), slopes, strict=True)]
        function = pytensor.function(
            [x], [], updates=updates, mode=device_mode("cpu"), trust_input=True
        )

        layer = getattr(torch.nn, kind)(units, units)
        optimizer = torch.optim.SGD(layer.parameters(), float(rate))
        data = some(steps, batch, units)

        def theirs(layer: Any = layer, optimizer: Any = optimizer, data: Any = data) -> None:
            optimizer.zero_grad()
            (layer(torch.from_numpy(data))[0] ** 2).mean().backward()
            optimizer.step()

        contenders = {"ours": partial(function, data), f"torch.nn.{kind}": theirs}
        repeats = max(1, int(least / 0.02))
        ours, peer = measure(contenders, rounds, repeats, warmups=2)
        yield compare(f"training step of {kind}, batch {batch}", ours, peer, target=0.9)


def compare_all(rounds: int) -> Iterator[Comparison]:
    """Compare programs, then recurrent layers."""
    yield from compare_programs(rounds)
    yield from compare_recurrent(rounds)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, compare_all, rounds=7))
