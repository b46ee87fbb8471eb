"""Is `fit` of `tandem.keras` as fast as Keras's own and as PyTorch, in one process and in two?

    python -m benchmarks.front

Trains AlexNet for CIFAR-10 as PyDTNN has it (`examples.keras_cifar`) with SGD of momentum 0.9, by
steps of 64 pictures over all processes: one with a thread for each core, and two of one thread. The
peers are plain PyTorch and DistributedDataParallel over gloo, eager, and channels-last with fused
SGD; and Keras on PyTorch: its own `fit`, eager and with `jit_compile`, and, of two processes, its
model under DistributedDataParallel in the loop of Keras's guide. A turn is a whole epoch of
pictures of noise, in a new order; ours reads them from the run folder, theirs are in memory. All
processes stay alive, and those that are not measured stand still. Start and compilation are not
counted, nor is the first round.

PyDTNN itself had 0.38 of eager PyTorch's speed on one machine, which is not measured again here.
"""

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.ddp import TrainingRun
from benchmarks.measure import Comparison, Measured, compare, in_turn, run, seconds_per_call
from benchmarks.team import Team, gloo_ranks, serve

if TYPE_CHECKING:
    from torch import Tensor, nn

# torch is imported in the processes that are measured.

SIDE, CLASSES = 32, 10
OURS = "tandem.keras"
EAGER, TUNED = "PyTorch, eager", "PyTorch, channels-last, fused SGD"
KERAS, KERAS_JIT, KERAS_DDP = "Keras's fit", "Keras's fit, jit_compile", "Keras, DDP"
PEERS = {1: ((EAGER, TUNED), (KERAS, KERAS_JIT)), 2: ((EAGER, TUNED), (KERAS_DDP,))}
"""The variants of PyTorch and of Keras, by processes."""
TARGETS = {1: (1.0, 1.1), 2: (1.0, 1.5)}  # of the best of PyTorch's and of Keras's
PYDTNN = 0.38  # of eager PyTorch's speed
OVER_PYDTNN = 2.6


@dataclass(frozen=True)
class Sizes:
    """Pictures of an epoch and of a step over all processes, and a factor on the widths."""

    pictures: int = 3200
    batch: int = 64
    width: float = 1.0

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.pictures // self.batch)


