"""Host memory that several processes see and that no death of a process leaves behind."""

import contextlib
import errno
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import InputError

_NO_SPACE = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EINVAL, errno.EOVERFLOW)


class HostBuffer:
    """Anonymous shared memory, page-aligned and zero at first. A `tandem.memory.Buffer`.

    The memory is an unnamed file (`os.memfd_create`) that exists as long as some process has it
    open or mapped: the kernel frees it, however processes end, and nothing can be left in
    ``/dev/shm``. Where there is no memfd, a POSIX segment is used whose name is removed at once.

    It may be given to a `multiprocessing` process of the "spawn" method as an argument, and only
    then be pickled: its descriptor is passed to the child, which maps it again.

    Use `create` to make one.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._release = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, nbytes: int = 0, name: str = "tandem") -> "HostBuffer":
        """Make a buffer.

        Parameters
        ----------
        nbytes : int
            Size in bytes. It may be 0, to be set by `resize`, also in another process.
        name : str
            Shown in error messages and in ``/proc/PID/maps``.

        Raises
        ------
        InputError
            There is not so much memory.
        ValueError
            `nbytes` is negative.
        """
        try:
            descriptor = _open_unnamed(name)
        except OSError as error:
            raise InputError(
                f"no shared memory can be had for {name!r}: {error.strerror}"
            ) from error
        buffer = cls(descriptor, name)
        try:
            buffer.resize(nbytes)
        except BaseException:
            buffer.close()
            raise
        return buffer

    @classmethod
    def open(cls, path: str, name: str = "tandem") -> "HostBuffer":
        """Open a buffer of another process.

        Parameters
        ----------
        path : str
            The buffer's `path` there, where it is not closed yet.
        name : str
            As in `create`.

        Raises
        ------
        InputError
            The system does not permit it, or the buffer is gone.
        """
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), name)
        except OSError as error:
            raise InputError(
                f"shared memory {name!r} of another process can't be opened: {path}: "
                f"{error.strerror}"
            ) from error

    @property
    def path(self) -> str:
        """By what another process of the same user on this machine opens it. Linux only."""
        self._check_open()
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def nbytes(self) -> int:
        """Size in bytes, also when another process has set it."""
        self._check_open()
        return os.fstat(self._descriptor).st_size

    def resize(self, nbytes: int) -> None:
        """Make the buffer larger, for every process that has it. What it holds stays.

        A process sees the new part in arrays that it takes afterwards.

        Parameters
        ----------
        nbytes : int
            Size in bytes, no smaller than now: whoever touched pages that are gone would be killed.

        Raises
        ------
        InputError
            There is not so much memory.
        ValueError
            `nbytes` is less than the present size.
        """
        present = self.nbytes
        if nbytes < present:
            raise ValueError(f"{self.name!r} has {present} bytes and can't shrink to {nbytes}")
        if nbytes == present:
            return
        # Pages are granted when they are first touched, and a process that touches one too many is
        # killed without a word. So what can never be granted is refused here.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > memory:
            raise self._shortage(nbytes, f"this machine has {_human(memory)} of memory")
        try:
            os.ftruncate(self._descriptor, nbytes)
            if not hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate"):
                # /dev/shm has a size of its own, small in containers, and going past it kills.
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise self._shortage(nbytes, error.strerror) from error

    def array(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, offset: int = 0
    ) -> npt.NDArray[Any]:
        """A writable view of the shared memory, in C order.

        Parameters
        ----------
        shape : int or sequence of int
            Of the array; ``()`` gives an array without axes.
        dtype : numpy dtype
            Of the array.
        offset : int
            Bytes from the start of the buffer, which lies on a page boundary.

        Raises
        ------
        ValueError
            The array would reach past the buffer's end, or the buffer is closed.
        """
        size, kind = self.nbytes, np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        needed = math.prod(shape) * kind.itemsize
        if offset < 0 or offset + needed > size:
            raise ValueError(
                f"an array of {kind} {shape} at byte {offset} of {self.name!r} ends at byte "
                f"{offset + needed}, and the buffer has {size}"
            )
        if needed == 0:
            return np.empty(shape, kind)
        return np.ndarray(shape, kind, buffer=self._map(size), offset=offset)

    def close(self) -> None:
        """Give up this process's share; may be called twice.

        Arrays that are still in use stay valid: the mapping goes with the last of them. Other
        processes are not concerned.
        """
        self._mapping = None
        self._release()

    def _map(self, size: int) -> mmap.mmap:
        if self._mapping is None or len(self._mapping) < size:
            try:
                self._mapping = mmap.mmap(self._descriptor, size)
            except OSError as error:
                raise self._shortage(size, error.strerror) from error
        return self._mapping

    def _check_open(self) -> None:
        if not self._release.alive:
            raise ValueError(f"the buffer {self.name!r} is closed")

    def _shortage(self, nbytes: int, reason: str | None) -> InputError:
        return InputError(
            f"{_human(nbytes)} of shared memory can't be had for {self.name!r}: {reason}; "
            "a smaller batch_size, width or number of devices needs less"
        )

    def __reduce__(self) -> tuple[Callable[..., "HostBuffer"], tuple[Any, str]]:
        self._check_open()
        if context.get_spawning_popen() is None:
            raise TypeError(
                "a HostBuffer can be pickled only as an argument of a process that is being "
                "started with multiprocessing's spawn method"
            )
        return _received, (reduction.DupFd(self._descriptor), self.name)


class ArrayBuffer:
    """Host memory that is there already, as a `tandem.memory.Buffer`.

    Parameters
    ----------
    memory : uint8 (n,)
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory, self.nbytes = memory, memory.nbytes

    def array(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, offset: int = 0
    ) -> npt.NDArray[Any]:
        """A writable view of the memory, in C order, that starts at byte `offset`."""
        return np.ndarray(shape, dtype, buffer=self.memory.data, offset=offset)

    def close(self) -> None:
        """Do nothing: the memory goes with its last array."""


def _received(handle: Any, name: str) -> HostBuffer:
    """The buffer in the child whose descriptor the parent has passed."""
    descriptor = handle.detach()
    # Programs that this process may start have no use for it, and would keep the memory alive.
    os.set_inheritable(descriptor, False)
    return HostBuffer(descriptor, name)


def _open_unnamed(name: str) -> int:
    """A descriptor of an empty file in memory that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # multiprocessing.shared_memory would do, but it starts a process to remember the name, which
    # is not needed: the name is gone before this function returns.
    import _posixshmem

    path = f"/tandem-{secrets.token_hex(8)}"
    descriptor = _posixshmem.shm_open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    with contextlib.suppress(FileNotFoundError):
        _posixshmem.shm_unlink(path)
    return descriptor


def _human(nbytes: int) -> str:
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
