"""Where the trainers of one machine wait for one another and pass small messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Message = TypeVar("Message")


class PeerLost(Exception):
    """Another trainer ended while this one waited for it: a consequence, never the cause."""


@dataclass(frozen=True)
class LocalGroup:
    """One trainer's place at the group: pipes in a star around trainer 0.

    A pipe reports the end of the process at its other end at once, whatever killed it, and holds
    no lock that a dead process could keep; so no trainer waits for a dead one. How long a
    living one takes is not judged: a step or a compilation may take minutes. It travels to a child
    only while that child is being started.

    Parameters
    ----------
    rank : int
        This trainer's number, from 0.
    links : sequence of Connection
        For trainer 0 one to each other trainer, by rank; for the others one, to trainer 0.
    """

    rank: int
    links: Sequence[Connection]

    def barrier(self) -> None:
        """Return when every trainer has called this.

        Raises
        ------
        PeerLost
            Another trainer has ended.
        """
        self.all_gather_object(None)

    def all_gather_object(self, message: Message) -> tuple[Message, ...]:
        """Pass a small message to every trainer.

        Parameters
        ----------
        message : picklable
            From this trainer.

        Returns
        -------
        tuple
            The messages of all trainers by rank, the same at every trainer.

        Raises
        ------
        PeerLost
            Another trainer has ended.
        """
        if self.rank == 0:
            messages = (message, *self._receive_all())
            for rank, link in enumerate(self.links, start=1):
                self._watch(rank, link.send, messages)
            return messages
        self._watch(0, self.links[0].send, message)
        return self._watch(0, self.links[0].recv)

    def _receive_all(self) -> list[Any]:
        """One message from every other trainer; whoever has ended is noticed before the slow."""
        received: dict[int, Any] = {}
        while len(received) < len(self.links):
            missing = [link for r, link in enumerate(self.links, start=1) if r not in received]
            for link in wait(missing):
                assert isinstance(link, Connection)
                rank = self.links.index(link) + 1
                received[rank] = self._watch(rank, link.recv)
        return [received[rank] for rank in sorted(received)]

    def close(self) -> None:
        """Give up the place: the others learn of it in their next group."""
        for link in self.links:
            link.close()

    def _watch(self, rank: int, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except (EOFError, OSError) as error:
            raise PeerLost(f"trainer {rank} ended while trainer {self.rank} met it") from error


def local_groups(trainers: int) -> list[LocalGroup]:
    """The places of all trainers, by rank, joined by new pipes."""
    context = get_context("spawn")
    pipes = [context.Pipe(duplex=True) for _ in range(trainers - 1)]
    centre = LocalGroup(0, [near for near, _ in pipes])
    return [centre, *(LocalGroup(rank, [far]) for rank, (_, far) in enumerate(pipes, start=1))]
