"""Minibatches whose loss or gradient is not finite, and what follows."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tandem.artifacts.metrics_log import NotFiniteRecord
from tandem.config.schema import Config
from tandem.data.manifest import read_any_manifest
from tandem.distributed import Group
from tandem.errors import InputError
from tandem.training.reports import Reports

log = logging.getLogger(__name__)

MOST_SKIPS = 10  # minibatches in a row


class NotFinite(Exception):
    """The trainers have agreed that a loss or a gradient is not finite, and that the run ends."""

    def __init__(self, message: str, epoch: int, minibatch: int) -> None:
        super().__init__(message)
        self.epoch, self.minibatch = epoch, minibatch  # both from 0


@dataclass(frozen=True)
class Position:
    """A minibatch in a run, all from 0."""

    epoch: int
    minibatch: int
    step: int  # of the whole run


class Refusals:
    """Does what `on_nan` says with a minibatch before any weight has changed."""

    def __init__(
        self, config: Config, rank: int, group: Group, reports: Reports, in_step: bool
    ) -> None:
        self._config, self._rank, self._group = config, rank, group
        self._reports, self._in_step = reports, in_step
        self.in_a_row = 0

    def refuse(self, at: Position, rate: float, pictures: Sequence[int]) -> None:
        """Skip a minibatch, or end the run.

        Parameters
        ----------
        pictures : sequence of int
            Dataset indices of the pictures that the trainers found it with.

        Raises
        ------
        NotFinite
            The run must end, and all trainers find this in the same step.
        ArithmeticError
            The run must end, and the other trainers do not know of it.
        """
        self.in_a_row += 1
        action = self._config.on_nan
        if action == "skip" and self.in_a_row > MOST_SKIPS:
            action = "stop"
        # A trainer that reports nothing need not read a million names.
        reports = self._rank == 0 or action != "skip" or not self._in_step
        names = self._names(pictures) if reports else []
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        text = (
            f"the loss or a gradient is not finite in step {at.step + 1} "
            f"(epoch {at.epoch + 1}, minibatch {at.minibatch + 1}), at rate {rate:.3g}, "
            f"with the pictures {shown}"
        )
        if action != "rollback":  # which is recorded when the minibatch is passed over
            self._record(at, action, lambda: names if reports else self._names(pictures))
        if action != "skip":
            self._end_run(text + self._hint() * (action == "stop"), at)
        self._reports.notice(f"{text}: skipped")
        if self._rank > 0 and not self._in_step:  # trainer 0 does not know of it
            log.warning("%s: skipped", text)

    def record(self, at: Position, action: str, pictures: Sequence[int]) -> None:
        """Record a minibatch that is left out."""
        self._record(at, action, lambda: self._names(pictures))

    def _record(self, at: Position, action: str, names: Callable[[], Sequence[str]]) -> None:
        place = at.epoch + 1, at.step + 1, at.minibatch + 1
        self._reports.record(lambda: NotFiniteRecord(*place, action, tuple(names())))

    def _hint(self) -> str:
        if self.in_a_row > MOST_SKIPS:
            return f"; {MOST_SKIPS} minibatches before it were skipped: that does not help"
        return "; a smaller learning_rate may help, or on_nan: skip or rollback"

    def _end_run(self, text: str, at: Position) -> NoReturn:
        if not self._in_step:
            raise ArithmeticError(text)  # the other trainers do not know of it
        # The first to raise ends the run: trainer 0 must have recorded why by then.
        self._group.barrier()
        raise NotFinite(text, at.epoch, at.minibatch)

    def _names(self, pictures: Sequence[int]) -> list[str]:
        """The names of training pictures. Read when they are needed: there may be a million.

        Their numbers in the manifest, where that is gone or another by now: it is not why the run
        ends.
        """
        try:
            manifest = read_any_manifest(self._config.manifest_path)
            return [manifest.name("train", index) for index in pictures]
        except (InputError, LookupError) as error:
            log.warning("pictures are named by their numbers: %s", error)
            return [f"picture {index}" for index in pictures]
