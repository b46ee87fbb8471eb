"""Small messages between ranks, by what moves vectors."""

import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Message = TypeVar("Message")

_FRAME = 512  # bytes; a message that fits goes in one exchange
_LENGTH = 8  # bytes of a frame that say how long the message is


class Frames(ABC):
    """Part of an engine: gathers messages, each in a frame of fixed size, or what does not fit.

    Parameters
    ----------
    rank, size : int
        This rank's number and how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._frames = np.zeros((size, _FRAME), np.uint8)
        self._extents = [slice(r * _FRAME, (r + 1) * _FRAME) for r in range(size)]

    @abstractmethod
    def _pass_on(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        """Give every rank the parts of all, however long they take to come here."""

    def barrier(self) -> None:
        """Return when every rank has called this, whatever time they take."""
        self.all_gather_object(None)

    def all_gather_object(self, message: Message) -> tuple[Message, ...]:
        """Pass a small message to every rank; those of all ranks, by rank.

        Raises
        ------
        PeerLost
            Another rank is known to have ended.
        """
        data = pickle.dumps(message)
        head = len(data).to_bytes(_LENGTH, "little") + data[: _FRAME - _LENGTH]
        self._frames[self.rank, : len(head)] = np.frombuffer(head, np.uint8)
        self._pass_on(self._frames.reshape(-1), self._extents)
        lengths = [int.from_bytes(row[:_LENGTH].tobytes(), "little") for row in self._frames]
        if max(lengths) <= _FRAME - _LENGTH:
            parts = [row[_LENGTH:].tobytes() for row in self._frames]
        else:
            parts = self._gather_long(data, lengths)
        return tuple(pickle.loads(part[:n]) for part, n in zip(parts, lengths, strict=True))

    def _gather_long(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        parts = [slice(a, b) for a, b in itertools.pairwise(np.cumsum([0, *lengths]).tolist())]
        together = np.empty(parts[-1].stop, np.uint8)
        together[parts[self.rank]] = np.frombuffer(data, np.uint8)
        self._pass_on(together, parts)
        return [together[part].tobytes() for part in parts]
