"""The loader process: round trips, its end, and the ends of others."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

import proc_load
from tandem.data.augment import Augmentation
from tandem.data.dataset import Dataset
from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.data.order import epoch_order, global_minibatch, minibatch_count
from tandem.memory import HostSlots, Slot, SlotLayout
from tandem.processes.child import ChildContext, enter
from tandem.processes.heartbeat import HeartbeatTable, StatusSlot
from tandem.processes.messages import Failed, Ready
from tandem.training.input_pipeline import InputPipeline, LoaderError, ProcessLoader
from tandem.training.messages import Activity
from tests.support.coded_pictures import coded_picture, label_of, write_coded

CONTEXT = multiprocessing.get_context("spawn")
SETTINGS = Augmentation(
    crop_size=6, rand_crop=True, rand_mirror=True, batch_crop_mirror=False, seed=3
)
END_SECONDS = 10.0


@dataclass
class Loading:
    """A loader process with two slots, and this end of its pipes to trainer and launcher."""

    process: BaseProcess
    connection: Connection
    launcher: Connection
    client: ProcessLoader
    slots: list[Slot]

    def ask(self, indices: list[int], slot: int = 0) -> int:
        self.client.request(MinibatchRequest(slot, "train", 0, 0, np.array(indices)))
        return self.client.wait()

    def exit_status(self) -> int | None:
        self.process.join(END_SECONDS)
        return self.process.exitcode


def start(builder: MinibatchBuilder, batch: int) -> Loading:
    slots = HostSlots.create(SlotLayout.of_pictures(batch, builder.picture_size), rank=0)
    here, there = CONTEXT.Pipe()
    launcher, report = CONTEXT.Pipe()
    table = HeartbeatTable.create(("launcher", "loader 0"), timeout=60)
    context, status = ChildContext(table, index=1), StatusSlot(table, index=1)
    arguments = (context, proc_load.serve, there, slots, status, report)
    process = CONTEXT.Process(target=enter, args=arguments, name="loader 0", daemon=True)
    process.start()
    there.close()
    report.close()
    launcher.send(builder)
    return Loading(process, here, launcher, ProcessLoader(here), slots.arrays)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_coded(tmp_path, (4, 4, 4, 1))


@pytest.fixture
def loading(dataset: Dataset) -> Iterator[Loading]:
    loading = start(MinibatchBuilder(dataset, dataset, SETTINGS, crop_here=False), batch=3)
    yield loading
    loading.connection.close()
    loading.process.kill()
    loading.process.join()


@pytest.mark.parametrize(("trainers", "crop_here"), [(1, True), (2, False), (3, True)])
def test_every_picture_reaches_its_trainer_once_an_epoch(
    dataset: Dataset, trainers: int, crop_here: bool
) -> None:
    builder = MinibatchBuilder(dataset, dataset, SETTINGS, crop_here)
    order = epoch_order(dataset.counts, "images", 3, 0)

    def wanted(rank: int) -> Iterator[MinibatchRequest]:
        for k in range(minibatch_count(13, 3 * trainers)):
            rows = global_minibatch(order, k, 3 * trainers)[3 * rank : 3 * rank + 3]
            yield MinibatchRequest(k % 2, "train", 0, k, rows)

    loaders = [start(builder, batch=3) for _ in range(trainers)]
    arrived = []
    for rank, loading in enumerate(loaders):
        pipeline = InputPipeline(wanted(rank), loading.client)
        for slot in (loading.slots[number] for number in pipeline):
            for i in range(int(slot.valid)):
                index, label = slot.pictures[i, 0, 0, 1:].tolist()
                expected = coded_picture(index, label)
                if crop_here:
                    row, column = slot.origins[i]
                    expected = expected[row : row + 6, column : column + 6]
                    expected = expected[:, ::-1] if slot.mirrored[i] else expected
                np.testing.assert_array_equal(slot.pictures[i], expected)
                assert (slot.indices[i], slot.labels[i]) == (index, label)
                arrived.append((index, label))
        pipeline.close()
    assert sorted(arrived) == [(i, label_of(i)) for i in range(13)]
    assert [loading.exit_status() for loading in loaders] == [0] * trainers


def test_one_slot_is_filled_while_the_other_is_read(loading: Loading) -> None:
    assert loading.ask([1, 2], slot=0) == 0
    before = loading.slots[0].pictures.copy()
    assert loading.ask([3, 4, 5], slot=1) == 1
    np.testing.assert_array_equal(loading.slots[0].pictures, before)
    assert [int(slot.valid) for slot in loading.slots] == [2, 3]
    for slot, index in ((0, 2), (1, 4)):
        expected = coded_picture(index, label_of(index))
        np.testing.assert_array_equal(loading.slots[slot].pictures[1], expected)
    loading.client.close()
    assert loading.exit_status() == 0


class Noting:
    """A minibatch builder that notes the activity that is shown while it works."""

    def __init__(self, status: StatusSlot) -> None:
        self.status, self.seen = status, [Activity(status.table.activities[status.index])]

    def fill(self, slot: Slot, request: MinibatchRequest) -> None:
        self.seen.append(Activity(self.status.table.activities[self.status.index]))

    def close(self) -> None:
        pass


def test_a_loader_shows_what_it_is_doing() -> None:
    here, there = CONTEXT.Pipe()
    status = StatusSlot(HeartbeatTable.create(("launcher", "loader 0"), timeout=60), index=1)
    builder, client = Noting(status), ProcessLoader(here)
    slots = HostSlots.create(SlotLayout.of_pictures(1, 6), rank=0)
    arguments = (builder, there, slots, status, here)
    loader = threading.Thread(target=proc_load.serve, args=arguments, daemon=True)
    loader.start()
    client.request(MinibatchRequest(0, "train", 0, 0, np.array([0])))
    client.wait()
    assert builder.seen == [Activity.STARTING, Activity.READING]
    assert status.table.activities.tolist() == [0, Activity.IDLE]
    client.close()
    loader.join(END_SECONDS)
    assert not loader.is_alive()


def failure_of(loading: Loading) -> Failed:
    """What the launcher receives; the trainer sees the loader end."""
    with pytest.raises(LoaderError, match="its loader has ended"):
        loading.client.wait()
    assert loading.exit_status() == 1
    failed = loading.launcher.recv()
    assert isinstance(failed, Failed)
    assert failed.who == "loader 0"
    return failed


@pytest.mark.parametrize(
    ("index", "kind", "message", "where"),
    [
        (8, "input", "0002.hkl: the batch file was removed", "_read_exactly"),
        (13, "fault", "IndexError: picture 13 of a split of 13", "_checked"),
    ],
)
def test_bad_input_or_a_fault_is_reported_with_its_traceback(
    loading: Loading, dataset: Dataset, index: int, kind: str, message: str, where: str
) -> None:
    loading.ask([0])
    Path(dataset.paths[2]).unlink()
    loading.client.request(MinibatchRequest(0, "train", 0, 0, np.array([index])))
    failed = failure_of(loading)
    assert failed.kind == kind
    assert message in failed.message
    assert failed.traceback.startswith("Traceback")
    assert where in failed.traceback


def test_a_message_of_another_kind_is_a_fault(loading: Loading) -> None:
    loading.connection.send(Ready())
    assert failure_of(loading).message.startswith("TypeError: a trainer sent Ready")


@pytest.mark.parametrize("busy", [True, False])
def test_a_loader_ends_quietly_when_its_trainer_is_gone(
    loading: Loading, busy: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    loading.ask([0])
    if busy:
        loading.client.request(MinibatchRequest(1, "train", 0, 1, np.array([1])))
    loading.connection.close()
    assert loading.exit_status() == 0
    assert capfd.readouterr().err == ""


def start_and_die(dataset: Dataset, connection: Connection) -> None:
    loading = start(MinibatchBuilder(dataset, dataset, SETTINGS, crop_here=False), batch=3)
    loading.ask([0])
    # The trainer's end of the pipe stays open elsewhere.
    connection.send(loading.connection)
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_ends_when_the_program_that_started_it_is_gone(dataset: Dataset) -> None:
    here, there = CONTEXT.Pipe()
    launcher = CONTEXT.Process(target=start_and_die, args=(dataset, there))
    launcher.start()
    trainer_end = here.recv()
    here.send("die")
    launcher.join(END_SECONDS)
    assert trainer_end.poll(END_SECONDS)
    with pytest.raises(EOFError):
        trainer_end.recv()
