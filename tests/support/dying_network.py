"""AlexNet whose trainers end themselves, between any two messages of theirs.

`DEATHS` names a file that has a byte for each death so far: the number decides who dies next, and
when. With `DEATHS_OF` only that trainer dies, in its first message.
"""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alex_net import AlexNet
from tandem.artifacts import run_folder
from tandem.training.trainer import Trainer

MESSAGES = range(14, 54)  # in which somebody dies; a step has six of each trainer, 12 of the first
STOPPED, SAVING = (
    0.05,
    0.1,
)  # chances: it is stopped instead, or killed while it writes a checkpoint


class DyingAlexNet(AlexNet):
    """The network; what its trainers do is changed where this module is imported."""


def train(trainer: Trainer) -> None:
    """Train, after arranging the next death."""
    arrange(trainer)
    _train(trainer)


def arrange(trainer: Trainer) -> None:
    """Decide whether and when this trainer dies; all draw the same numbers."""
    file, only = Path(os.environ["DEATHS"]), os.environ.get("DEATHS_OF")
    count = file.stat().st_size if file.exists() else 0
    chance = random.Random(f"{os.environ.get('SEED', 1)} {count}")
    group: Any = trainer.group
    victims = chance.sample(range(group.size), chance.choice([1, 1, 1, min(2, group.size)]))
    at, after = [chance.choice(MESSAGES) for _ in range(group.size)], chance.random() < 0.5
    number = signal.SIGSTOP if chance.random() < STOPPED else signal.SIGKILL
    saving = chance.random() < SAVING
    if only is not None:
        victims, at, number, saving = [int(only)], [0] * group.size, signal.SIGKILL, False
    if trainer.rank not in victims or count >= int(os.environ.get("MOST", 1)):
        return

    def die() -> None:
        with file.open("ab") as deaths:
            deaths.write(b"x")
        os.kill(os.getpid(), number)

    if saving:  # its own checkpoint's, or that of the last step when another has died
        run_folder.save_checkpoint = lambda *_: die()
        if trainer.rank == 0:
            return
    watch, left = group._watch, [at[trainer.rank]]

    def counted(rank: int, call: Callable[..., Any], *arguments: object) -> Any:
        left[0] -= 1
        if left[0] == -1 and not after:
            die()
        found = watch(rank, call, *arguments)
        if left[0] == -1:
            die()
        return found

    group._watch = counted


_train = Trainer.train
Trainer.train = train  # type: ignore[method-assign, assignment]
