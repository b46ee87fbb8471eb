"""Where does the time of a training step go, by kind of Op, relative to the machine's rate?

    python -m benchmarks.profile

Each line of the step's program is timed in several steps after warm-up; the median counts.
Operations are those of the plain sums, a multiplication and an addition being two: Winograd's
convolutions take fewer and may exceed the machine's rate, that of a large matrix product.
Prints JSON lines, then a table.
"""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pytensor.graph.basic import Apply

from benchmarks.measure import Part, measure, run
from examples.resident_step import ON_CPU, ResidentStep, Sizes
from tandem.backend import device_mode, keep_freed_memory, set_threads
from tandem.ops.work import work_of

KINDS = {
    # the first words of a kind of work, and what the table calls it
    "convolution weight": "convolutions, gradient of the filters",
    "convolution input": "convolutions, gradient of the images",
    "convolution": "convolutions, forward",
    "product": "fully connected layers",
    "lrn": "normalisation",
    "norm": "normalisation",
    "pool": "pooling",
    "relu": "ReLU",
    "update": "update",
    "crop": "crops",
    "dropout": "dropout masks",
}
OTHER = "other"
PRODUCTS = ("convolution", "product")  # kinds whose operations are counted


def kind_of(node: Apply) -> str:
    """Return the kind of a node, as the table calls it."""
    kind = work_of(node).kind
    return next((name for start, name in KINDS.items() if kind.startswith(start)), OTHER)


def operations(node: Apply) -> int:
    """Count the floating-point operations of a convolution, its gradients, or a product."""
    work = work_of(node)
    return work.flops if work.kind.startswith(PRODUCTS) else 0


class Clock:
    """Observes functions, see `device_mode`: the seconds of each call, by node."""

    def __init__(self) -> None:
        self.seconds: dict[Apply, list[list[float]]] = {}

    def __call__(self, node: Apply, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call that is made for a node."""
        seconds: list[float] = []
        self.seconds.setdefault(node, []).append(seconds)

        @functools.wraps(call, updated=())
        def timed(*operands: Any) -> Any:
            begun = time.perf_counter()
            result = call(*operands)
            seconds.append(time.perf_counter() - begun)
            return result

        return timed

    def medians(self) -> dict[Apply, float]:
        """Return the median seconds of each node; the first time of each call does not count."""
        return {
            node: sum(statistics.median(seconds[1:]) for seconds in calls)
            for node, calls in self.seconds.items()
        }


def machine_rate(rounds: int, side: int = 2048) -> float:
    """Return the operations per second of a large matrix product; the best round."""
    x, y = torch.randn(2, side, side)
    (product,) = measure({"product": lambda: x @ y}, rounds, repeats=3)
    return 2 * side**3 / min(product.seconds)


def answer(rounds: int, sizes: Sizes = ON_CPU, side: int = 2048) -> Iterator[Part]:
    """Yield the kinds, slowest first, and their total."""
    keep_freed_memory()
    set_threads(torch.get_num_threads())
    rate = machine_rate(rounds, side)
    clock = Clock()
    step = ResidentStep(device_mode("cpu", observe=clock), sizes)
    (whole,) = measure({"step": step.run}, rounds)
    seconds: dict[str, float] = defaultdict(float)
    counted: dict[str, int] = defaultdict(int)
    for node, median in clock.medians().items():
        seconds[kind_of(node)] += median
        counted[kind_of(node)] += operations(node)
    seconds[OTHER] += whole.median - sum(seconds.values())
    question = f"where a training step's time goes, batch {sizes.batch}, {sizes.crop}"
    for kind in sorted(seconds, key=lambda kind: -seconds[kind]):
        yield Part(question, kind, seconds[kind], whole.median, counted[kind], rate)
    yield Part(question, "all", whole.median, whole.median, sum(counted.values()), rate)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=9))
