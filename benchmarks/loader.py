"""How fast does a loader fill slots, and in how much memory?

    python -m benchmarks.loader

Filling is compared with the least that it could be, a system call a picture that reads it whole
into the same memory, the arguments ready; and with the same work as it is written with NumPy and
with PyTorch's DataLoader. All files are in the page cache, and each side has one process that
loads. Ours leaves the pixels uint8, for the device to subtract the mean; the others leave float32
without the mean. Memory is the proportional set size that Linux tells.
"""

import itertools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import proc_load
from benchmarks.measure import Comparison, Figure, Found, Step, compare, measure, run
from benchmarks.pictures import write_batches, write_jpegs
from tandem.data.augment import Augmentation, windows
from tandem.data.dataset import Dataset
from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.data.order import Shuffle, epoch_order, global_minibatch, minibatch_count
from tandem.memory import HostSlots, SlotLayout
from tandem.processes.heartbeat import HeartbeatTable, StatusSlot
from tandem.training.input_pipeline import InputPipeline, ProcessLoader

# torch is imported further down: a loader process imports this file again, and is to stay small.

SHUFFLES: tuple[Shuffle, ...] = ("files", "images")
READ_TARGET, CROP_TARGET = 1.3, 3.0  # times the time of the bare system calls
MEMORY_TARGET, GROWTH_TARGET = 400.0, 1.0  # MB; the latter over all of `Sizes.steady`


@dataclass(frozen=True)
class Sizes:
    """What is loaded.

    Attributes
    ----------
    batch, pictures, jpegs : int
        Pictures of a minibatch; of the data set; of the set of JPEGs, a multiple of the batch.
    stored, crop : int
        Rows and columns, pixels.
    steady : int
        Minibatches over which a loader may not grow.
    """

    batch: int = 128
    pictures: int = 1024
    jpegs: int = 128
    stored: int = 256
    crop: int = 227
    steady: int = 200

    @property
    def augmentation(self) -> Augmentation:
        """Every picture is cropped and mirrored by itself."""
        return Augmentation(self.crop, True, True, batch_crop_mirror=False, seed=1)


PAPER = Sizes()


class Epoch:
    """The minibatches of an epoch, into two slots in turn, as they are and by their peers."""

    def __init__(self, dataset: Dataset, shuffle: Shuffle, sizes: Sizes, crop_here: bool) -> None:
        self.dataset, self.sizes = dataset, sizes
        self.filler = MinibatchBuilder(dataset, dataset, sizes.augmentation, crop_here)
        self.slots = HostSlots.create(SlotLayout(sizes.batch, self.filler.picture_size), rank=0)
        order = epoch_order(dataset.counts, shuffle, seed=1, epoch=0)
        self.requests = [
            MinibatchRequest(k % 2, "train", 0, k, global_minibatch(order, k, sizes.batch))
            for k in range(minibatch_count(len(order), sizes.batch))
        ]

    def fill(self) -> Step:
        """Ours; each call fills a slot."""

        def step(request: MinibatchRequest) -> None:
            self.filler.fill(self.slots.arrays[request.slot], request)

        return _in_turn(step, self.requests)

    def read(self, files: Sequence[int]) -> Step:
        """The bare system calls, one a picture; each call reads a minibatch."""

        def step(calls: list[tuple[int, list[memoryview], int]]) -> None:
            for file, picture, begin in calls:
                os.preadv(files[file], picture, begin)

        return _in_turn(step, [self._calls(request) for request in self.requests])

    def by_numpy(self, files: Sequence[int], mean: np.ndarray) -> Step:
        """Crop, mirror and mean, picture by picture, the windows given; a minibatch at each call.

        Each returns the images, float32 (n, crop, crop, RGB), in memory that is used again.
        """
        sizes = self.sizes
        picture = np.empty(mean.shape, np.uint8)
        images = np.empty((sizes.batch, sizes.crop, sizes.crop, 3), np.float32)

        def step(minibatch: tuple[Sequence[Any], np.ndarray, np.ndarray]) -> np.ndarray:
            for i, ((file, begin), origin, mirrored) in enumerate(zip(*minibatch, strict=True)):
                os.preadv(files[file], [picture], begin)
                images[i] = augmented(picture, mean, origin, mirrored, sizes.crop)
            return images[: len(minibatch[0])]

        minibatches = []
        for request in self.requests:
            about = (request.mode, request.epoch, request.minibatch, request.indices)
            origins, mirrored = windows(sizes.augmentation, sizes.stored, *about)
            minibatches.append((places(self.dataset, request.indices), origins, mirrored))
        return _in_turn(step, minibatches)

    def _calls(self, request: MinibatchRequest) -> list[tuple[int, list[memoryview], int]]:
        """File, destination and first byte of each picture of a request."""
        pictures = self.slots.arrays[request.slot].pictures
        return [
            (file, [pictures[row].data], begin)
            for row, (file, begin) in enumerate(places(self.dataset, request.indices))
        ]


