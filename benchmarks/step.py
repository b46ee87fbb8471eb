"""How fast is a training step, and inference, against the same network in plain PyTorch?

    python -m benchmarks.step                          batch 64 of 227 pixels, and the demo's size
    python -m benchmarks.step --only training          or inference, small, batches

Both sides have their data in memory and as many threads as cores, and each contender is a process
of its own. Ours crops, mirrors and converts stored 8-bit pictures; plain PyTorch gets converted
images. Prints JSON lines, then a table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.measure import Comparison, Step, compare, measure, run
from benchmarks.plain_alexnet import Norm, plain_inference, plain_step
from benchmarks.plain_step import variants
from benchmarks.team import measure_apart
from examples.resident_step import DEMO, ON_CPU, PAPER, ResidentStep, Sizes
from tandem.backend import device_mode, keep_freed_memory, set_threads
from tandem.compilers import cpp_compiler

# Targets by vector instructions, against plain PyTorch in the order of its variants.
TRAINING_TARGETS = {"AVX512": (1.40, 1.25, 1.45), "AVX2": (1.30, 1.25, 1.40)}
INFERENCE_TARGETS = {"AVX512": (1.70, 1.30, 1.15), "AVX2": (1.50, 1.35, 1.20)}
SMALL_TARGETS = (1.30, 1.20, 1.30)
BATCHES = (16, 32, 64, 128, 256)
OURS = "ours"

Contenders = dict[str, Callable[[], Step]]
"""What makes the step of each, in its process."""


def plain_steps(sizes: Sizes) -> Contenders:
    """Plain PyTorch's step in the usual variants for a CPU."""
    return variants(lambda *how: partial(_plain_step, sizes, *how), ", fused SGD")


def plain_inferences(sizes: Sizes) -> Contenders:
    """Plain PyTorch's inference in the same variants."""
    return variants(lambda *how: partial(_plain_inference, sizes, *how))


def our_steps(sizes: Sizes) -> Contenders:
    """Our step, as with `compile: auto` on a CPU, and compiled."""
    found: Contenders = {OURS: partial(_our_step, sizes, False)}
    if cpp_compiler():
        found["ours, compiled"] = partial(_our_step, sizes, True)
    return found


def _plain_step(sizes: Sizes, tuned: bool, compiled: bool) -> Step:
    norm: Norm = "slices" if compiled else "module"
    mode = "default" if compiled else None
    return plain_step(sizes.network(), sizes.batch, "cpu", norm, compile_mode=mode, tuned=tuned)


def _plain_inference(sizes: Sizes, tuned: bool, compiled: bool) -> Step:
    norm: Norm = "slices" if compiled else "module"
    return plain_inference(sizes.network(), sizes.batch, norm, compiled, tuned)


def _our_step(sizes: Sizes, is_compiled: bool) -> Step:
    return ResidentStep(device_mode("cpu", compile=is_compiled), sizes).run


def _our_inference(sizes: Sizes) -> Step:
    mode = device_mode("cpu")
    return ResidentStep(mode, sizes).inference(mode)


def against_plain(
    question: str, ours: Contenders, plain: Contenders, rounds: int, targets: Sequence[float]
) -> Iterator[Comparison]:
    """Compare ours with each variant, which has its target; without a compiler the last is not."""
    found = {m.name: m for m in measure_apart(ours | plain, torch.get_num_threads(), rounds)}
    for name, target in zip(plain, targets, strict=False):
        yield compare(question, found[OURS], found[name], "speed", target)
    for name in ours:
        if name != OURS:
            yield compare(question, found[OURS], found[name], "speed")


def training(rounds: int, sizes: Sizes = ON_CPU) -> Iterator[Comparison]:
    """Compare a step of batch 64 at the paper's size."""
    ours, plain = our_steps(sizes), plain_steps(sizes)
    targets = TRAINING_TARGETS[instructions()]
    yield from against_plain(_named("training step", sizes), ours, plain, rounds, targets)


def inference(rounds: int, sizes: Sizes = ON_CPU) -> Iterator[Comparison]:
    """Compare inference of batch 64 at the paper's size."""
    ours: Contenders = {OURS: partial(_our_inference, sizes)}
    plain = plain_inferences(sizes)
    targets = INFERENCE_TARGETS[instructions()]
    yield from against_plain(_named("inference", sizes), ours, plain, rounds, targets)


def small(rounds: int, sizes: Sizes = DEMO) -> Iterator[Comparison]:
    """Compare a step at the demo's size, where fixed costs matter."""
    ours: Contenders = {OURS: partial(_our_step, sizes, False)}
    plain = plain_steps(sizes)
    question = _named("training step", sizes)
    yield from against_plain(question, ours, plain, 2 * rounds, SMALL_TARGETS)


def batches(
    rounds: int, sizes: Sizes = PAPER, counts: Sequence[int] = BATCHES
) -> Iterator[Comparison]:
    """Compare the time per image at each batch size with that at the largest."""
    steps = {
        f"batch {count}": ResidentStep(device_mode("cpu"), replace(sizes, batch=count)).run
        for count in counts
    }
    per_image = [
        measured.scaled(1 / count)
        for count, measured in zip(counts, measure(steps, max(2, rounds // 3)), strict=True)
    ]
    question = f"an image's time in a training step, by the size of the batch, {sizes.crop}"
    for measured in per_image:
        yield compare(question, measured, per_image[-1], "time")


def instructions() -> str:
    """Return "AVX512", or "AVX2" for all other vector instructions."""
    return "AVX512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "AVX2"


def _named(what: str, sizes: Sizes) -> str:
    return f"{what}, batch {sizes.batch}, {sizes.crop}"


PARTS = {"training": training, "inference": inference, "small": small, "batches": batches}


def answer(rounds: int, only: str | None = None) -> Iterator[Comparison]:
    """Answer every part of the question, or one."""
    keep_freed_memory()
    set_threads(torch.get_num_threads())
    for name, part in PARTS.items():
        if only in (None, name):
            yield from part(rounds)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=9, only=[*PARTS]))
