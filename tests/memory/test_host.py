"""Host buffers across processes, and slots in them."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from tandem.memory import HostBuffer, Slot, SlotLayout

CONTEXT = multiprocessing.get_context("spawn")


def double(buffer: HostBuffer, ready: Connection) -> None:
    array = buffer.array((10,), "float32")
    array *= 2
    ready.send(array.sum())
    signal.pause()


def start_doubling(buffer: HostBuffer) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=double, args=(buffer, there))
    process.start()
    there.close()
    return process, here


def test_two_processes_see_the_same_memory_and_a_kill_leaves_nothing() -> None:
    names = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    buffer = HostBuffer.create(40)
    array = buffer.array((10,), "float32")
    assert (array == 0).all()
    array[...] = np.arange(10)
    process, connection = start_doubling(buffer)
    assert connection.recv() == 90
    np.testing.assert_array_equal(array, 2 * np.arange(10))
    process.kill()
    process.join()
    array += 1
    assert array[0] == 1
    if names:
        assert set(os.listdir("/dev/shm")) <= names


def test_a_buffer_may_be_sized_after_it_was_passed_on() -> None:
    buffer = HostBuffer.create()
    assert buffer.nbytes == 0
    buffer.resize(40)
    process, connection = start_doubling(buffer)
    assert connection.recv() == 0
    process.kill()
    process.join()
    with pytest.raises(ValueError, match="mapped"):
        buffer.array((10,), "float32")
        buffer.resize(80)


def test_arrays_outlive_a_closed_buffer() -> None:
    buffer = HostBuffer.create(80)
    array = buffer.array((10,), "int64")
    buffer.close()
    buffer.close()
    array[...] = 7
    assert array.sum() == 70


def test_slot_arrays_are_aligned_and_disjoint() -> None:
    layout = SlotLayout(batch_size=3, picture_size=5)
    buffer = HostBuffer.create(layout.nbytes + 64)
    slot = Slot.on(buffer, layout, offset=64)
    arrays = [getattr(slot, name) for name in layout.fields]
    base = buffer.array((1,), "uint8").__array_interface__["data"][0]
    for number, array in enumerate(arrays, start=1):
        assert (array.__array_interface__["data"][0] - base) % 64 == 0
        assert (array == 0).all()
        array[...] = number
    assert [array.max() for array in arrays] == [1, 2, 3, 4, 5, 6]
    assert slot.pictures.shape == (3, 5, 5, 3)
    assert slot.origins.shape == (3, 2)
    assert slot.valid.shape == ()