def _in_turn(step: Callable[[Any], Any], inputs: Sequence[Any]) -> Step:
    endless = itertools.cycle(inputs)
    return lambda: step(next(endless))


def places(dataset: Dataset, indices: np.ndarray) -> list[tuple[int, int]]:
    """Number of the file of each picture, and its first byte there."""
    ends = np.cumsum(dataset.counts)
    files = np.searchsorted(ends, indices, side="right")
    rows = indices - (ends - dataset.counts)[files]
    begins = np.asarray(dataset.offsets)[files] + rows * (3 * dataset.image_size**2)
    return list(zip(files.tolist(), begins.tolist(), strict=True))


def augmented(
    picture: np.ndarray, mean: np.ndarray, origin: Sequence[int], mirrored: bool, crop: int
) -> np.ndarray:
    """A window of a picture without the mean's, mirrored or not: float32 (crop, crop, RGB)."""
    rows, columns = (slice(start, start + crop) for start in origin)
    image = picture[rows, columns] - mean[rows, columns]
    return image[:, ::-1] if mirrored else image


class RawPictures:
    """Pictures of batch files for a DataLoader, by position: each an array of a mapped file."""

    def __init__(self, dataset: Dataset, mean: np.ndarray, crop: int) -> None:
        shape = (dataset.image_size, dataset.image_size, 3)
        self._pictures = [
            picture
            for path, offset, count in zip(
                dataset.paths, dataset.offsets, dataset.counts, strict=True
            )
            for picture in np.memmap(path, np.uint8, "r", offset, (count, *shape))
        ]
        self._mean, self._crop = mean, crop

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, position: int) -> Any:
        """A tensor, float32 (RGB, crop, crop)."""
        return _tensor(self._pictures[position], self._mean, self._crop)


class JpegPictures:
    """JPEGs for a DataLoader, by position: each decoded, squashed and cropped."""

    def __init__(self, paths: Sequence[Path], mean: np.ndarray, crop: int) -> None:
        self._paths, self._mean, self._crop = paths, mean, crop

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, position: int) -> Any:
        """A tensor, float32 (RGB, crop, crop)."""
        side = len(self._mean)
        with Image.open(self._paths[position]) as image:
            squashed = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        return _tensor(np.asarray(squashed), self._mean, self._crop)


def _tensor(picture: np.ndarray, mean: np.ndarray, crop: int) -> Any:
    import torch

    row, column = torch.randint(len(mean) - crop + 1, (2,)).tolist()
    image = augmented(picture, mean, (row, column), bool(torch.rand(()) < 0.5), crop)
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def data_loader(pictures: Any, batch: int) -> Any:
    """PyTorch's DataLoader with one process that loads and stays."""
    from torch.utils.data import DataLoader

    return DataLoader(pictures, batch, shuffle=True, num_workers=1, persistent_workers=True)


