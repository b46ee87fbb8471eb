"""Data sets that are kept on a GPU, against a fake CUDA driver."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.data.dataset import Dataset, open_split
from tandem.distributed import local_groups
from tandem.errors import InputError
from tandem.memory import RowType, SlotLayout
from tandem.memory.cuda import CudaSlots
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import CudaMemory
from tandem.preprocessing.arrays import write_arrays
from tandem.training import kept_pictures as module
from tandem.training.kept_pictures import describe_kept, kept_pictures, read_kept_pictures
from tandem.training.messages import Activity
from tests.support.coded_pictures import SIZE, coded_picture, label_of, write_coded
from tests.support.fake_cuda import FakeDriver, FakeEvent, FakeMachine, FakeStream
from tests.support.threads import run_threads

PICTURE = SIZE * SIZE * 3
BOTH = {"train": (13, SIZE, SIZE, 3), "validation": (5, SIZE, SIZE, 3)}
NBYTES = 18 * PICTURE


def spec_of(train: Dataset, validation: Dataset, wish: Any = "auto", job: str = "train") -> Any:
    config = SimpleNamespace(data_on_gpu=wish, loader_threads=2)
    return SimpleNamespace(config=config, job=job, train=train, validation=validation)


@pytest.fixture
def splits(tmp_path: Path) -> tuple[Dataset, Dataset]:
    return write_coded(tmp_path / "train", (4, 4, 4, 1)), write_coded(tmp_path / "val", (4, 1))


def decisions(
    spec: Any, devices: Sequence[int], capacity: int, used: Sequence[int] = (0, 0, 0)
) -> list[Any]:
    """What trainers on these devices decide, by rank; each uses 5 bytes of its own afterwards.

    `used`: bytes that other programs hold on the GPU when a trainer looks.
    """
    machine, groups = FakeMachine(devices=2, capacity=capacity), local_groups(len(devices))
    decided: dict[int, Any] = {}

    def decide(rank: int) -> None:
        driver: Any = FakeDriver(machine, devices[rank])
        free = driver.free_memory
        driver.free_memory = lambda: free() - used[rank]
        try:
            decided[rank] = kept_pictures(spec, driver, groups[rank])
        except InputError as error:
            decided[rank] = str(error)
        driver.allocate(5)

    run_threads([lambda rank=rank: decide(rank) for rank in range(len(devices))])
    return [decided[rank] for rank in range(len(devices))]


@pytest.mark.parametrize(
    ("wish", "devices", "capacity", "expected"),
    [
        ("auto", [0], 3 * NBYTES, [BOTH]),
        ("auto", [0], 3 * NBYTES - 1, [{}]),
        ("auto", [0, 0], 6 * NBYTES, [BOTH] * 2),
        ("auto", [0, 0], 6 * NBYTES - 1, [{}] * 2),
        ("auto", [0, 1, 0], 6 * NBYTES - 1, [{}, BOTH, {}]),
        (True, [0], NBYTES, [BOTH]),
        (True, [0, 0], 2 * NBYTES, [BOTH] * 2),
        (False, [0], 9 * NBYTES, [{}]),
    ],
)
def test_pictures_are_kept_where_those_of_all_trainers_fit(
    splits: Any, wish: Any, devices: list[int], capacity: int, expected: list[Any]
) -> None:
    assert decisions(spec_of(*splits, wish), devices, capacity) == expected


@pytest.mark.parametrize(("used", "expected"), [((0, 1), {}), ((1, 0), {}), ((0, 0), BOTH)])
def test_trainers_of_a_gpu_go_by_the_least_that_one_has_seen_free(
    splits: Any, used: tuple[int, int], expected: Any
) -> None:
    assert decisions(spec_of(*splits), [0, 0], 6 * NBYTES, used) == [expected] * 2


def test_what_does_not_fit_is_refused_if_it_was_asked_for(splits: Any) -> None:
    (one,) = decisions(spec_of(*splits, True), [0], NBYTES - 1)
    assert "data_on_gpu is true, and the pictures take 0 MiB of cuda:0" in one
    two = decisions(spec_of(*splits, True), [1, 1], 2 * NBYTES - 1)
    assert "2 copies of the pictures take" in two[0]
    assert "use auto or false" in two[1]


def test_a_validation_keeps_its_pictures_only(splits: Any) -> None:
    train, validation = splits
    spec = spec_of(train, validation, job="validate")
    assert decisions(spec, [0], 3 * 5 * PICTURE) == [{"validation": BOTH["validation"]}]


class Status:
    def __init__(self) -> None:
        self.shown: list[int] = []

    def show(self, activity: int) -> None:
        self.shown.append(activity)


def read(splits: Any, staging: int, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeDriver, Any, Any]:
    monkeypatch.setattr(module, "STAGING_NBYTES", staging)
    driver: Any = FakeDriver(FakeMachine())
    layout, slots = (
        FlatLayout.of({"w": (1,)}, "float32"),
        CudaSlots(0, SlotLayout.of_pictures(2, 0)),
    )
    memory = CudaMemory(slots, layout, driver, lambda stream: nullcontext())
    spec, status = spec_of(*splits), Status()
    for split, shape in BOTH.items():
        memory.keep_pictures(split, shape)
    read_kept_pictures(spec, memory, status)  # type: ignore[arg-type]
    return driver, memory, status


def are_right(driver: FakeDriver, memory: CudaMemory) -> bool:
    """Whether the GPU has every picture in its place."""
    return all(
        (picture == coded_picture(index, label_of(index))).all()
        for split in BOTH
        for index, picture in enumerate(driver.read(memory.pictures[split]))
    )


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
@pytest.mark.parametrize(("staging", "rows"), [(1, 1), (3 * PICTURE + 7, 3), (1 << 20, 13)])
def test_all_pictures_come_in_parts_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, staging: int, rows: int
) -> None:
    splits = [
        write_coded(tmp_path / f"{number}", counts, layout)
        for number, counts in enumerate([(4, 4, 4, 1), (4, 1)])
    ]
    driver, memory, status = read(splits, staging, monkeypatch)
    assert are_right(driver, memory)
    uploads = [int(entry.removeprefix("upload ")) for entry in driver.log]
    assert (max(uploads), sum(uploads)) == (min(rows, 13) * PICTURE, NBYTES)
    assert status.shown == [Activity.READING, Activity.STARTING]
    memory.close()
    assert driver.machine.used(0) == 0


def test_rows_of_arrays_are_kept_and_an_empty_split_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = np.random.default_rng(1).normal(size=(7, 4, 3)).astype(np.float32), np.arange(7.0)
    manifest = write_arrays(tmp_path, (x, y), None)
    train, validation = (
        open_split(manifest, tmp_path, name, tmp_path / "labels") for name in ("train", "val")
    )
    spec, status, driver = spec_of(train, validation), Status(), FakeDriver(FakeMachine())
    assert decisions(spec, [0], 3 * 7 * 48) == [{"train": (7, 4, 3)}]
    assert decisions(spec, [0], 3 * 7 * 48 - 1) == [{}]
    monkeypatch.setattr(module, "STAGING_NBYTES", 2 * 48)
    slots = CudaSlots(0, SlotLayout(2, train.row, train.target).without_pictures())
    layout = FlatLayout.of({"w": (1,)}, "float32")
    memory = CudaMemory(slots, layout, driver, lambda stream: nullcontext())  # type: ignore[arg-type]
    memory.keep_pictures("train", (7, 4, 3), train.row.dtype)
    read_kept_pictures(spec, memory, status)  # type: ignore[arg-type]
    np.testing.assert_array_equal(driver.read(memory.pictures["train"]), x, strict=True)
    assert "keeps the train pictures: 0 MiB" in str(describe_kept(spec, memory))


def test_what_is_kept_is_said(splits: Any) -> None:
    def said(spec: Any, *kept: str) -> str | None:
        driver: Any = FakeDriver(FakeMachine(devices=2), 1)
        layout, slots = (
            FlatLayout.of({"w": (1,)}, "float32"),
            CudaSlots(1, SlotLayout.of_pictures(2, 0)),
        )
        memory = CudaMemory(slots, layout, driver, lambda stream: nullcontext())
        for split in kept:
            memory.keep_pictures(split, BOTH[split])
        return describe_kept(spec, memory)

    train, validation = (replace(one, row=RowType("uint8", (1000, 1000, 3))) for one in splits)
    spec, only = spec_of(train, validation), spec_of(train, validation, job="validate")
    size = "MiB for each trainer"
    assert said(spec, *BOTH) == f"cuda:1 keeps the train and validation pictures: 51 {size}"
    assert said(only, "validation") == f"cuda:1 keeps the validation pictures: 14 {size}"
    assert said(spec) == (
        f"the train and validation pictures are loaded, not kept: with 51 {size} they take more "
        "than a third of the free memory of cuda:1"
    )
    assert said(spec_of(train, validation, wish=False)) is None


@pytest.mark.parametrize("owner", [FakeEvent, FakeStream])
def test_no_area_is_read_into_or_given_up_while_it_is_copied(
    splits: Any, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    monkeypatch.setattr(owner, "synchronize", lambda self: None)
    driver, memory, _ = read(splits, PICTURE, monkeypatch)
    monkeypatch.undo()
    if owner is FakeStream:
        assert not are_right(driver, memory)
    memory.stream.synchronize()
    assert are_right(driver, memory) == (owner is FakeStream)


def test_a_file_that_is_gone_is_named(splits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(splits[1].paths[0]).unlink()
    with pytest.raises(InputError, match="the batch file was removed"):
        read(splits, 1 << 20, monkeypatch)
