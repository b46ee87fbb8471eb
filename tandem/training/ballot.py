"""Votes of all trainers, by which they act alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tandem.distributed import Group
from tandem.processes.messages import Stop
from tandem.training.messages import StepVote


class LauncherLost(Exception):
    """The launcher has ended; so must this trainer."""


@dataclass(frozen=True)
class Ballot:
    """What a trainer votes with."""

    group: Group
    launcher: Connection
    snapshot_is_due: Callable[[], bool]

    def vote(self, not_finite: tuple[int, ...] = ()) -> Sequence[StepVote]:
        """All trainers' votes, the same everywhere. Collective.

        Raises
        ------
        LauncherLost
            The launcher has ended.
        """
        stop = False
        try:
            while self.launcher.poll():
                stop |= isinstance(self.launcher.recv(), Stop)
        except (EOFError, OSError):
            raise LauncherLost from None
        return self.group.all_gather_object(StepVote(stop, self.snapshot_is_due(), not_finite))