@contextmanager
def loader_process(epoch: Epoch) -> Iterator[tuple[int, ProcessLoader]]:
    """A loader as a run starts it: its process ID, and what its trainer sees of it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    launcher, report = context.Pipe()
    status = StatusSlot(HeartbeatTable.create(("launcher", "loader 0"), timeout=60), index=1)
    arguments = (epoch.filler, there, epoch.slots, status, report)
    process = context.Process(target=proc_load.serve, args=arguments, daemon=True)
    process.start()
    there.close()
    report.close()
    client = ProcessLoader(here)
    try:
        yield process.pid or 0, client
    finally:
        client.close()
        process.join()
        launcher.close()


@contextmanager
def opened(paths: Iterable[str]) -> Iterator[list[int]]:
    """Descriptors of files."""
    with ExitStack() as stack:
        yield [stack.enter_context(Path(path).open("rb")).fileno() for path in paths]


def mean_image(sizes: Sizes) -> np.ndarray:
    """Some mean image: float32 (S, S, RGB)."""
    return np.full((sizes.stored, sizes.stored, 3), 117, np.float32)


def exhaust(batches: Iterable[Any]) -> None:
    """Have everything loaded, and only pass over it."""
    for _ in batches:
        pass


def load(loader: ProcessLoader, requests: Sequence[MinibatchRequest]) -> None:
    """Have minibatches loaded one ahead, as a trainer does."""
    exhaust(InputPipeline(requests, loader))


def resident(pid: int, kind: str = "Pss") -> float:
    """Memory of a process, MB: its proportional set size, to which shared pages count in part.

    With ``Pss_Anon`` only what is in no file and no shared memory: others that end or begin don't
    change that.
    """
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (kilobytes,) = re.findall(rf"^{kind}: +(\d+) kB$", rollup, re.MULTILINE)
    return int(kilobytes) * 1024 / 1e6


def filling(
    dataset: Dataset, files: Sequence[int], sizes: Sizes, rounds: int
) -> Iterator[Comparison]:
    """Slots filled in this process, against the bare system calls and NumPy."""
    steps: dict[str, Step] = {}
    for shuffle in SHUFFLES:
        whole, cropped = (Epoch(dataset, shuffle, sizes, crop) for crop in (False, True))
        steps |= {
            f"preadv, {shuffle}": whole.read(files),
            f"whole pictures, {shuffle}": whole.fill(),
            f"crops, {shuffle}": cropped.fill(),
        }
    found = {m.name: m for m in measure(steps, rounds)}
    question = f"fill a slot with {sizes.batch} pictures of {sizes.stored} pixels"
    for shuffle in SHUFFLES:
        bare = found[f"preadv, {shuffle}"]
        for name, target in (("whole pictures", READ_TARGET), ("crops", CROP_TARGET)):
            yield compare(question, found[f"{name}, {shuffle}"], bare, "time", target)
    for name in ("whole pictures", "crops"):
        by_files, by_images = (found[f"{name}, {shuffle}"] for shuffle in SHUFFLES)
        yield compare(question, by_images, by_files, "time")
    steps = {
        "crops, images": cropped.fill(),
        "NumPy's crop, mirror and mean, images": cropped.by_numpy(files, mean_image(sizes)),
    }
    yield compare(question, *measure(steps, max(1, rounds // 4)))


def processes(dataset: Dataset, folder: Path, sizes: Sizes, rounds: int) -> Iterator[Any]:
    """A loader process, against PyTorch's, and the memory that it takes."""
    mean = mean_image(sizes)
    jpegs = write_jpegs(folder, sizes.jpegs)
    epoch = Epoch(dataset, "images", sizes, crop_here=True)
    with loader_process(epoch) as (pid, loader):
        for name, pictures in (
            ("arrays", RawPictures(dataset, mean, sizes.crop)),
            ("JPEGs", JpegPictures(jpegs, mean, sizes.crop)),
        ):
            theirs = data_loader(pictures, sizes.batch)
            steps: dict[str, Step] = {
                "a loader process, crops": partial(load, loader, epoch.requests[: len(theirs)]),
                f"torch's DataLoader, {name}": partial(exhaust, theirs),
            }
            yield compare(f"one process loads {len(pictures)} pictures", *measure(steps, rounds))
        yield from memory(epoch, loader, pid, sizes.steady)


def memory(epoch: Epoch, loader: ProcessLoader, pid: int, steady: int) -> Iterator[Figure]:
    """What a loader process takes once it is warm, slots included, and whether it grows."""
    before = resident(pid, "Pss_Anon")
    load(loader, list(itertools.islice(itertools.cycle(epoch.requests), steady)))
    question = "memory of a loader process"
    taken, grown = resident(pid), resident(pid, "Pss_Anon") - before
    yield Figure(question, "all, its slots included", taken, "MB", MEMORY_TARGET)
    yield Figure(question, f"growth over {steady} minibatches", grown, "MB", GROWTH_TARGET)


def answer(rounds: int, sizes: Sizes = PAPER) -> Iterator[Found]:
    """Make pictures, load them, compare."""
    with tempfile.TemporaryDirectory() as name:
        dataset = write_batches(Path(name), sizes.pictures, sizes.stored)
        with opened(dataset.paths) as files:
            yield from filling(dataset, files, sizes, rounds)
        # A slot is filled in milliseconds, but DataLoader's passes take a second each.
        yield from processes(dataset, Path(name), sizes, max(1, rounds // 40))


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=200))
