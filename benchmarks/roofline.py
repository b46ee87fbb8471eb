"""The least time of AlexNet's training step at a device's rates.

A roofline: an operation takes at least as long as its products at the rate of products, and at
least as long as its bytes at the rate of memory. The floor of a step is the sum over its
operations, each fused with all elementwise work next to it, each operand read once and each result
written once. With the rates of a large product and a large copy no step of these operations is
faster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch

from alex_net import AlexNet
from benchmarks.measure import measure

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Rates:
    """The rates that a device reaches."""

    products: float  # floating-point operations per second; a multiplication and addition are two
    memory: float  # bytes read and written per second


@dataclass(frozen=True)
class Operation:
    """Floating-point operations, and bytes read and written, at the least."""

    name: str
    flops: int
    nbytes: int

    def seconds(self, rates: Rates) -> float:
        """Return the least time."""
        return max(self.flops / rates.products, self.nbytes / rates.memory)


def measure_rates(
    device: str,
    precision: str,
    synchronize: Callable[[], None],
    side: int = 8192,
    nbytes: int = 1 << 30,
) -> Rates:
    """Time a product of square matrices and a copy on the device.

    PyTorch's settings for the process decide between float32 and tf32.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x, y = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.randint(256, (nbytes,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    steps: dict[str, Any] = {"product": lambda: x @ y, "copy": lambda: target.copy_(source)}
    product, copy = measure(steps, rounds=5, repeats=10, synchronize=synchronize)
    return Rates(2 * side**3 / product.median, 2 * nbytes / copy.median)


def step_flops(net: AlexNet, batch: int) -> int:
    """Count floating-point operations of convolutions and products in a training step.

    A multiplication and an addition are two. The gradients of weights and inputs cost one forward
    pass each; the first layer has no gradient of its input.
    """
    return sum(operation.flops for operation in operations(net, batch, FLOAT32_BYTES))


def floor_seconds(net: AlexNet, batch: int, precision: str, rates: Rates) -> float:
    """Return the least time of a training step."""
    width = 2 if precision == "bfloat16" else FLOAT32_BYTES
    return sum(operation.seconds(rates) for operation in operations(net, batch, width))


def operations(net: AlexNet, batch: int, width: int) -> Iterator[Operation]:
    """Yield the operations of a training step; operands of products have `width` bytes."""
    x = batch * prod(net.shapes["input"])  # numbers between this layer and the next
    yield Operation("crop", 0, x + width * x)
    for layer in net.convolutions:
        y = batch * prod(net.shapes[layer.name])
        weights = prod(net.parameters[f"{layer.name}.weight"].type.shape)
        flops = 2 * weights * batch * prod(net.shapes[layer.name][1:])
        # The pictures need no gradient.
        some = 2 if layer is net.convolutions[0] else 3
        yield from islice(_products(layer.name, flops, (x, weights, y), width), some)
        x = y
        if layer.pool is not None:
            x = batch * prod(net.shapes[layer.pool])
            # Forward, a byte says where each maximum was; backward, its value is read as well.
            yield Operation(layer.pool, 0, width * (y + x) + x)
            yield Operation(f"{layer.pool}, gradient", 0, width * (2 * x + y) + x)
    for dense in net.fully_connected:
        y = batch * dense.units
        weights = prod(net.parameters[f"{dense.name}.weight"].type.shape)
        yield from _products(dense.name, 2 * batch * weights, (x, weights, y), width)
        x = y
    parameters = sum(prod(variable.type.shape) for variable in net.parameters.values())
    # Weights, momenta and gradients are read; weights and momenta are written, and the weights
    # once more in the products' format where that is shorter.
    copies = width if width < FLOAT32_BYTES else 0
    yield Operation("update", 0, (5 * FLOAT32_BYTES + copies) * parameters)


def _products(
    name: str, flops: int, sizes: tuple[int, int, int], width: int
) -> Iterator[Operation]:
    """Yield a layer's products, given the numbers in its input, weights and output."""
    x, weights, y = sizes
    yield Operation(name, flops, width * (x + weights + y))
    yield Operation(f"{name}, weights", flops, width * (x + y) + FLOAT32_BYTES * weights)
    yield Operation(f"{name}, input", flops, width * (x + weights + y))
