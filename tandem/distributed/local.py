"""The trainers of one launcher as a group: messages by pipes, vectors by shared memory."""

import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from tandem.distributed.group import Group, Message, PeerLost
from tandem.memory import HostBuffer


class LocalGroup(Group):
    """Trainers of one machine, joined by pipes in a star around trainer 0.

    A pipe reports the end of the process at its other end at once, however that process ended, and
    holds no lock that a dead process could keep; so no trainer waits for a dead one. How long a
    living one takes is not limited: a step or a compilation may take minutes. A group can be sent
    to a child only while that child is being started.

    Trainer 0 has a link to each other trainer, by rank; the others have one, to trainer 0.
    """

    def __init__(self, rank: int, size: int, links: Sequence[Connection]) -> None:
        super().__init__(rank, size)
        self._links = links
        self._scratch: list[np.ndarray] = []

    @property
    def local(self) -> "LocalGroup":
        return self

    def all_gather_object(self, message: Message) -> tuple[Message, ...]:
        if self.rank == 0:
            messages = (message, *self._receive_all())
            for rank, link in enumerate(self._links, start=1):
                self._watch(rank, link.send, messages)
            return messages
        self._watch(0, self._links[0].send, message)
        return self._watch(0, self._links[0].recv)

    def _receive_all(self) -> list[Any]:
        """Receive one message from every other trainer; notice one that has ended at once."""
        received: dict[int, Any] = {}
        while len(received) < len(self._links):
            missing = [link for r, link in enumerate(self._links, start=1) if r not in received]
            for link in wait(missing):
                assert isinstance(link, Connection)
                rank = self._links.index(link) + 1
                received[rank] = self._watch(rank, link.recv)
        return [received[rank] for rank in sorted(received)]

    def all_reduce(self, vector: np.ndarray) -> None:
        first, *others = self._publish(vector)
        np.copyto(vector, first)
        for other in others:
            vector += other
        self.barrier()

    def all_to_all(self, vector: np.ndarray, received: np.ndarray, parts: Sequence[slice]) -> None:
        for row, other in zip(received, self._publish(vector), strict=True):
            row[...] = other[parts[self.rank]]
        self.barrier()

    def all_to_all_parts(
        self,
        sent: np.ndarray,
        sent_parts: Sequence[slice],
        received: np.ndarray,
        parts: Sequence[slice],
    ) -> None:
        every = self.all_gather_object((sent.nbytes, [part.start for part in sent_parts]))
        areas = self._areas(max(nbytes for nbytes, _ in every))
        areas[self.rank][: sent.nbytes].view(sent.dtype)[:] = sent
        self.barrier()
        for part, area, (nbytes, starts) in zip(parts, areas, every, strict=True):
            start = starts[self.rank]
            other = area[:nbytes].view(sent.dtype)
            received[part] = other[start : start + part.stop - part.start]
        self.barrier()

    def all_gather(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        for part, other in zip(parts, self._publish(vector, parts[self.rank]), strict=True):
            vector[part] = other[part]
        self.barrier()

    def _publish(self, vector: np.ndarray, part: slice = slice(None)) -> list[np.ndarray]:
        """Show every trainer a part of each one's vector, until the next barrier."""
        areas = self._areas(vector.nbytes)
        every = [area[: vector.nbytes].view(vector.dtype) for area in areas]
        every[self.rank][part] = vector[part]
        self.barrier()
        return every

    def _areas(self, nbytes: int) -> list[np.ndarray]:
        """Shared memory of at least this size for each trainer, uint8, by rank. Collective."""
        if not self._scratch or self._scratch[0].nbytes < nbytes:
            self._scratch = self.shared_memory(nbytes)
        return self._scratch

    def split(self, color: int) -> "LocalGroup":
        colors = self.all_gather_object(color)
        ranks = [rank for rank, other in enumerate(colors) if other == color]
        if self.rank == 0:
            links = self._send_links(colors)
        else:
            count = len(ranks) - 1 if ranks[0] == self.rank else 1
            links = [Connection(self._receive_descriptor()) for _ in range(count)]
        return self._keep(LocalGroup(ranks.index(self.rank), len(ranks), links))

    def _send_links(self, colors: Sequence[int]) -> Sequence[Connection]:
        """Make the pipes of all new groups; send the others theirs, give this trainer's."""
        own: Sequence[Connection] = ()
        for color in dict.fromkeys(colors):
            ranks = [rank for rank, other in enumerate(colors) if other == color]
            for rank, links in zip(ranks, _star(len(ranks)), strict=True):
                if rank == 0:
                    own = links
                    continue
                for link in links:
                    self._send_descriptor(rank, link.fileno())
                    link.close()
        return own

    def shared_memory(self, nbytes: int) -> list[np.ndarray]:
        # Trainer 0 makes it and passes its descriptor, which needs no /proc.
        step = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.rank == 0:
            buffer = HostBuffer.create(self.size * step, "trainers")
            for rank in range(1, self.size):
                self._send_descriptor(rank, buffer.fileno())
        else:
            buffer = HostBuffer(self._receive_descriptor(), "trainers")
        return [buffer.array(nbytes, np.uint8, rank * step) for rank in range(self.size)]

    def _send_descriptor(self, rank: int, descriptor: int) -> None:
        self._watch(rank, reduction.send_handle, self._links[rank - 1], descriptor, None)

    def _receive_descriptor(self) -> int:
        descriptor = self._watch(0, reduction.recv_handle, self._links[0])
        os.set_inheritable(descriptor, False)
        return descriptor

    def close(self) -> None:
        super().close()
        for link in self._links:
            link.close()

    def _watch(self, rank: int, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except (EOFError, OSError) as error:
            raise PeerLost(f"trainer {rank} ended while trainer {self.rank} waited for it") from (
                error
            )


def local_groups(trainers: int) -> list[LocalGroup]:
    """The group as each trainer sees it, by rank, joined by new pipes."""
    return [LocalGroup(rank, trainers, links) for rank, links in enumerate(_star(trainers))]


def _star(size: int) -> list[Sequence[Connection]]:
    """The ends of new pipes between the first and each other, by rank."""
    pipes = [get_context("spawn").Pipe(duplex=True) for _ in range(size - 1)]
    return [[near for near, _ in pipes], *([far] for _, far in pipes)]
