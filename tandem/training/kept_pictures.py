"""Data sets kept on a GPU: whether they fit, how they get there."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tandem.data.reader import PictureReader
from tandem.distributed import Group
from tandem.errors import InputError
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.processes.heartbeat import StatusSlot
from tandem.training.messages import Activity
from tandem.training.run_spec import RunSpec

if TYPE_CHECKING:
    from tandem.data.augment import Mode
    from tandem.data.dataset import Dataset
    from tandem.memory.cuda import CudaDriver

_SHARE = 3  # of the free memory: the rest is for what the network computes, allocated later
STAGING_NBYTES = 64 << 20  # of either area of page-locked memory through which pictures pass


def kept_pictures(
    spec: RunSpec, driver: "CudaDriver", group: Group
) -> "Mapping[Mode, tuple[int, ...]]":
    """Decide which splits a trainer keeps; return their pictures' shapes. Collective.

    Each trainer keeps all pictures, or rows of arrays, and those that share a GPU decide alike,
    before any of them allocates. With `data_on_gpu: auto` they keep them if all copies fit into a
    third of the free memory.

    Raises
    ------
    InputError
        `data_on_gpu` is true and the copies do not fit into the free memory.
    """
    asked = spec.config.data_on_gpu
    if asked is False:
        return {}
    splits = _splits(spec)
    shapes = {split: (dataset.size, *dataset.row.shape) for split, dataset in splits.items()}
    here = [
        free
        for identity, free in group.all_gather_object((driver.identity, driver.free_memory()))
        if identity == driver.identity
    ]
    needed, free = len(here) * sum(map(_nbytes, splits.values())), min(here)
    if asked is True and needed > free:
        copies = f"{len(here)} copies of " if len(here) > 1 else ""
        raise InputError(
            f"data_on_gpu is true, and {copies}the pictures take {needed / 2**20:.0f} MiB of "
            f"cuda:{driver.device}, of which {free / 2**20:.0f} MiB are free: use auto or false"
        )
    return shapes if asked is True or needed <= free // _SHARE else {}


def read_kept_pictures(spec: RunSpec, memory: HostMemory | CudaMemory, status: StatusSlot) -> None:
    """Read the pictures that a trainer keeps on its GPU.

    They are there when it returns. Raises InputError if a batch file cannot be read any more.
    """
    if isinstance(memory, HostMemory) or not memory.kept:
        return
    status.show(Activity.READING)
    for split, dataset in _splits(spec).items():
        with PictureReader(dataset, threads=int(spec.config.loader_threads)) as reader:
            _upload(memory, reader, memory.kept[split].address)
    status.show(Activity.STARTING)


def describe_kept(spec: RunSpec, memory: HostMemory | CudaMemory) -> str | None:
    """Say what a trainer's GPU keeps; None where there is no choice."""
    if isinstance(memory, HostMemory) or spec.config.data_on_gpu is False:
        return None
    splits, device = _splits(spec), f"cuda:{memory.driver.device}"
    size = f"{sum(map(_nbytes, splits.values())) / 2**20:.0f} MiB"
    named = f"the {' and '.join(splits)} pictures"
    if memory.kept:
        return f"{device} keeps {named}: {size} for each trainer"
    return (
        f"{named} are loaded, not kept: with {size} for each trainer they take more than a third "
        f"of the free memory of {device}"
    )


def _upload(memory: CudaMemory, reader: PictureReader, address: int) -> None:
    """Copy all pictures to the GPU; one part of them is read while another is copied."""
    driver, stream = memory.driver, memory.stream
    count, row = reader.dataset.size, reader.dataset.row
    nbytes = row.nbytes
    rows = min(count, max(1, STAGING_NBYTES // nbytes))
    areas = [(driver.page_locked(rows * nbytes), driver.event()) for _ in range(2)]
    for number, first in enumerate(range(0, count, rows)):
        area, copied = areas[number % 2]
        copied.synchronize()
        indices = np.arange(first, min(first + rows, count))
        part = area[: len(indices) * nbytes]
        reader.read(indices, part.view(row.dtype).reshape(-1, *row.shape))
        driver.upload(address + first * nbytes, part, stream)
        copied.record(stream)
    stream.synchronize()  # before the areas are freed


def _splits(spec: RunSpec) -> "dict[Mode, Dataset]":
    """The splits of which the run uses pictures: those that have some."""
    found: dict[Mode, Dataset] = {"train": spec.train, "validation": spec.validation}
    if spec.job == "validate":
        del found["train"]
    return {split: dataset for split, dataset in found.items() if dataset.size}


def _nbytes(dataset: "Dataset") -> int:
    return dataset.size * dataset.row.nbytes
