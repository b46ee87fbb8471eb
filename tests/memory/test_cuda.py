"""Device buffers, handles and the loader's copies, against a fake CUDA driver."""

import pickle
import sys
import threading

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.memory import RowType, Slot, SlotLayout
from tandem.memory.cuda import CudaBuffer, CudaDriver, CudaSlot, SlotUploader, at_thread_end
from tests.support.fake_cuda import FakeDriver, FakeEvent, FakeMachine, FakeStream

LAYOUT = SlotLayout.of_pictures(batch_size=4, picture_size=3)


@pytest.fixture
def trainer() -> FakeDriver:
    return FakeDriver(FakeMachine())


@pytest.fixture
def loader(trainer: FakeDriver) -> FakeDriver:
    return FakeDriver(trainer.machine)


def test_a_buffer_is_zeros_and_its_arrays_share_it(trainer: FakeDriver) -> None:
    buffer = CudaBuffer.create(trainer, 64)
    whole, part = buffer.array((4, 4), "float32"), buffer.array(2, np.float32, offset=8)
    assert (trainer.read(whole) == 0).all()
    trainer.write(part, [5, 6])
    assert trainer.read(whole)[0].tolist() == [0, 0, 5, 6]


def test_an_array_shows_itself_by_the_cuda_array_interface(trainer: FakeDriver) -> None:
    array = CudaBuffer.create(trainer, 64).array((2, 3), "float32", offset=4)
    interface = array.__cuda_array_interface__
    assert interface == {
        "shape": (2, 3),
        "typestr": "<f4",
        "data": (array.buffer.address + 4, False),
        "version": 3,
        "strides": None,
    }
    turned = array.transpose(1, 0)
    assert turned.shape == (3, 2)
    assert turned.__cuda_array_interface__["strides"] == (4, 12)
    expected = np.zeros((2, 3, 4, 5), "float32").transpose(0, 3, 1, 2).strides
    buffer = CudaBuffer.create(trainer, 4 * 120)
    assert buffer.array((2, 3, 4, 5), "float32").transpose(0, 3, 1, 2).strides == expected


@pytest.mark.parametrize("offset", [-4, 36, 64])
def test_an_array_past_the_end_is_refused(trainer: FakeDriver, offset: int) -> None:
    with pytest.raises(ValueError, match="ends at byte"):
        CudaBuffer.create(trainer, 64, "slot").array(8, "float32", offset)


def test_a_handle_opens_the_same_memory_in_another_process(
    trainer: FakeDriver, loader: FakeDriver
) -> None:
    buffer = CudaBuffer.create(trainer, 256, "slot 0")
    handle = pickle.loads(pickle.dumps(buffer.handle()))
    opened = CudaBuffer.open(loader, handle)
    assert (opened.nbytes, opened.device, opened.name) == (256, 0, "slot 0")
    loader.write(opened.array(3, "int64"), [1, 2, 3])
    assert trainer.read(buffer.array(3, "int64")).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="'slot 0' was made by this process"):
        CudaBuffer.open(trainer, handle)


def test_who_opened_closes_before_the_owner(trainer: FakeDriver, loader: FakeDriver) -> None:
    buffer = CudaBuffer.create(trainer, 256)
    opened = CudaBuffer.open(loader, buffer.handle())
    with pytest.raises(AssertionError, match="freed while another process has it open"):
        trainer.free(buffer.address)
    for one in (opened, buffer):
        one.close()
        one.close()
        with pytest.raises(ValueError, match="closed"):
            one.array(1, "uint8")
    assert trainer.machine.used(0) == 0


def test_what_is_refused(
    trainer: FakeDriver, loader: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="too little memory"):
        CudaBuffer.create(FakeDriver(FakeMachine(capacity=100)), 101)
    handle = CudaSlot.create(trainer, LAYOUT).handle()
    with pytest.raises(ValueError, match="its layout needs"):
        CudaSlot.open(loader, SlotLayout.of_pictures(5, 3), handle)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.delitem(sys.modules, "pycuda.driver", raising=False)
    with pytest.raises(InputError, match=r"needs PyCUDA: .*make gpu"):
        CudaDriver(0)


class Minibatches:
    """A trainer and its loader that pass minibatches through two slots."""

    def __init__(self, trainer: FakeDriver, loader: FakeDriver) -> None:
        self.trainer, self.stream = trainer, trainer.stream()
        self.slots = [CudaSlot.create(trainer, LAYOUT, f"slot {i}") for i in range(2)]
        handles = pickle.loads(pickle.dumps([slot.handle() for slot in self.slots]))
        self.opened = [CudaSlot.open(loader, LAYOUT, handle) for handle in handles]
        self.uploader = SlotUploader(loader, self.opened)
        self.seen: list[tuple[int, list[int]]] = []

    def fill(self, number: int, minibatch: int, rows: int = 4) -> None:
        """The loader's answer to a request."""

        def fill(slot: Slot) -> None:
            slot.pictures[:rows] = minibatch
            slot.labels[:rows] = np.arange(rows) + 10 * minibatch
            slot.valid[...] = rows

        self.uploader.fill(number, fill)

    def read(self, number: int) -> None:
        """The trainer's step, which the device does at some later time."""
        slot = self.slots[number]
        slot.begin_reading(self.stream)
        self.stream.work.append(lambda: self._look(slot))
        slot.end_reading(self.stream)

    def _look(self, slot: CudaSlot) -> None:
        arrays = slot.arrays
        pictures, labels = (self.trainer.read(a) for a in (arrays.pictures, arrays.labels))
        self.seen.append((int(pictures[0, 0, 0, 0]), labels.tolist()))

    def run(self, count: int) -> list[tuple[int, list[int]]]:
        """Pass minibatches; the trainer's device lags behind as far as the messages let it."""
        self.fill(0, 1)
        for step in range(count):
            if step + 1 < count:
                self.fill((step + 1) % 2, step + 2)
            self.read(step % 2)
        self.stream.synchronize()
        return self.seen