def noise(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of noise, uint8 (n, row, column, RGB), and labels, int64 (n,)."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
    return pictures, rng.integers(0, CLASSES, count)


def answer(rounds: int, sizes: Sizes = Sizes()) -> Iterator[Comparison]:
    """Let each train an epoch in turn; compare by processes."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        turns: dict[str, Callable[[], float]] = {}
        for processes in (1, 2):
            ours = stack.enter_context(fit(folder / str(processes), processes, sizes))
            ours.seconds_per_step(1)
            turns[f"{OURS}, {processes}"] = partial(ours.seconds_per_step, 1)
            threads = cores if processes == 1 else 1
            team = stack.enter_context(
                plain_team(folder / f"store {processes}", processes, threads, sizes)
            )
            for kind in itertools.chain(*PEERS[processes]):
                turns[f"{kind}, {processes}"] = partial(team.slowest, kind)
        epochs = in_turn(turns, rounds)

    def step(kind: str, processes: int) -> Measured:
        return replace(epochs[f"{kind}, {processes}"].scaled(1 / sizes.steps), name=kind)

    for processes in (1, 2):
        question = f"AlexNet for CIFAR-10, {sizes.batch} pictures, {processes} " + (
            "process" if processes == 1 else "processes"
        )
        ours = step(OURS, processes)
        for kinds, target in zip(PEERS[processes], TARGETS[processes], strict=True):
            peers = [step(kind, processes) for kind in kinds]
            best = min(peers, key=lambda measured: measured.median)
            for peer in peers:
                yield compare(question, ours, peer, target=target if peer is best else None)
        if processes == 1:
            name = f"PyDTNN, by {PYDTNN} of eager PyTorch's"
            pydtnn = replace(step(EAGER, 1).scaled(1 / PYDTNN), name=name)
            yield compare(question, ours, pydtnn, target=OVER_PYDTNN)


def fit(folder: Path, processes: int, sizes: Sizes) -> TrainingRun:
    """A script that calls `fit`, of which a record is an epoch."""
    words = (processes, sizes.pictures, sizes.batch, sizes.width)
    command = [sys.executable, "-m", "benchmarks.front_fit", str(folder / "run"), *map(str, words)]
    return TrainingRun(command, folder)


def plain_team(store: Path, processes: int, threads: int, sizes: Sizes) -> Team:
    """Processes that train plain PyTorch's network, by DistributedDataParallel if they are two."""
    return Team(plain_rank, [(rank, processes, threads, store, sizes) for rank in range(processes)])


def plain_rank(
    rank: int, processes: int, threads: int, store: Path, sizes: Sizes, pipe: Connection
) -> None:
    """Serve as one process; a task's reply is the seconds of an epoch."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    with gloo_ranks(store, rank, processes) if processes > 1 else nullcontext():
        tasks = {
            kind: plain_epoch(kind == TUNED, rank, processes, sizes) for kind in (EAGER, TUNED)
        }
        for kind in PEERS[processes][1]:
            tasks[kind] = keras_epoch(kind, rank, processes, sizes)
        serve(pipe, tasks)


def plain_epoch(tuned: bool, rank: int, processes: int, sizes: Sizes) -> Callable[[], float]:
    """Make what trains an epoch and returns its seconds, as PyTorch users write it."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.plain_step import sgd_step

    layout = torch.channels_last if tuned else torch.contiguous_format
    torch.manual_seed(0)
    network: nn.Module = plain_network(sizes.width).to(memory_format=layout)
    if processes > 1:
        network = DistributedDataParallel(network)
    pictures, labels = map(torch.from_numpy, noise(sizes.pictures))
    pictures = pictures.permute(0, 3, 1, 2).contiguous()
    rows = slice(0)

    def loss() -> "Tensor":
        chosen = order[rows]
        images = pictures[chosen].to(torch.float32, memory_format=layout).div_(128).sub_(1)
        return F.cross_entropy(network(images), labels[chosen])

    step = sgd_step(network, loss, tuned, weight_decay=0.0)
    own = sizes.batch // processes

    def epoch() -> None:
        nonlocal order, rows
        order = torch.randperm(sizes.pictures)  # the same on all ranks, which have one seed
        for start in range(0, sizes.pictures, sizes.batch):
            rows = slice(start + rank * own, start + (rank + 1) * own)
            step()

    order = torch.arange(0)
    return partial(seconds_per_call, epoch)


def keras_epoch(kind: str, rank: int, processes: int, sizes: Sizes) -> Callable[[], float]:
    """Make what trains an epoch as users of Keras write it, and returns its seconds."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from examples.keras_cifar import make_model

    keras.utils.set_random_seed(0)
    model = make_model(sizes.width)
    pictures, labels = noise(sizes.pictures)
    if kind != KERAS_DDP:
        # Keras 3 asks whether lengths are 1, which PyTorch 2.13 can't tell of lengths that vary.
        torch._dynamo.config.automatic_dynamic_shapes = False
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        loss = "sparse_categorical_crossentropy"
        model.compile(optimizer, loss, jit_compile=kind == KERAS_JIT)
        fit = partial(model.fit, pictures, labels, sizes.batch, 1, verbose=0)
        return partial(seconds_per_call, fit)
    data = TensorDataset(torch.from_numpy(pictures), torch.from_numpy(labels))
    sampler = DistributedSampler(data, processes, rank)
    loader = DataLoader(data, sizes.batch // processes, sampler=sampler)
    network = DistributedDataParallel(model)
    of_torch = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    cost = keras.losses.SparseCategoricalCrossentropy()

    def epoch() -> None:
        for x, y in loader:
            of_torch.zero_grad()
            cost(y, network(x, training=True)).backward()
            of_torch.step()

    return partial(seconds_per_call, epoch)


def plain_network(width: float) -> "nn.Sequential":
    """The network of `examples.keras_cifar` from scaled images to logits."""
    from torch import nn

    def scaled(count: int) -> int:
        return max(1, round(width * count))

    filters = (3, *map(scaled, (64, 192, 384, 256, 256)))
    layers: list[nn.Module] = []
    for number in range(5):
        stride = 2 if number == 0 else 1
        layers += [
            nn.Conv2d(filters[number], filters[number + 1], 3, stride, padding=1),
            nn.ReLU(inplace=True),
            *([] if number in (2, 3) else [nn.MaxPool2d(2)]),
        ]
    units = (4 * filters[-1], scaled(4096), scaled(4096))
    layers.append(nn.Flatten())
    for number in range(2):
        layers += [nn.Linear(*units[number : number + 2]), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(units[-1], CLASSES))


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=5))
