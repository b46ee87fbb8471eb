"""What the loader's benchmark compares, and that its peers do the same work."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.loader import Epoch, Sizes, answer, mean_image, opened
from benchmarks.measure import Comparison, Figure
from benchmarks.pictures import write_batches
from tandem.data.dataset import Dataset

SIZES = Sizes(batch=4, pictures=10, jpegs=4, stored=24, crop=16, steady=3)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_batches(tmp_path, SIZES.pictures, SIZES.stored, per_file=6)


def test_it_answers_every_question() -> None:
    found = list(answer(1, SIZES))
    comparisons = [c for c in found if isinstance(c, Comparison)]
    assert [(c.name, c.peer, c.kind, c.target) for c in comparisons] == [
        ("whole pictures, files", "preadv, files", "time", 1.3),
        ("crops, files", "preadv, files", "time", 3.0),
        ("whole pictures, images", "preadv, images", "time", 1.3),
        ("crops, images", "preadv, images", "time", 3.0),
        *(
            line
            for name in ("whole pictures", "crops")
            for line in (
                (f"{name}, images", f"{name}, files", "time", None),
                *(
                    (f"{name}, {shuffle}, {threads} threads", f"{name}, {shuffle}", "time", None)
                    for shuffle in ("files", "images")
                    for threads in (2, 4)
                ),
            )
        ),
        ("crops, images", "NumPy's crop, mirror and mean, images", "speed", None),
        ("a loader process, crops", "torch's DataLoader, arrays", "speed", None),
        ("a loader process, crops", "torch's DataLoader, JPEGs", "speed", None),
    ]
    assert all(c.seconds > 0 and c.peer_seconds > 0 for c in comparisons)
    memory, growth = (f for f in found if isinstance(f, Figure))
    # The interpreter and NumPy at least; torch would take 200 MB.
    assert 10 < memory.value < 150
    assert memory.target == 400
    assert growth.name == "growth over 3 minibatches"


@pytest.mark.parametrize("shuffle", ["files", "images"])
def test_the_bare_calls_read_what_the_loader_reads(dataset: Dataset, shuffle: str) -> None:
    epoch = Epoch(dataset, shuffle, SIZES, crop_here=False)
    fill = epoch.fill()
    with opened(dataset.paths) as files:
        read = epoch.read(files)
        for request in epoch.requests * 2:
            fill()
            pictures = epoch.slots.arrays[request.slot].pictures[: len(request.indices)]
            wanted = pictures.copy()
            pictures[...] = 0
            read()
            np.testing.assert_array_equal(pictures, wanted)


def test_numpy_takes_the_mean_from_the_same_crops(dataset: Dataset) -> None:
    epoch = Epoch(dataset, "images", SIZES, crop_here=True)
    mean = np.random.default_rng(0).uniform(0, 255, mean_image(SIZES).shape).astype(np.float32)
    fill, mirrored = epoch.fill(), 0
    with opened(dataset.paths) as files:
        by_numpy = epoch.by_numpy(files, mean)
        for request in epoch.requests:
            fill()
            slot, images = epoch.slots.arrays[request.slot], by_numpy()
            assert len(images) == len(request.indices)
            for i, image in enumerate(images):
                top, left = slot.origins[i]
                window = mean[top : top + SIZES.crop, left : left + SIZES.crop]
                expected = slot.pictures[i] - (window[:, ::-1] if slot.mirrored[i] else window)
                np.testing.assert_array_equal(image, expected)
            mirrored += int(slot.mirrored[: len(images)].sum())
    assert 0 < mirrored < SIZES.pictures