def expected(count: int) -> list[tuple[int, list[int]]]:
    return [(k, (np.arange(4) + 10 * k).tolist()) for k in range(1, count + 1)]


def test_a_trainer_that_loads_by_itself_uses_its_own_slots() -> None:
    trainer = FakeDriver(FakeMachine(permits_sharing=False))
    with pytest.raises(InputError, match="events of cuda:0 can't be shared"):
        CudaSlot.create(trainer, LAYOUT)
    slot = CudaSlot.create(trainer, LAYOUT, shared=False)
    uploader = SlotUploader(trainer, [slot])
    uploader.fill(0, lambda host: host.labels.fill(7))
    stream = trainer.stream()
    slot.begin_reading(stream)
    stream.synchronize()
    assert (trainer.read(slot.arrays.labels) == 7).all()


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_only_valid_rows_are_copied_and_all_at_once(
    trainer: FakeDriver, loader: FakeDriver, rows: int
) -> None:
    batches = Minibatches(trainer, loader)
    batches.fill(0, 3, rows)
    loader.log.clear()
    batches.fill(1, 9, rows)
    batches.uploader.close()
    small = LAYOUT.nbytes - LAYOUT.offsets["labels"]
    copies = {0: [small], 1: [27, small], 4: [LAYOUT.nbytes]}
    assert loader.log == [f"upload {nbytes}" for nbytes in copies[rows]]
    arrays = batches.slots[1].arrays
    pictures = trainer.read(arrays.pictures)
    assert (pictures[:rows] == 9).all()
    assert (pictures[rows:] == 0).all()
    assert trainer.read(arrays.valid) == rows
    assert trainer.read(arrays.labels)[:rows].tolist() == [90, 91, 92, 93][:rows]


def test_a_slot_without_pictures_is_one_copy(trainer: FakeDriver, loader: FakeDriver) -> None:
    layout = SlotLayout.of_pictures(batch_size=4, picture_size=0)
    slot = CudaSlot.create(trainer, layout)
    uploader = SlotUploader(loader, [CudaSlot.open(loader, layout, slot.handle())])

    def fill(staged: Slot) -> None:
        assert staged.pictures.shape == (4, 0, 0, 3)
        staged.indices[:2], staged.valid[...] = [7, 5], 2

    uploader.fill(0, fill)
    uploader.close()
    assert loader.log == [f"upload {layout.nbytes}"]
    assert layout.nbytes < LAYOUT.nbytes
    assert trainer.read(slot.arrays.indices).tolist() == [7, 5, 0, 0]
    assert slot.arrays.pictures.__cuda_array_interface__["data"] == (0, False)


def test_rows_of_arrays_and_their_targets_are_uploaded(
    trainer: FakeDriver, loader: FakeDriver
) -> None:
    """Of a slot that is not full only the rows that it has, and all targets."""
    layout = SlotLayout(4, RowType("float32", (40, 3)), RowType("float32", (70,)))
    slot = CudaSlot.create(trainer, layout)
    uploader = SlotUploader(loader, [CudaSlot.open(loader, layout, slot.handle())])
    rows, targets = np.full((3, 40, 3), 1.5), np.full((3, 70), -2.5)

    def fill(staged: Slot) -> None:
        staged.pictures[:3], staged.labels[:3], staged.valid[...] = rows, targets, 3

    uploader.fill(0, fill)
    uploader.close()
    assert loader.log[0] == f"upload {3 * 40 * 3 * 4}"
    found = trainer.read(slot.arrays.pictures)
    assert (found.dtype, found.shape) == (np.float32, (4, 40, 3))
    np.testing.assert_array_equal(found[:3], rows)
    assert not found[3:].any()
    np.testing.assert_array_equal(trainer.read(slot.arrays.labels)[:3], targets)
    kept = layout.without_pictures()
    assert (kept.arrays["pictures"][0], kept.targets) == ((4, 0, 3), layout.targets)
    assert kept.nbytes == layout.nbytes - layout.offsets["labels"]


@pytest.mark.parametrize(
    ("owner", "wait"),
    [
        (FakeEvent, "synchronize"),  # the staging area is written while it is copied
        (FakeStream, "wait_for_event"),  # both sides
        (CudaSlot, "begin_reading"),  # the trainer reads before the copy
        (CudaSlot, "end_reading"),  # the copy comes before the trainer's last read
    ],
)
def test_a_wait_that_is_left_out_shows(
    trainer: FakeDriver,
    loader: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    wait: str,
) -> None:
    batches = Minibatches(trainer, loader)
    monkeypatch.setattr(owner, wait, lambda *_: None)
    assert batches.run(5) != expected(5)


def test_minibatches_arrive_in_turn_and_closing_leaves_nothing(
    trainer: FakeDriver, loader: FakeDriver
) -> None:
    batches = Minibatches(trainer, loader)
    assert batches.run(5) == expected(5)
    batches.uploader.close()
    assert not loader.mapped
    for slot in batches.slots:
        slot.close()
    assert trainer.machine.used(0) == 0


def test_what_is_left_to_the_end_of_a_thread_is_done_there() -> None:
    """PyCUDA would abort a process of which a thread exits within a context."""
    here: list[int] = []
    thread = threading.Thread(
        target=at_thread_end, args=[lambda: here.append(threading.get_ident())]
    )
    thread.start()
    identity = thread.ident
    thread.join()
    assert here == [identity]
