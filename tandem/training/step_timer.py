"""The time of a training step, divided by what the trainer does."""

import time
from collections import Counter

from tandem.artifacts.metrics import Seconds
from tandem.processes.heartbeat import StatusSlot
from tandem.training.messages import Activity


class StepTimer:
    """Attributes the time of a step to activities, and shows them to the launcher."""

    def __init__(self, status: StatusSlot) -> None:
        self._status = status
        self._spent: Counter[Activity] = Counter()
        self._activity = Activity.STARTING
        self._since = 0.0

    def begin(self, activity: Activity) -> None:
        """Begin a step with an activity."""
        self._spent.clear()
        self._activity, self._since = activity, time.perf_counter()
        self._status.show(activity)

    def enter(self, activity: Activity) -> None:
        """Go on to another activity."""
        self._count()
        self._activity = activity
        self._status.show(activity)

    def end(self) -> Seconds:
        """The seconds of the step."""
        self._count()
        spent = self._spent
        return Seconds(
            compute=spent[Activity.COMPUTING],
            load_wait=spent[Activity.WAITING],
            exchange=spent[Activity.EXCHANGING],
            steps=spent.total(),
        )

    def _count(self) -> None:
        now = time.perf_counter()
        self._spent[self._activity] += now - self._since  # type: ignore[assignment]
        self._since = now
