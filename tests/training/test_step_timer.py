"""Where the time of a step goes."""

import time
from typing import cast

import pytest

from tandem.artifacts.metrics import Seconds
from tandem.processes.heartbeat import StatusSlot
from tandem.training.messages import Activity
from tandem.training.step_timer import StepTimer


class Shown:
    def __init__(self) -> None:
        self.activities: list[Activity] = []

    def show(self, activity: Activity) -> None:
        self.activities.append(activity)


def test_each_second_belongs_to_one_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shown = Shown()
    timer = StepTimer(cast(StatusSlot, shown))
    for _ in range(2):
        timer.begin(Activity.WAITING)
        now[0] += 3
        for seconds in (10, 20):
            timer.enter(Activity.COMPUTING)
            now[0] += seconds
            timer.enter(Activity.EXCHANGING)
            now[0] += seconds / 10
        assert timer.end() == Seconds(compute=30, load_wait=3, exchange=3, steps=36)
        now[0] += 1000  # between steps
    step = [Activity.WAITING, *[Activity.COMPUTING, Activity.EXCHANGING] * 2]
    assert shown.activities == 2 * step
