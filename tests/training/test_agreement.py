"""Votes of a trainer, and its wait for the launcher's answer."""

import threading
import time
from multiprocessing import Pipe
from typing import Any

import pytest

from tandem.processes.messages import Stop
from tandem.training.agreement import Agreement, LauncherLost
from tandem.training.messages import Continuation, StepVote


class Alone:
    """A group of one."""

    def all_gather_object(self, message: Any) -> tuple[Any, ...]:
        return (message,)


def agreement() -> tuple[Any, Agreement]:
    launcher, mine = Pipe()
    group: Any = Alone()
    return launcher, Agreement(group, mine, lambda: False)


def test_a_vote_without_a_message_does_not_wait() -> None:
    launcher, mine = agreement()
    assert mine.vote() == (StepVote(),)
    launcher.send(Stop())
    assert mine.vote((3,)) == (StepVote(stop=True, not_finite=(3,)),)
    assert mine.vote() == (StepVote(),)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("stop", [False, True])
def test_who_awaits_the_launcher_votes_by_its_answer(ends: bool, stop: bool) -> None:
    """A request to stop that comes meanwhile is no answer, and is not forgotten."""
    launcher, mine = agreement()
    if stop:
        launcher.send(Stop())
    answer = threading.Timer(0.2, launcher.send, [Continuation(ends)])
    begun = time.monotonic()
    answer.start()
    assert mine.vote(awaits_launcher=True) == (StepVote(stop=stop, ends=ends),)
    assert time.monotonic() - begun >= 0.2
    assert mine.vote() == (StepVote(),)


def test_no_wait_outlives_the_launcher() -> None:
    launcher, mine = agreement()
    threading.Timer(0.1, launcher.close).start()
    with pytest.raises(LauncherLost):
        mine.vote(awaits_launcher=True)
