"""Host memory that several processes see and that is freed however they end."""

import contextlib
import errno
import math
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import InputError
from tandem.memory.buffer import Buffer

_NO_SPACE = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EINVAL, errno.EOVERFLOW)


class HostBuffer(Buffer):
    """Anonymous shared memory, page-aligned and zero at first.

    The memory is an unnamed file (`os.memfd_create`) that exists as long as a process has it open
    or mapped: the kernel frees it, however processes end, and nothing can be left in ``/dev/shm``.
    Where there is no memfd, a POSIX segment is used whose name is removed at once.

    It can be an argument of a `multiprocessing` process that is started with the "spawn" method,
    and is only then pickled: its descriptor is passed to the child, which maps it again. After
    `close`, arrays that are still in use stay valid: the mapping goes with the last of them.

    Made by `create`, or by `open` over one that another process has made.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # this one, and those before
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
            The system has too little memory.
        ValueError
            `nbytes` is negative.
        """
        try:
            descriptor = _open_unnamed(name)
        except OSError as error:
            raise InputError(
                f"no shared memory can be allocated for {name!r}: {error.strerror}"
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
        """Open a buffer by its `path` in another process, which has not closed it.

        Raises
        ------
        InputError
            The system does not permit it, the buffer no longer exists, or it is a file with a name.
        """
        problem = f"shared memory {name!r} of another process can't be opened: {path}: "
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InputError(f"{problem}{error.strerror}") from error
        found = cls(descriptor, name)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink or about.st_uid != os.getuid():
            found.close()
            raise InputError(f"{problem}it is no memory of this user")
        return found

    @property
    def path(self) -> str:
        """Path by which another process of the same user on this machine opens it. Linux only."""
        self._check_open()
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def fileno(self) -> int:
        """Descriptor of the memory, which can be passed to another process."""
        self._check_open()
        return self._descriptor

    @property
    def nbytes(self) -> int:
        """Size in bytes, whichever process has set it."""
        self._check_open()
        return os.fstat(self._descriptor).st_size

    def resize(self, nbytes: int) -> None:
        """Enlarge the buffer to `nbytes` for every process that has it, and keep its contents.

        A process sees the new part in arrays that it takes afterwards. A buffer cannot shrink: a
        process that touches a removed page is killed.

        Raises
        ------
        InputError
            The system has too little memory.
        ValueError
            `nbytes` is less than the present size.
        """
        present = self.nbytes
        if nbytes < present:
            raise ValueError(f"{self.name!r} has {present} bytes and can't shrink to {nbytes}")
        if nbytes == present:
            return
        # Pages are granted when they are first touched, and a process that touches one too many is
        # killed without a message. So a size that can never be granted is refused here.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > memory:
            raise self._shortage(nbytes, f"this machine has {_human(memory)} of memory")
        try:
            os.ftruncate(self._descriptor, nbytes)
            if not hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate"):
                # /dev/shm has a size of its own, small in containers, and exceeding it kills.
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise self._shortage(nbytes, error.strerror, error.errno) from error

    def _view(self, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> npt.NDArray[Any]:
        if 0 in shape:
            return np.empty(shape, dtype)
        end = offset + math.prod(shape) * dtype.itemsize
        if self._mapping is None or len(self._mapping) < end:
            self._map(self.nbytes)
        return np.ndarray(shape, dtype, buffer=self._mapping, offset=offset)

    def was_mapped(self, array: npt.NDArray[Any]) -> bool:
        """Test if an array lies where this memory was mapped before it has grown."""
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        is_mapping = isinstance(base, mmap.mmap) and base is not self._mapping
        return is_mapping and base in self._mappings

    def _reaches(self, end: int) -> bool:
        # A buffer never shrinks, so the system need not be asked about what is mapped.
        return (self._mapping is not None and end <= len(self._mapping)) or end <= self.nbytes

    def close(self) -> None:
        self._mapping = None
        self._release()

    def _map(self, size: int) -> None:
        try:
            self._mapping = mmap.mmap(self._descriptor, size)
        except OSError as error:
            raise self._shortage(size, error.strerror, error.errno) from error
        self._mappings.add(self._mapping)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise ValueError(f"the buffer {self.name!r} is closed")

    def _shortage(self, nbytes: int, reason: str | None, code: int | None = None) -> InputError:
        remedy = "a smaller batch_size, width or number of devices needs less"
        if code == errno.EFBIG:
            remedy = "the size of files is limited (ulimit -f), and it counts as one"
        return InputError(
            f"{_human(nbytes)} of shared memory can't be allocated for {self.name!r}: "
            f"{reason}; {remedy}"
        )

    def __reduce__(self) -> tuple[Callable[..., "HostBuffer"], tuple[Any, str]]:
        self._check_open()
        if context.get_spawning_popen() is None:
            raise TypeError(
                "a HostBuffer can be pickled only as an argument of a process that is being "
                "started with multiprocessing's spawn method"
            )
        return _received, (reduction.DupFd(self._descriptor), self.name)


class ArrayBuffer(Buffer):
    """Host memory that an array, uint8 (n,), holds. It is freed with its last array."""

    name = "array"

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def _view(self, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, buffer=self.memory.data, offset=offset)

    def close(self) -> None:
        pass

    def _check_open(self) -> None:
        pass


def _received(handle: Any, name: str) -> HostBuffer:
    """Make the buffer in the child from the descriptor that the parent has passed."""
    descriptor = handle.detach()
    # Programs that this process starts would keep the memory alive.
    os.set_inheritable(descriptor, False)
    return HostBuffer(descriptor, name)


def _open_unnamed(name: str) -> int:
    """Return a descriptor of an empty unnamed file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # multiprocessing.shared_memory would start a process that remembers the name, but the name is
    # gone before this function returns.
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
