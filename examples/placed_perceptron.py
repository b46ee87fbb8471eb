"""A perceptron over ranks: its first layer divided by columns, its second by rows.

mpirun -n 2 python -m examples.placed_perceptron
torchrun --nproc-per-node 2 -m examples.placed_perceptron

Every rank states the whole graph, gradients and updates included, and computes its part of it. The
outputs are added up over the ranks, and nothing else passes between them.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.backend import device_mode
from tandem.cli import count
from tandem.distributed import Group, gloo, local_groups, mpi
from tandem.distributed.channel import GroupChannel
from tandem.placement import Placement, Replicate, Shard, explain, partition, place

ROWS, INPUTS, HIDDEN, OUTPUTS = 64, 8, 32, 1
RATE = 0.1


def train(group: Group, steps: int) -> list[float]:
    """Train on this rank, together with the others; return the loss of each step."""
    rng = np.random.default_rng(1)  # the same values at every rank
    images = rng.normal(size=(ROWS, INPUTS))
    targets = np.sin(images.sum(axis=1, keepdims=True))
    values = [rng.normal(size=shape) / 4 for shape in ((INPUTS, HIDDEN), (HIDDEN, OUTPUTS))]

    weights: list[Any] = [pytensor.shared(value, shape=value.shape) for value in values]
    first, second = weights
    outputs = place(pt.tanh(pt.constant(images) @ first) @ second, Replicate())
    loss = ((outputs - targets) ** 2).mean()
    gradients: Any = pt.grad(loss, weights)
    stepped = [w - RATE * gradient for w, gradient in zip(weights, gradients, strict=True)]

    placements: list[Placement] = [Shard(1), Shard(0)]
    part = partition(
        [loss, *stepped],
        given=dict(zip(weights, placements, strict=True)),
        wanted=dict(
            zip(stepped, placements, strict=True)
        ),  # an update lies where its variable does
        ranks=group.size,
        rank=group.rank,
    )
    if group.rank == 0:
        print(explain(part, ranks=group.size))

    own: dict[Any, Any] = {}  # this rank's part of the weights
    for weight in weights:
        index, shape = part.shared[weight]
        own[part.inputs[weight]] = pytensor.shared(weight.get_value()[index], shape=shape)
    step = pytensor.function(
        [],
        [v for v in (part.outputs[0], part.token) if v is not None],  # others wait for the token
        updates=dict(zip(own.values(), part.outputs[1:], strict=True)),
        givens=own,
        mode=device_mode("cpu", channel=GroupChannel(group)),
    )
    return [float(step()[0]) for _ in range(steps)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the ranks that were started together, and train; rank 0 prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=count, default=200)
    steps = parser.parse_args(arguments).steps

    group: Group
    (group,) = local_groups(1)  # without a launcher it is one rank
    if mpi.is_started_by_mpi():
        group = mpi.join()
    elif gloo.is_started_by_torchrun():
        group = gloo.join()
    losses = train(group, steps)
    if group.rank == 0:
        print(f"loss {losses[0]:.4f}, after {len(losses)} steps {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
