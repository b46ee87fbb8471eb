"""What does reading pictures from files cost a trainer?

    python -m benchmarks.run

The same steps, of batch 64 and 227 pixels, with pictures that a loader process reads, crops and
mirrors, with one minibatch in memory, and with pictures that the loader reads and the trainer
crops (`use_data_layer: true`). Prints JSON lines, then a table.
"""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.host_model import host_model, noise_slot, train_step
from benchmarks.loader import Epoch, loader_process
from benchmarks.loader import Sizes as LoaderSizes
from benchmarks.measure import Comparison, compare, measure, run
from benchmarks.pictures import write_batches
from examples.resident_step import ON_CPU, Sizes
from tandem.backend import keep_freed_memory, set_threads
from tandem.training.input_pipeline import InputPipeline

TARGET = 0.97


def answer(
    rounds: int, sizes: Sizes = ON_CPU, pictures: int = 1024, repeats: int = 4
) -> Iterator[Comparison]:
    """Time steps in turn, `repeats` at a time."""
    keep_freed_memory()
    set_threads(torch.get_num_threads())
    model, cropping, resident = host_model(sizes), host_model(sizes, True), noise_slot(sizes)
    wanted = LoaderSizes(sizes.batch, pictures, 0, sizes.stored, sizes.crop)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        data = write_batches(Path(name), pictures, sizes.stored)
        crops, whole = (Epoch(data, "files", wanted, crop_here) for crop_here in (True, False))
        cropped, stored = [
            InputPipeline(
                itertools.cycle(epoch.requests), stack.enter_context(loader_process(epoch))[1]
            )
            for epoch in (crops, whole)
        ]
        steps = {
            "with its loader": lambda: train_step(model, crops.slots.arrays[next(cropped)]),
            "with data in memory": lambda: train_step(model, resident),
            "cropping in the trainer": lambda: train_step(
                cropping, whole.slots.arrays[next(stored)]
            ),
        }
        with_loader, in_memory, in_trainer = measure(steps, rounds, repeats)
    question = f"a trainer's steps, batch {sizes.batch}, {sizes.crop}"
    yield compare(question, with_loader, in_memory, "speed", TARGET)
    yield compare(question, with_loader, in_trainer, "speed")


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=7))
