"""How fast is a training step, and inference, against the same network in plain PyTorch?

    python -m benchmarks.step                          batch 64 of 227 pixels, and the demo's size
    python -m benchmarks.step --only training          or inference, small, batches

Everything has its data in memory and two threads, or as many as there are cores. Ours begins with
stored pictures of 8 bits, which it crops, mirrors and converts; plain PyTorch begins with images
that are ready. Prints JSON lines, then a table.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.measure import Comparison, Step, compare, measure, run
from benchmarks.plain_alexnet import plain_inference, plain_step
from benchmarks.resident import PAPER, ResidentStep, Sizes
from tandem.device import cpp_compiler, device_mode, keep_freed_memory, set_threads

TRAINING = replace(PAPER, batch=64)
SMALL = Sizes(batch=64, crop=67, stored=76, classes=10, width=1.0)
BATCHES = (16, 32, 64, 128, 256)
OURS = "ours"


def plain_steps(sizes: Sizes) -> dict[str, Step]:
    """A step in plain PyTorch, in the ways in which users write it for a CPU."""
    net, batch = sizes.network(), sizes.batch
    found = {
        "PyTorch, eager": plain_step(net, batch, "cpu", "module", tuned=False),
        "PyTorch, channels-last, fused SGD": plain_step(net, batch, "cpu", "module"),
    }
    if cpp_compiler():
        name = "PyTorch, compiled, channels-last, fused SGD"
        found[name] = plain_step(net, batch, "cpu", "slices", compile_mode="default")
    return found


def plain_inferences(sizes: Sizes) -> dict[str, Step]:
    """The same of inference."""
    net, batch = sizes.network(), sizes.batch
    found = {
        "PyTorch, eager": plain_inference(net, batch, "module", tuned=False),
        "PyTorch, channels-last": plain_inference(net, batch, "module"),
    }
    if cpp_compiler():
        name = "PyTorch, compiled, channels-last"
        found[name] = plain_inference(net, batch, "slices", compile_mode="default")
    return found


def our_steps(sizes: Sizes) -> dict[str, Step]:
    """Our step, as `compile: auto` has it on a CPU, and compiled."""
    found = {OURS: ResidentStep(device_mode("cpu"), sizes).run}
    if cpp_compiler():
        found["ours, compiled"] = ResidentStep(device_mode("cpu", compile=True), sizes).run
    return found


def against_plain(
    question: str,
    ours: dict[str, Step],
    plain: dict[str, Step],
    rounds: int,
    eager_target: float,
    best_target: float | None,
) -> Iterator[Comparison]:
    """Compare ours with each way of writing it; all but eager have the same target."""
    found = {m.name: m for m in measure(ours | plain, rounds)}
    for name in plain:
        target = eager_target if name == "PyTorch, eager" else best_target
        yield compare(question, found[OURS], found[name], "speed", target)
    for name in ours:
        if name != OURS:
            yield compare(question, found[OURS], found[name], "speed")


def training(rounds: int) -> Iterator[Comparison]:
    """A step of batch 64 at the paper's size."""
    ours, plain = our_steps(TRAINING), plain_steps(TRAINING)
    yield from against_plain("training step, batch 64, 227", ours, plain, rounds, 1.25, 1.0)


def inference(rounds: int) -> Iterator[Comparison]:
    """Logits of a batch of 64 at the paper's size."""
    mode = device_mode("cpu")
    ours: dict[str, Step] = {OURS: ResidentStep(mode, TRAINING).inference(mode)}
    plain = plain_inferences(TRAINING)
    yield from against_plain("inference, batch 64, 227", ours, plain, rounds, 1.0, 1.0)


def small(rounds: int) -> Iterator[Comparison]:
    """A step at the demo's size, where fixed costs would show."""
    ours = {OURS: ResidentStep(device_mode("cpu"), SMALL).run}
    plain = plain_steps(SMALL)
    yield from against_plain("training step, batch 64, 67", ours, plain, 2 * rounds, 1.0, None)


def batches(rounds: int) -> Iterator[Comparison]:
    """How the time of an image grows with the batch: against that in a batch of 64."""
    steps = {
        f"batch {size}": ResidentStep(device_mode("cpu"), replace(PAPER, batch=size)).run
        for size in BATCHES
    }
    found = {m.name: m for m in measure(steps, max(2, rounds // 3))}
    base = found["batch 64"]
    for size in BATCHES:
        per_image = found[f"batch {size}"].scaled(64 / size)
        yield compare("an image's time by the size of the batch, 227", per_image, base, "time")


PARTS = {"training": training, "inference": inference, "small": small, "batches": batches}


def answer(rounds: int, only: str | None = None) -> Iterator[Comparison]:
    """Every part, or one."""
    keep_freed_memory()
    set_threads(torch.get_num_threads())
    for name, part in PARTS.items():
        if only in (None, name):
            yield from part(rounds)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print; return the exit status."""
    return run(__doc__, answer, rounds=9, arguments=arguments, parts=tuple(PARTS))


if __name__ == "__main__":
    sys.exit(main())
