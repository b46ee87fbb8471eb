"""Host buffers, in one process and across two."""

import mmap
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.memory import HostBuffer
from tests.support.tiny import open_files

CONTEXT = multiprocessing.get_context("spawn")


def double(buffer: HostBuffer, ready: Connection) -> None:
    array = buffer.array((10,), "float32")
    array *= 2
    ready.send((float(array.sum()), os.get_inheritable(buffer._descriptor)))
    signal.pause()


def start(work: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


def grow(buffer: HostBuffer, ready: Connection) -> None:
    buffer.resize(40)
    buffer.array((10,), "float32")[...] = 3
    ready.send(buffer.nbytes)


def names_in_shm() -> set[Path]:
    return set(Path("/dev/shm").glob("*tandem*"))


@pytest.mark.parametrize("memfd", [True, False])
def test_two_processes_see_the_same_memory_and_a_kill_leaves_nothing(
    memfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = names_in_shm()
    buffer = HostBuffer.create(40)
    assert names_in_shm() <= before
    array = buffer.array((10,), "float32")
    assert (array == 0).all()
    array[...] = np.arange(10)
    here, there = CONTEXT.Pipe()
    process = start(double, buffer, there)
    assert here.recv() == (90.0, False)
    np.testing.assert_array_equal(array, 2 * np.arange(10))
    process.kill()
    process.join()
    array += 1
    assert array[0] == 1
    assert buffer.array((10,), "float32")[9] == 19
    assert names_in_shm() <= before


def add_by_path(path: str) -> None:
    HostBuffer.open(path).array((10,), "float32")[...] += 3


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")
def test_a_process_that_is_no_child_opens_a_buffer_by_its_path() -> None:
    buffer = HostBuffer.create(40)
    path, array = buffer.path, buffer.array((10,), "float32")
    start(add_by_path, path).join()
    assert (array == 3).all()
    buffer.close()
    with pytest.raises(InputError, match="of another process can't be opened"):
        HostBuffer.open(path, "parameters")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")
def test_a_path_that_is_no_buffer_is_not_opened(tmp_path: Path) -> None:
    """As it may come in a message that another has written."""
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"kept")
    os.mkfifo(pipe)
    for path in (file, pipe, "/dev/zero"):
        with pytest.raises(InputError, match="it is no memory of this user"):
            HostBuffer.open(str(path))
    assert file.read_bytes() == b"kept"


def test_a_buffer_may_be_sized_by_the_process_that_knows_how() -> None:
    buffer = HostBuffer.create()
    assert buffer.nbytes == 0
    here, there = CONTEXT.Pipe()
    process = start(grow, buffer, there)
    assert here.recv() == 40
    process.join()
    assert buffer.nbytes == 40
    assert (buffer.array((10,), "float32") == 3).all()


def test_a_buffer_that_grows_keeps_its_contents_and_its_arrays_and_does_not_shrink() -> None:
    buffer = HostBuffer.create(8)
    old = buffer.array((8,), "uint8")
    old[...] = 5
    buffer.resize(3 * mmap.PAGESIZE)
    new = buffer.array((3 * mmap.PAGESIZE,), "uint8")
    assert (new[:8] == 5).all()
    assert not new[8:].any()
    new[0] = 9
    assert old[0] == 9
    with pytest.raises(ValueError, match="can't shrink to 7"):
        buffer.resize(7)


def test_arrays_start_on_a_page_and_at_their_offset() -> None:
    buffer = HostBuffer.create(100)
    whole = buffer.array(100, "uint8")
    assert whole.ctypes.data % mmap.PAGESIZE == 0
    part = buffer.array((2, 3), "int32", offset=16)
    part[...] = [[1, 2, 3], [4, 5, 6]]
    assert whole[16:40].view("int32").tolist() == [1, 2, 3, 4, 5, 6]
    scalar = buffer.array((), "int64", offset=64)
    scalar[...] = 7
    assert whole[64] == 7


@pytest.mark.parametrize(("shape", "offset"), [((26,), 0), ((25,), 1), ((1,), -4), ((0,), 101)])
def test_an_array_beyond_the_buffer_is_refused(shape: tuple[int, ...], offset: int) -> None:
    with pytest.raises(ValueError, match="the buffer has 100"):
        HostBuffer.create(100).array(shape, "float32", offset)


def test_arrays_outlive_a_closed_or_forgotten_buffer_and_the_rest_refuses() -> None:
    before = open_files()
    buffer = HostBuffer.create(80)
    array, other = buffer.array((10,), "int64"), HostBuffer.create(80).array((10,), "int64")
    with pytest.raises(TypeError, match="being started"):
        pickle.dumps(buffer)
    buffer.close()
    buffer.close()
    array[...] = 7
    assert (array.sum(), other.sum()) == (70, 0)
    with pytest.raises(ValueError, match="closed"):
        buffer.array((10,), "int64")
    del array, buffer, other
    assert open_files() == before


@pytest.mark.parametrize(
    ("nbytes", "code", "message"),
    [
        (1 << 55, 28, r"PiB of shared .* 'slot 3': this machine has .*"),
        (1 << 62, 28, r"PiB of shared .* 'slot 3': this machine has .*"),
        (1 << 20, 28, r"1 MiB .* 'slot 3': No space left on device; a smaller batch_size"),
        (1 << 20, 27, r"File too large; the size of files is limited \(ulimit -f\)"),
    ],
)
def test_too_much_is_refused_with_the_reason(
    nbytes: int, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = open_files()
    with pytest.raises(InputError, match=message):
        HostBuffer.create(nbytes, "slot 3")
    assert open_files() == before
