"""Everything that crosses a pipe: small frozen dataclasses, and never pixels or parameters."""

from dataclasses import dataclass
from typing import Literal

from tandem.data.minibatch import MinibatchRequest

__all__ = [
    "CheckpointBegun",
    "CheckpointWritten",
    "Diverged",
    "Failed",
    "Finished",
    "MinibatchReady",
    "MinibatchRequest",
    "Notice",
    "Progress",
    "Ready",
    "StepVote",
    "Stop",
]

# Trainer to loader: `MinibatchRequest`, which says what a slot is to hold, or


@dataclass(frozen=True)
class Stop:
    """To a loader: no more minibatches are needed, end. To a trainer: finish the step, write a
    checkpoint, end."""


# Loader to trainer


@dataclass(frozen=True)
class MinibatchReady:
    """A request has been carried out.

    Attributes
    ----------
    slot : int
        Number of the slot that is filled.
    """

    slot: int


# Trainer to all trainers, before any weight changes


@dataclass(frozen=True)
class StepVote:
    """What a trainer has to say of a step. All trainers hear all words, and act on them alike.

    Attributes
    ----------
    stop : bool
        It has been asked to stop.
    snapshot : bool
        A checkpoint is due.
    not_finite : tuple of int
        Dataset indices of its pictures, where its loss or a gradient is not finite.
    """

    stop: bool = False
    snapshot: bool = False
    not_finite: tuple[int, ...] = ()


# Launcher to trainer: Stop. Loader to launcher: Failed. Trainer to launcher: Failed, the records of
# `tandem.artifacts.metrics_log`, and


@dataclass(frozen=True)
class Ready:
    """Trainer `rank` has its weights and can begin."""

    rank: int


@dataclass(frozen=True)
class Progress:
    """Trainer 0 has done `step` of `steps` in this part of `epoch`, all counted from 1."""

    mode: Literal["train", "validation"]
    epoch: int
    step: int
    steps: int


@dataclass(frozen=True)
class CheckpointBegun:
    """A checkpoint is being written, beside the training."""


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is at `path`."""

    path: str


@dataclass(frozen=True)
class Notice:
    """Something that the user should know."""

    text: str


@dataclass(frozen=True)
class Finished:
    """Trainer `rank` has done its work, or has stopped as it was asked to."""

    rank: int


@dataclass(frozen=True)
class Failed:
    """Process `who` cannot go on.

    Attributes
    ----------
    who : str
        As "trainer 0".
    kind : "input", "diverged", "fault", "death" or "consequence"
        Bad input; a loss that is not finite; a fault of the program; an end that was seen from
        outside; what only followed from the end of another process.
    message : str
        In a sentence.
    traceback : str
        The process's own; empty where there is none.
    """

    who: str
    kind: Literal["input", "diverged", "fault", "death", "consequence"]
    message: str
    traceback: str


@dataclass(frozen=True)
class Diverged(Failed):
    """The run can't go on, because a loss or a gradient is not finite.

    Attributes
    ----------
    epoch, minibatch : int
        Where it happened, both from 0.
    """

    epoch: int
    minibatch: int
