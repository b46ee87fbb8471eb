"""Device memory between processes, and minibatches from a loader to its trainer."""

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from tandem.backend import give_back_memory, on_stream
from tandem.errors import InputError
from tandem.memory import Slot, SlotLayout
from tandem.memory.cuda import (
    BufferHandle,
    CudaBuffer,
    CudaDriver,
    CudaSlot,
    SlotHandle,
    SlotUploader,
)
from tests.gpu.processes import process, receive
from tests.support.tiny import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

LAYOUT = SlotLayout.of_pictures(batch_size=64, picture_size=128)
MINIBATCHES = 20
MIB = 1 << 20


def tensor(array: Any) -> torch.Tensor:
    return torch.as_tensor(array, device="cuda:0")


def test_a_gpu_is_known_by_what_it_is(driver: CudaDriver) -> None:
    assert driver.identity == f"{torch.cuda.get_device_properties(0).uuid}"
    assert driver.can_reach(driver.identity)
    assert not driver.can_reach("another")


def test_what_pytorch_keeps_is_given_back(driver: CudaDriver) -> None:
    circle: list[Any] = [torch.zeros(64 * MIB, device="cuda:0")]
    circle.append(circle)
    kept = torch.cuda.memory_reserved()
    del circle
    give_back_memory()
    assert torch.cuda.memory_reserved() <= kept - 64 * MIB


def test_pages_of_the_host_are_locked_and_unlocked(driver: CudaDriver) -> None:
    stream, buffer = driver.stream(), CudaBuffer.create(driver, MIB)
    pages = np.full(MIB, 7, np.uint8)
    for _ in range(2):  # what is locked can't be locked again
        driver.lock_pages(pages)
        driver.upload(buffer.address, pages, stream)
        stream.synchronize()
        driver.unlock_pages(pages)
    assert (tensor(buffer.array(MIB, "uint8")).cpu().numpy() == 7).all()


def test_a_buffer_is_zeros_that_pytorch_sees_without_a_copy(driver: CudaDriver) -> None:
    buffer = CudaBuffer.create(driver, 4096)
    view = tensor(buffer.array((4, 8), "float32", offset=256))
    assert view.data_ptr() == buffer.address + 256
    assert buffer.address % 256 == 0
    assert (view == 0).all()
    view.copy_(torch.arange(32.0).reshape(4, 8))
    turned = tensor(buffer.array((4, 8), "float32", offset=256).transpose(1, 0))
    assert turned[3, 1].item() == 11
    assert turned.stride() == (1, 8)
    buffer.close()


def answer(handle: BufferHandle, report: Connection) -> None:
    """Double what the buffer holds, close it, and say so."""
    opened = CudaBuffer.open(CudaDriver(0), handle)
    view = tensor(opened.array(1000, "float32"))
    view.mul_(2)
    torch.cuda.synchronize()
    del view
    opened.close()
    report.send("closed")


def test_a_handle_opens_the_same_memory_in_another_process(driver: CudaDriver) -> None:
    buffer = CudaBuffer.create(driver, 4000)
    view = tensor(buffer.array(1000, "float32"))
    view.copy_(torch.arange(1000.0))
    torch.cuda.synchronize()
    with process(answer, buffer.handle()) as (_, pipe):
        assert receive(pipe) == "closed"
    assert torch.equal(view.cpu(), 2 * torch.arange(1000.0))
    buffer.close()


def test_a_process_does_not_open_its_own_handle(driver: CudaDriver) -> None:
    buffer = CudaBuffer.create(driver, 4000)
    with pytest.raises(ValueError, match="made by this process"):
        CudaBuffer.open(driver, buffer.handle())
    buffer.close()


def test_too_little_memory_is_bad_input(driver: CudaDriver) -> None:
    with pytest.raises(InputError, match=r"MiB are needed, .* are free"):
        CudaBuffer.create(driver, 1 << 42)


def minibatch(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    (shape, _), (labels, _) = LAYOUT.arrays["pictures"], LAYOUT.arrays["labels"]
    return rng.integers(0, 256, shape, np.uint8), rng.integers(0, 1000, labels)


def load(handles: list[SlotHandle], pipe: Connection) -> None:
    """Fill slots as they are asked for; a request is a slot's and a minibatch's number."""
    driver = CudaDriver(0)
    uploader = SlotUploader(driver, [CudaSlot.open(driver, LAYOUT, h) for h in handles])

    def fill(slot: Slot) -> None:
        slot.pictures[...], slot.labels[...] = minibatch(number)
        slot.valid[...] = len(slot.labels)

    while (request := pipe.recv()) is not None:
        place, number = request
        uploader.fill(place, fill)
        pipe.send(place)
    uploader.close()
    pipe.send("closed")


def test_minibatches_arrive_pixel_by_pixel(driver: CudaDriver) -> None:
    """The device is kept busy, so that only the events hold copies back."""
    slots = [CudaSlot.create(driver, LAYOUT) for _ in range(2)]
    stream = driver.stream()
    seen = []
    with process(load, [slot.handle() for slot in slots]) as (_, pipe):
        pipe.send((0, 0))
        with on_stream("cuda:0", stream.handle):
            for number in range(MINIBATCHES):
                slot = slots[receive(pipe)]
                if number + 1 < MINIBATCHES:
                    pipe.send(((number + 1) % 2, number + 1))
                slot.begin_reading(stream)
                torch.cuda._sleep(20_000_000)  # some ten milliseconds
                arrays = slot.arrays
                seen.append((tensor(arrays.pictures).clone(), tensor(arrays.labels).clone()))
                slot.end_reading(stream)
        stream.synchronize()
        pipe.send(None)
        assert receive(pipe) == "closed"
    for number, (pictures, labels) in enumerate(seen):
        expected = minibatch(number)
        np.testing.assert_array_equal(pictures.cpu().numpy(), expected[0])
        np.testing.assert_array_equal(labels.cpu().numpy(), expected[1])
    for slot in slots:
        slot.close()


def hold(nbytes: int, handle: BufferHandle | None, report: Connection) -> None:
    """Allocate memory, open what is given, and wait to be killed."""
    driver = CudaDriver(0)
    buffer = CudaBuffer.create(driver, nbytes)
    opened = None if handle is None else CudaBuffer.open(driver, handle)
    report.send((buffer.nbytes, opened is not None))
    signal.pause()


@pytest.mark.parametrize("opens", [False, True])
def test_a_killed_process_leaves_no_memory(driver: CudaDriver, opens: bool) -> None:
    own = CudaBuffer.create(driver, 64 * MIB)
    before = torch.cuda.mem_get_info(0)[0]
    with process(hold, 1024 * MIB, own.handle() if opens else None) as (child, pipe):
        assert receive(pipe) == (1024 * MIB, opens)
        assert torch.cuda.mem_get_info(0)[0] < before - 1000 * MIB
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(10)
    assert wait_until(lambda: torch.cuda.mem_get_info(0)[0] >= before - 64 * MIB, 10)
    own.close()
