"""Copies on a GPU: a loader's minibatch, and the exchange of two trainers."""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.measure import Measured, Step, measure
from benchmarks.published import PARAMETERS
from tandem.distributed import LocalGroup, local_groups
from tandem.distributed.peer_to_peer import PeerToPeerAllReduce, PeerVectors
from tandem.errors import InputError
from tandem.memory import Slot, SlotLayout
from tandem.memory.cuda import CudaBuffer, CudaDriver, CudaSlot, SlotUploader

WAIT = 120.0  # seconds for two processes to start and to exchange


def upload_copies(driver: CudaDriver, batch: int, side: int) -> tuple[dict[str, Step], int]:
    """Make a loader's copy of a minibatch to the GPU, and PyTorch's; return also the bytes."""
    layout = SlotLayout.of_pictures(batch, side)
    slot = CudaSlot.create(driver, layout)
    uploader = SlotUploader(driver, [slot])
    rng = np.random.default_rng(0)
    pinned = torch.from_numpy(rng.integers(0, 256, layout.nbytes, np.uint8)).pin_memory()
    target = torch.empty_like(pinned, device=f"cuda:{driver.device}")

    def noise(staged: Slot) -> None:
        staged.pictures[...] = rng.integers(0, 256, staged.pictures.shape, np.uint8)
        staged.valid[...] = batch

    uploader.fill(0, noise)

    def by_uploader() -> None:
        # The staging area already holds the noise: only the copy is timed.
        uploader.fill(0, lambda staged: None)

    return {
        "a minibatch to the GPU, ours": by_uploader,
        "a minibatch to the GPU, PyTorch's copy": lambda: target.copy_(pinned, non_blocking=True),
    }, layout.nbytes


def exchange_seconds(
    rounds: int, repeats: int, parameters: int = PARAMETERS["AlexNet"]
) -> list[tuple[Measured, int]]:
    """Time exchanges of two trainers on one GPU, and a plain copy; each with the bytes of a vector.

    Weights and momenta are averaged after a step, or gradients, half as many, before the update.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    groups = local_groups(2)
    processes = [
        context.Process(
            target=_exchange, args=(group, parameters, rounds, repeats, there), daemon=True
        )
        for group in groups
    ]
    for process in processes:
        process.start()
    # A process notices the other's end only if no third process holds that end of the pipe.
    for group in groups:
        group.close()
    there.close()
    try:
        if not here.poll(WAIT):
            raise InputError(f"the exchange could not be measured within {WAIT:.0f} seconds")
        found: list[Measured] = here.recv()
    except EOFError:
        raise InputError("the exchange could not be measured; its own message is above") from None
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    average, gradients, copy = found
    return [(average, 8 * parameters), (gradients, 4 * parameters), (copy, 8 * parameters)]


def _exchange(
    group: LocalGroup,
    parameters: int,
    rounds: int,
    repeats: int,
    report: Connection,
) -> None:
    driver, elements = CudaDriver(0), 2 * parameters
    own = CudaBuffer.create(driver, 4 * elements, "vector")
    stream = driver.stream()
    values = torch.as_tensor(own.array(elements, "float32"), device="cuda:0")
    values.normal_()
    other = torch.empty_like(values)
    torch.cuda.synchronize()
    vectors = PeerVectors(group, driver, own, "float32")
    whole = PeerToPeerAllReduce(vectors, stream)
    half, shares = whole.of(slice(0, parameters)), [0.5, 0.5]
    steps: dict[str, Step] = {
        "average, two trainers on one GPU": lambda: whole.average(values, shares),
        "gradients, two trainers on one GPU": lambda: half.average(values[:parameters], shares),
    }
    if group.rank == 0:
        # Meanwhile the other trainer waits in the next exchange.
        steps["a copy of weights and momenta on the GPU"] = lambda: other.copy_(values)
    found = measure(steps, rounds, repeats, torch.cuda.synchronize)
    if group.rank == 0:
        report.send(found)
    group.barrier()
    whole.close()
    vectors.close()
    group.barrier()
    own.close()
