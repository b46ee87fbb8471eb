"""A residual network over ranks, placed as neon would: python -m tests.support.placed_residual

The convolution is data-parallel; two residual blocks use one weight that is divided by its columns;
the last layer is at the last rank alone. Rank 0 prints a JSON line: the loss of each step.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.backend import device_mode
from tandem.distributed import Group, gloo
from tandem.distributed.channel import GroupChannel
from tandem.layers import convolution, relu
from tandem.placement import Placement, Replicate, Shard, Single, partition, place

ROWS, FILTERS, SIDE, OUTPUTS = 12, 4, 4, 3
UNITS = FILTERS * SIDE * SIDE
STEPS, RATE = 20, 0.05
NAMES = "filters", "reused", "last"


def network() -> tuple[list[Any], Any, Any]:
    """Return the parameters (filters, the reused weight, the last), the images and the loss."""
    rng = np.random.default_rng(1)  # the same values at every rank
    pixels, targets = rng.normal(size=(ROWS, 3, SIDE, SIDE)), rng.normal(size=(ROWS, OUTPUTS))
    shapes = (FILTERS, 3, 3, 3), (UNITS, UNITS), (UNITS, OUTPUTS)
    params: list[Any] = [
        pytensor.shared(rng.normal(size=s) / np.sqrt(fan_in), name=name, shape=s)
        for name, s, fan_in in zip(NAMES, shapes, (27, UNITS, UNITS), strict=True)
    ]
    filters, reused, last = params
    images = pytensor.shared(pixels, name="images", shape=pixels.shape)
    x = relu(convolution(images, filters, pad=1)).reshape((ROWS, UNITS))
    for _ in range(2):
        x = x + pt.tanh(x @ reused) / 2
    loss = ((x @ last - pt.constant(targets)) ** 2).mean()
    return params, images, loss


def stepped(params: Sequence[Any], loss: Any, factors: Sequence[float] = (1, 1, 1)) -> list[Any]:
    """Return the parameters after a step; a wrong gradient has a factor other than 1."""
    gradients: Any = pt.grad(loss, list(params))
    return [p - RATE * f * g for p, f, g in zip(params, factors, gradients, strict=True)]


def train(group: Group) -> list[float]:
    """Train on this rank, together with the others; return the loss of each step."""
    params, images, loss = network()
    new = stepped(params, loss)
    placements: list[Placement] = [Replicate(), Shard(1), Single(group.size - 1)]
    loss = place(loss, Replicate())
    part = partition(
        [loss, *new],
        given={images: Shard(0), **dict(zip(params, placements, strict=True))},
        wanted=dict(zip(new, placements, strict=True)),
        ranks=group.size,
        rank=group.rank,
    )
    own: dict[Any, Any] = {}
    kept: dict[Any, Any] = {}
    for variable in (images, *params):
        if variable in part.shared:
            index, shape = part.shared[variable]
            value = variable.get_value()[index]
            kept[variable] = pytensor.shared(value, name=variable.name, shape=shape)
            own[part.inputs[variable]] = kept[variable]
    updates = [(kept[p], v) for p, v in zip(params, part.outputs[1:], strict=True) if v is not None]
    step = pytensor.function(
        [],
        [v for v in (part.outputs[0], part.token) if v is not None],
        updates=updates,
        givens=own,
        mode=device_mode("cpu", channel=GroupChannel(group)),
    )
    return [float(step()[0]) for _ in range(STEPS)]


def main() -> None:
    group = gloo.join()
    losses = train(group)
    if group.rank == 0:
        print(json.dumps(losses), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
