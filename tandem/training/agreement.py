"""Votes of all trainers, by which they act alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tandem.artifacts.metrics import Sums
from tandem.distributed import Group
from tandem.processes.messages import Stop
from tandem.training.messages import Continuation, StepVote


class LauncherLost(Exception):
    """The launcher has ended; so must this trainer."""


@dataclass(frozen=True)
class Agreement:
    """The means by which a trainer votes."""

    group: Group
    launcher: Connection
    snapshot_is_due: Callable[[], bool]

    def vote(
        self,
        not_finite: tuple[int, ...] = (),
        awaits_launcher: bool = False,
        sums: Sums | None = None,
    ) -> Sequence[StepVote]:
        """All trainers' votes, the same everywhere. Collective.

        With `awaits_launcher` this trainer has reported `EpochEnded`, and votes as the launcher has
        answered, however late that is.

        Raises
        ------
        LauncherLost
            The launcher has ended.
        """
        stop = ends = False
        rates: tuple[float, ...] = ()
        try:
            while awaits_launcher or self.launcher.poll():
                message = self.launcher.recv()
                stop |= isinstance(message, Stop)
                if isinstance(message, Continuation):
                    ends, rates, awaits_launcher = message.ends, message.rates, False
        except (EOFError, OSError):
            raise LauncherLost from None
        vote = StepVote(stop, self.snapshot_is_due(), not_finite, ends, rates, sums)
        return self.group.all_gather_object(vote)
