"""How fast does a loader fill slots, and in how much memory?

    python -m benchmarks.loader

Filling is compared with the minimum, one system call per picture that reads it whole into the same
memory, with prepared arguments; and with the same work in NumPy and in PyTorch's DataLoader. All
files are in the page cache, and each side has one loading process. Ours leaves uint8 pixels, from
which the device subtracts the mean; the others leave float32 pixels minus the mean. Memory is
Linux's proportional set size.
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

# torch is imported in functions: a loader process imports this file again and should stay small.

THREADS = (2, 4)  # that share the reading, compared with one
SHUFFLES: tuple[Shuffle, ...] = ("files", "images")
READ_TARGET, CROP_TARGET = 1.3, 3.0  # times the time of the bare system calls
MEMORY_TARGET, GROWTH_TARGET = 400.0, 1.0  # MB; the latter over all of `Sizes.steady`


@dataclass(frozen=True)
class Sizes:
    """Sizes of minibatches and data sets."""

    batch: int = 128
    pictures: int = 1024
    jpegs: int = 128  # a multiple of the batch
    stored: int = 256  # rows and columns, pixels
    crop: int = 227
    steady: int = 200  # minibatches over which a loader may not grow

    @property
    def augmentation(self) -> Augmentation:
        """Crop and mirror every picture separately."""
        return Augmentation(self.crop, True, True, batch_crop_mirror=False, seed=1)


PAPER = Sizes()


class Epoch:
    """The minibatches of an epoch, loaded into two slots in turn by us and by peers."""

    def __init__(
        self, dataset: Dataset, shuffle: Shuffle, sizes: Sizes, crop_here: bool, threads: int = 1
    ) -> None:
        self.dataset, self.sizes = dataset, sizes
        self.builder = MinibatchBuilder(dataset, dataset, sizes.augmentation, crop_here, threads)
        self.slots = HostSlots.create(
            SlotLayout.of_pictures(sizes.batch, self.builder.picture_size), rank=0
        )
        order = epoch_order(dataset.counts, shuffle, seed=1, epoch=0)
        self.requests = [
            MinibatchRequest(k % 2, "train", 0, k, global_minibatch(order, k, sizes.batch))
            for k in range(minibatch_count(len(order), sizes.batch))
        ]

    def fill(self) -> Step:
        """Make our step; each call fills a slot."""

        def step(request: MinibatchRequest) -> None:
            self.builder.fill(self.slots.arrays[request.slot], request)

        return _in_turn(step, self.requests)

    def read(self, files: Sequence[int]) -> Step:
        """Make the step of bare system calls, one per picture; each call reads a minibatch."""

        def step(calls: list[tuple[int, list[memoryview], int]]) -> None:
            for file, picture, begin in calls:
                os.preadv(files[file], picture, begin)

        return _in_turn(step, [self._calls(request) for request in self.requests])

    def by_numpy(self, files: Sequence[int], mean: np.ndarray) -> Step:
        """Make the step in NumPy: crop, mirror and subtract the mean, with given windows.

        Each call returns a minibatch, float32 (n, crop, crop, RGB), in memory that is reused.
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
        """Return file, destination and first byte of each picture of a request."""
        pictures = self.slots.arrays[request.slot].pictures
        return [
            (file, [pictures[row].data], begin)
            for row, (file, begin) in enumerate(places(self.dataset, request.indices))
        ]


def _in_turn(step: Callable[[Any], Any], inputs: Sequence[Any]) -> Step:
    endless = itertools.cycle(inputs)
    return lambda: step(next(endless))


def places(dataset: Dataset, indices: np.ndarray) -> list[tuple[int, int]]:
    """Return the file number of each picture and its first byte in that file."""
    ends = np.cumsum(dataset.counts)
    files = np.searchsorted(ends, indices, side="right")
    rows = indices - (ends - dataset.counts)[files]
    begins = np.asarray(dataset.offsets)[files] + rows * (3 * dataset.image_size**2)
    return list(zip(files.tolist(), begins.tolist(), strict=True))


def augmented(
    picture: np.ndarray, mean: np.ndarray, origin: Sequence[int], mirrored: bool, crop: int
) -> np.ndarray:
    """Crop, mirror and subtract the mean: float32 (crop, crop, RGB)."""
    rows, columns = (slice(start, start + crop) for start in origin)
    image = picture[rows, columns] - mean[rows, columns]
    return image[:, ::-1] if mirrored else image


class RawPictures:
    """Pictures of memory-mapped batch files for a DataLoader, by position."""

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
    """JPEGs for a DataLoader, by position: each decoded, resized and cropped."""

    def __init__(self, paths: Sequence[Path], mean: np.ndarray, crop: int) -> None:
        self._paths, self._mean, self._crop = paths, mean, crop

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, position: int) -> Any:
        """A tensor, float32 (RGB, crop, crop)."""
        side = len(self._mean)
        with Image.open(self._paths[position]) as image:
            resized = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        return _tensor(np.asarray(resized), self._mean, self._crop)


