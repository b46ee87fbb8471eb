"""Groups of trainers: how messages and vectors pass between them, on one machine or many."""

import dataclasses
import enum
import io
import itertools
import os
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

Message = TypeVar("Message")
Made = TypeVar("Made", bound="Group")
Starter = Literal["mpirun", "torchrun"]

_FRAME = 512  # bytes; a message that fits takes one exchange
_LENGTH = 8  # bytes of a frame that hold the length of the message


class PeerLost(Exception):
    """Another trainer ended while this one waited for it: a consequence, never the cause."""


class Group(ABC):
    """The trainers of a run, or a part of them, as one of them uses it.

    All ranks of a group call its methods together, with vectors of one size and dtype, and by one
    thread at a time. Each method raises `PeerLost` where another rank is known to have ended. Ranks
    count from 0.

    Vectors are NumPy arrays. A group that can move GPU memory takes PyTorch tensors as well.
    """

    starter: Starter | None = None  # None where the ranks are processes of one launcher

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._made: list[Group] = []

    def barrier(self) -> None:
        """Return when every rank has called this, however long they take."""
        self.all_gather_object(None)

    def all_gather_object(self, message: Message) -> tuple[Message, ...]:
        """Pass a small message to every rank; return those of all, by rank.

        It is of plain values, arrays, paths, and this package's records (dataclasses) of them.
        """
        data, frames = pickle.dumps(message), self._frames
        head = len(data).to_bytes(_LENGTH, "little") + data[: _FRAME - _LENGTH]
        frames[self.rank, : len(head)] = np.frombuffer(head, np.uint8)
        extents = [slice(r * _FRAME, (r + 1) * _FRAME) for r in range(self.size)]
        self._gather_bytes(frames.reshape(-1), extents)
        lengths = [int.from_bytes(row[:_LENGTH].tobytes(), "little") for row in frames]
        if max(lengths) <= _FRAME - _LENGTH:
            parts = [row[_LENGTH:].tobytes() for row in frames]
        else:
            parts = self._gather_long(data, lengths)
        return tuple(unpacked(part[:n]) for part, n in zip(parts, lengths, strict=True))

    @abstractmethod
    def all_reduce(self, vector: Any) -> None:
        """Replace every rank's float (n,) by the sum of all, in the library's own order."""

    @abstractmethod
    def all_to_all(self, vector: Any, received: Any, parts: Sequence[slice]) -> None:
        """Give each rank its part of every vector; `parts` are by rank.

        Row r of `received`, (size, m), becomes this rank's part of the vector, (n,), of rank r.
        """

    @abstractmethod
    def all_to_all_parts(
        self, sent: Any, sent_parts: Sequence[slice], received: Any, parts: Sequence[slice]
    ) -> None:
        """Give each rank its part of every vector, of any size; both kinds of parts are by rank.

        `sent_parts` are of `sent`, (n,), and `parts`, of `received`, (m,), are filled by the ranks.
        What one rank sends has the size that the other receives, which may be 0.
        """

    @abstractmethod
    def all_gather(self, vector: Any, parts: Sequence[slice]) -> None:
        """Fill in the others' parts of a vector, (n,), by rank; it holds this rank's."""

    @abstractmethod
    def split(self, color: int) -> "Group":
        """Make a group of the ranks that give the same color, in the same order.

        It passes messages of its own, so another thread may use it.
        """

    @property
    @abstractmethod
    def local(self) -> "Group":
        """The ranks of this machine, in the same order."""

    @abstractmethod
    def shared_memory(self, nbytes: int) -> list[np.ndarray]:
        """Make memory that the ranks of one machine share, zero at first.

        Returns every rank's part, uint8 (nbytes,), by rank. No two lie in one page. Pages that
        nobody touches take no memory.
        """

    def takes_gpu_memory(self) -> bool:
        """Return whether vectors may be tensors on GPUs for all operations. Not collective."""
        return False

    def close(self) -> None:
        """Give up this group, the groups split from it, and the memory that they share.

        A rank that ends need not call it.
        """
        while self._made:
            self._made.pop(0).close()

    def abort(self, status: int) -> NoReturn:
        """End this rank at once, and with it all others. Not collective."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _keep(self, made: Made) -> Made:
        """Remember a group that was split from this one, to be closed with it."""
        self._made.append(made)
        return made

    @cached_property
    def _frames(self) -> np.ndarray:
        return np.zeros((self.size, _FRAME), np.uint8)

    def _gather_bytes(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        """Do what `all_gather` does, however late the other ranks come."""
        self.all_gather(vector, parts)

    def _gather_long(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        parts = [slice(a, b) for a, b in itertools.pairwise(np.cumsum([0, *lengths]).tolist())]
        together = np.empty(parts[-1].stop, np.uint8)
        together[parts[self.rank]] = np.frombuffer(data, np.uint8)
        self._gather_bytes(together, parts)
        return [together[part].tobytes() for part in parts]


class RankGroup(Group):
    """Ranks that mpirun or torchrun started, which send each other heartbeats."""

    starter: Starter

    @abstractmethod
    def split(self, color: int) -> "RankGroup": ...

    @abstractmethod
    def beat(self, rank: int) -> None:
        """Send another rank a heartbeat, and expect its own. Returns at once.

        Raises PeerLost if what started the ranks has ended.
        """

    def lose(self, reason: str) -> bool:
        """Make waits for other ranks raise `PeerLost` from now on; return whether they will."""
        return False

    @abstractmethod
    def beats(self) -> set[int]:
        """Return the ranks whose heartbeats have come since the last call. Raises as `beat`."""

    @abstractmethod
    def send_bytes(self, sent: Sequence[tuple[int, np.ndarray]]) -> None:
        """Send ranks vectors, uint8 (n,), in this order; return when these may be changed.

        Not collective. A rank receives one after another, and no group operation in between.
        """

    @abstractmethod
    def receive_bytes(self, rank: int) -> np.ndarray:
        """Receive the next vector that a rank sends by `send_bytes`, however late it comes."""


_NUMPY = {"_reconstruct", "scalar", "_frombuffer", "dtype", "ndarray"}
_OTHERS = {
    *("builtins.complex", "builtins.slice", "_codecs.encode"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),  # the second of Python 3.13
}


class _Unpickler(pickle.Unpickler):
    """Loads plain values, arrays and this package's records: another pickle may call anything.

    A rank's messages come by a network, and the store at which ranks find each other takes them
    from anybody who reaches it.
    """

    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        if package == "tandem" and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (
                dataclasses.is_dataclass(found)
                or issubclass(found, tuple | enum.Enum | Exception)
                or hasattr(found, "model_fields")  # settings, a pydantic model
            ):
                return found
        elif (package == "numpy" and name in _NUMPY) or f"{module}.{name}" in _OTHERS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"found {module}.{name}")


def unpacked(data: bytes) -> Any:
    """Load a message of another rank; raises PeerLost for one that no rank of a run sends."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises many types
        raise PeerLost(
            f"a message was no rank's: {error}; expected plain values, arrays and records"
        ) from error
