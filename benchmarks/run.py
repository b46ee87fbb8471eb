"""What does it cost a trainer that its pictures come from files?

    python -m benchmarks.run

The same steps, of batch 64 and 227 pixels, with pictures that a loader process reads, crops and
mirrors meanwhile, and with one minibatch that lies in memory. Prints JSON lines, then a table.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.host_model import host_model, noise_slot, train_step
from benchmarks.loader import Epoch, loader_process
from benchmarks.loader import Sizes as LoaderSizes
from benchmarks.measure import Comparison, compare, measure, run
from benchmarks.pictures import write_batches
from benchmarks.resident import ON_CPU, Sizes
from tandem.device import keep_freed_memory, set_threads
from tandem.run.feed import Feed

TARGET = 0.97


def answer(
    rounds: int, sizes: Sizes = ON_CPU, pictures: int = 1024, repeats: int = 4
) -> Iterator[Comparison]:
    """Steps in turn, `repeats` at a time."""
    keep_freed_memory()
    set_threads(torch.get_num_threads())
    model, resident = host_model(sizes), noise_slot(sizes)
    wanted = LoaderSizes(sizes.batch, pictures, 0, sizes.stored, sizes.crop)
    with tempfile.TemporaryDirectory() as folder:
        epoch = Epoch(write_batches(Path(folder), pictures, sizes.stored), "files", wanted, True)
        with loader_process(epoch) as (_, loader):
            feed = Feed(itertools.cycle(epoch.requests), loader)
            steps = {
                "with its loader": lambda: train_step(model, epoch.slots.arrays[next(feed)]),
                "with data in memory": lambda: train_step(model, resident),
            }
            with_loader, in_memory = measure(steps, rounds, repeats)
    question = f"a trainer's steps, batch {sizes.batch}, {sizes.crop}"
    yield compare(question, with_loader, in_memory, "speed", TARGET)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=7))
