"""How much memory does a trainer take, and does it grow?

    python -m benchmarks.memory

Peaks are of the proportional set size (shared pages count in part), sampled every 20 ms while a
separate process makes steps: ours, with slots and parameters in shared memory, and plain PyTorch.
Prints JSON lines, then a table.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.loader import resident
from benchmarks.measure import Figure, Found, run
from examples.resident_step import DEMO, ON_CPU, Sizes

# torch is imported in the processes that are measured.

STEADY_STEPS = 200
SAMPLE_SECONDS = 0.02
WARM_STEPS = 5


def our_steps(sizes: Sizes, steps: int, report: Connection) -> None:
    """Make a trainer's steps."""
    from benchmarks.host_model import host_model, noise_slot, train_step
    from tandem.backend import keep_freed_memory, set_threads

    keep_freed_memory()
    set_threads(multiprocessing.cpu_count())
    model, slot = host_model(sizes), noise_slot(sizes)
    make_steps(lambda: train_step(model, slot), steps, report)


def plain_steps(sizes: Sizes, steps: int, report: Connection) -> None:
    """Make steps in plain PyTorch."""
    from benchmarks.plain_alexnet import plain_step

    make_steps(
        plain_step(sizes.network(), sizes.batch, "cpu", "module", tuned=False), steps, report
    )


def make_steps(step: Callable[[], Any], steps: int, report: Connection) -> None:
    """Make steps; send a message when warm, and when done."""
    for number in range(steps):
        if number == WARM_STEPS:
            report.send("warm")
        step()
    report.send("done")
    report.recv()


def watch(target: Callable[..., None], sizes: Any, steps: int) -> tuple[float, float]:
    """Return the megabytes of a process that makes steps: its peak, and its growth once warm.

    `target` is called with `sizes`, `steps` and a connection, see `make_steps`.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(sizes, steps, there), daemon=True)
    process.start()
    there.close()
    peak, warm, size = 0.0, None, 0.0
    while True:
        size = resident(process.pid or 0)
        peak = max(peak, size)
        if here.poll(SAMPLE_SECONDS):
            if here.recv() == "done":
                break
            warm = resident(process.pid or 0)
    size = resident(process.pid or 0)
    here.send("end")
    process.join()
    return max(peak, size), size - (size if warm is None else warm)


def answer(
    rounds: int, sizes: Sizes = ON_CPU, small: Sizes = DEMO, steady: int = STEADY_STEPS
) -> Iterator[Found]:
    """Compare peaks at full size; measure growth at the demo's size."""
    question = f"memory of a trainer, batch {sizes.batch}, {sizes.crop}"
    ours, plain = (watch(target, sizes, WARM_STEPS)[0] for target in (our_steps, plain_steps))
    yield Figure(question, f"peak {ours:.0f} MB over plain PyTorch's", ours / plain, "x", 1.3)
    _, grown = watch(our_steps, small, WARM_STEPS + steady)
    yield Figure(f"memory of a trainer, {small.crop}", f"growth in {steady} steps", grown, "MB", 5)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=1))