def _tensor(picture: np.ndarray, mean: np.ndarray, crop: int) -> Any:
    import torch

    row, column = torch.randint(len(mean) - crop + 1, (2,)).tolist()
    image = augmented(picture, mean, (row, column), bool(torch.rand(()) < 0.5), crop)
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def data_loader(pictures: Any, batch: int) -> Any:
    """Make PyTorch's DataLoader with one persistent worker."""
    from torch.utils.data import DataLoader

    return DataLoader(pictures, batch, shuffle=True, num_workers=1, persistent_workers=True)


@contextmanager
def loader_process(epoch: Epoch) -> Iterator[tuple[int, ProcessLoader]]:
    """Start a loader as a run does: its process ID, and its trainer's end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    launcher, report = context.Pipe()
    status = StatusSlot(HeartbeatTable.create(("launcher", "loader 0"), timeout=60), index=1)
    arguments = (epoch.builder, there, epoch.slots, status, report)
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
    """Open files; yield their descriptors."""
    with ExitStack() as stack:
        yield [stack.enter_context(Path(path).open("rb")).fileno() for path in paths]


def mean_image(sizes: Sizes) -> np.ndarray:
    """Make a mean image: float32 (S, S, RGB)."""
    return np.full((sizes.stored, sizes.stored, 3), 117, np.float32)


def exhaust(batches: Iterable[Any]) -> None:
    """Consume all batches."""
    for _ in batches:
        pass


def load(loader: ProcessLoader, requests: Sequence[MinibatchRequest]) -> None:
    """Load minibatches one ahead, as a trainer does."""
    exhaust(InputPipeline(requests, loader))


def resident(pid: int, kind: str = "Pss") -> float:
    """Return the proportional set size of a process in MB; shared pages count in part.

    ``Pss_Anon`` counts only private memory, which other processes do not change.
    """
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (kilobytes,) = re.findall(rf"^{kind}: +(\d+) kB$", rollup, re.MULTILINE)
    return int(kilobytes) * 1024 / 1e6


def filling(
    dataset: Dataset, files: Sequence[int], sizes: Sizes, rounds: int
) -> Iterator[Comparison]:
    """Compare slots filled in this process with bare system calls and NumPy."""
    steps: dict[str, Step] = {}
    for shuffle in SHUFFLES:
        whole, cropped = (Epoch(dataset, shuffle, sizes, crop) for crop in (False, True))
        steps |= {
            f"preadv, {shuffle}": whole.read(files),
            f"whole pictures, {shuffle}": whole.fill(),
            f"crops, {shuffle}": cropped.fill(),
        }
        for threads in THREADS:
            for name, crop in (("whole pictures", False), ("crops", True)):
                shared = Epoch(dataset, shuffle, sizes, crop, threads)
                steps[f"{name}, {shuffle}, {threads} threads"] = shared.fill()
    found = {m.name: m for m in measure(steps, rounds)}
    question = f"fill a slot with {sizes.batch} pictures of {sizes.stored} pixels"
    for shuffle in SHUFFLES:
        bare = found[f"preadv, {shuffle}"]
        for name, target in (("whole pictures", READ_TARGET), ("crops", CROP_TARGET)):
            yield compare(question, found[f"{name}, {shuffle}"], bare, "time", target)
    for name in ("whole pictures", "crops"):
        by_files, by_images = (found[f"{name}, {shuffle}"] for shuffle in SHUFFLES)
        yield compare(question, by_images, by_files, "time")
        for by_one in (by_files, by_images):
            for threads in THREADS:
                yield compare(question, found[f"{by_one.name}, {threads} threads"], by_one, "time")
    steps = {
        "crops, images": cropped.fill(),
        "NumPy's crop, mirror and mean, images": cropped.by_numpy(files, mean_image(sizes)),
    }
    yield compare(question, *measure(steps, max(1, rounds // 4)))


def processes(dataset: Dataset, folder: Path, sizes: Sizes, rounds: int) -> Iterator[Any]:
    """Compare a loader process with PyTorch's, and measure its memory."""
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
    """Measure the memory of a warm loader process, slots included, and its growth."""
    before = resident(pid, "Pss_Anon")
    load(loader, list(itertools.islice(itertools.cycle(epoch.requests), steady)))
    question = "memory of a loader process"
    taken, grown = resident(pid), resident(pid, "Pss_Anon") - before
    yield Figure(question, "all, its slots included", taken, "MB", MEMORY_TARGET)
    yield Figure(question, f"growth over {steady} minibatches", grown, "MB", GROWTH_TARGET)


def answer(rounds: int, sizes: Sizes = PAPER) -> Iterator[Found]:
    """Make pictures, load them and compare."""
    with tempfile.TemporaryDirectory() as name:
        dataset = write_batches(Path(name), sizes.pictures, sizes.stored)
        with opened(dataset.paths) as files:
            yield from filling(dataset, files, sizes, rounds)
        # A slot takes milliseconds, a pass of the DataLoader a second.
        yield from processes(dataset, Path(name), sizes, max(1, rounds // 40))


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=200))
