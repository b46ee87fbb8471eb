"""Where does the time of a training step go, by kind of Op, relative to the machine's rate?

    python -m benchmarks.profile

Each line of the step's program is timed in several steps after warm-up; the median counts.
Operations are those of the plain sums, a multiplication and an addition being two: an FFT
needs fewer and may exceed the machine's rate, which is that of a large matrix product.
Prints JSON lines, then a table.
"""

import functools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.math import Dot

from benchmarks.measure import Part, measure, run
from examples.resident_step import ON_CPU, ResidentStep, Sizes
from tandem.backend import device_mode, keep_freed_memory, set_threads
from tandem.ops import (
    LRN,
    AdamStep,
    AveragePool2d,
    AveragePool2dGrad,
    BatchNorm,
    BatchNormGrad,
    BatchNormInference,
    Conv2d,
    Conv2dInputGrad,
    Conv2dWeightGrad,
    CropMirror,
    Dropout,
    DropoutMask,
    LRNGrad,
    MaxPool2d,
    MaxPool2dGrad,
    MomentumStep,
    NormRelu,
    NormReluGrad,
    Relu,
    ReluGrad,
)

BATCH_NORMS = (BatchNorm, BatchNormGrad, BatchNormInference, NormRelu, NormReluGrad)
KINDS: dict[str, tuple[type, ...]] = {
    "convolutions, forward": (Conv2d,),
    "convolutions, gradient of the filters": (Conv2dWeightGrad,),
    "convolutions, gradient of the images": (Conv2dInputGrad,),
    "fully connected layers": (Dot,),
    "normalisation": (LRN, LRNGrad, *BATCH_NORMS),
    "pooling": (MaxPool2d, MaxPool2dGrad, AveragePool2d, AveragePool2dGrad),
    "ReLU": (Relu, ReluGrad),
    "update": (MomentumStep, AdamStep),
    "crops": (CropMirror,),
    "dropout masks": (DropoutMask, Dropout),
}
OTHER = "other"
_CALL = re.compile(r"= (\w+)\(")


def kind_of(node: Apply) -> str:
    """Return the kind of a node."""
    return next((kind for kind, ops in KINDS.items() if isinstance(node.op, ops)), OTHER)


def operations(node: Apply) -> int:
    """Count the floating-point operations of a convolution, its gradients, or a product."""
    shapes = [variable.type.shape for variable in (*node.inputs, *node.outputs)]
    if isinstance(node.op, Dot):
        (rows, inner), (_, columns), _ = shapes
        return 2 * rows * inner * columns
    if not isinstance(node.op, Conv2d | Conv2dInputGrad | Conv2dWeightGrad):
        return 0
    filters = shapes[1]
    results = shapes[3] if isinstance(node.op, Conv2d) else shapes[2]
    return 2 * int(np.prod(results)) * int(np.prod(filters[1:]))


def timed_lines(step: ResidentStep) -> dict[Apply, list[float]]:
    """Time each line of the step's program from now on; return the lists of seconds."""
    found: dict[Apply, list[float]] = {}
    for function in step.functions:
        program: Any = function.vm
        program = program.program
        lines, names = program.source.splitlines(), program.run.__globals__
        for number, node in program.nodes.items():
            match = _CALL.search(lines[number - 1])
            assert match is not None
            found[node] = []
            names[match[1]] = _timed(names[match[1]], found[node])
    return found


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(call, updated=())
    def timed(*operands: Any) -> Any:
        begun = time.perf_counter()
        result = call(*operands)
        seconds.append(time.perf_counter() - begun)
        return result

    return timed


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
    step = ResidentStep(device_mode("cpu"), sizes)
    lines = timed_lines(step)
    (whole,) = measure({"step": step.run}, rounds)
    seconds: dict[str, float] = defaultdict(float)
    counted: dict[str, int] = defaultdict(int)
    for node, times in lines.items():
        seconds[kind_of(node)] += statistics.median(times[1:])
        counted[kind_of(node)] += operations(node)
    seconds[OTHER] += whole.median - sum(seconds.values())
    question = f"where a training step's time goes, batch {sizes.batch}, {sizes.crop}"
    for kind in sorted(seconds, key=lambda kind: -seconds[kind]):
        yield Part(question, kind, seconds[kind], whole.median, counted[kind], rate)
    yield Part(question, "all", whole.median, whole.median, sum(counted.values()), rate)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=9))
