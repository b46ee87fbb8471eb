"""Messages of a training run, beside those that every worker and its launcher exchange.

All are small frozen dataclasses; pixels and parameters never cross a pipe. A trainer asks its
loader for a `tandem.data.minibatch.MinibatchRequest`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from tandem.processes.messages import Failed

if TYPE_CHECKING:
    from tandem.artifacts.metrics import Sums


class Activity(IntEnum):
    """The activity in the `tandem.processes.heartbeat.StatusSlot` of a trainer or loader."""

    STARTING = 0
    COMPUTING = 1
    WAITING = 2  # for its loader
    EXCHANGING = 3
    VALIDATING = 4
    SAVING = 5
    READING = 6
    IDLE = 7  # a loader that has filled its slot
    AWAITING_CALLBACKS = 8
    COMPILING_GRADIENT = 9
    COMPILING_UPDATE = 10
    COMPILING_STEP = 11  # gradient and update in one function
    COMPILING_VALIDATION = 12
    FIRST_STEP = 13


STAGES = {
    Activity.STARTING: "starting processes",
    Activity.COMPILING_GRADIENT: "compiling gradient",
    Activity.COMPILING_UPDATE: "compiling update",
    Activity.COMPILING_STEP: "compiling gradient and update",
    Activity.COMPILING_VALIDATION: "compiling validation",
    Activity.FIRST_STEP: "first step",
}
"""Activities that take time before the first step, in the user's words."""


@dataclass(frozen=True)
class MinibatchReady:
    """From a loader to its trainer: the slot of this number has been filled."""

    slot: int


@dataclass(frozen=True)
class StepVote:
    """From a trainer to all: its part in the decision on a step, before any weight changes.

    Every trainer receives the votes of all, and acts on them alike.
    """

    stop: bool = False  # it has been asked to
    snapshot: bool = False  # a checkpoint is due
    # Dataset indices of its pictures, where its loss or a gradient is not finite:
    not_finite: tuple[int, ...] = ()
    ends: bool = False  # callbacks end training, at the end of an epoch
    rates: tuple[float, ...] = ()  # from trainer 0: those of `Continuation`
    sums: "Sums | None" = None  # of its rows, where a survivor saves those of all


@dataclass(frozen=True)
class Continuation:
    """From the launcher to trainer 0: the callbacks of `EpochEnded` have returned."""

    ends: bool  # whether training ends with that epoch
    # Learning rate of each step of the next epoch, of which the last goes on; empty: by `lr_policy`
    rates: tuple[float, ...] = ()


# From a trainer to the launcher, beside the records of `tandem.artifacts.metrics_log`:


@dataclass(frozen=True)
class Progress:
    """Trainer 0 has done `step` of `steps` in this part of `epoch`, all counted from 1."""

    mode: Literal["train", "validation"]
    epoch: int
    step: int
    steps: int


@dataclass(frozen=True)
class Stage:
    """Trainer 0 has begun an activity of `STAGES`."""

    activity: Activity


@dataclass(frozen=True)
class CheckpointBegun:
    """A checkpoint is being written in the background."""


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint has been written."""

    path: str


@dataclass(frozen=True)
class EpochEnded:
    """An epoch, its validation and its checkpoint are done; all wait for a `Continuation`."""

    epoch: int  # from 1


@dataclass(frozen=True)
class Notice:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Diverged(Failed):
    """A loss or a gradient is not finite; all trainers have agreed to end."""

    epoch: int  # from 0
    minibatch: int  # from 0, within the epoch
