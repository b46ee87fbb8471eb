"""Double buffering: what is asked for when, and a loader that fails."""

from collections.abc import Iterator

import numpy as np
import pytest

from tandem.data.fill import FillRequest
from tandem.run.feed import Feed


def requests(count: int) -> Iterator[FillRequest]:
    for number in range(count):
        yield FillRequest(number % 2, "train", 0, number, np.array([number]))


class Diary:
    """A loader that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.asked: list[FillRequest] = []

    def request(self, request: FillRequest) -> None:
        self.events.append(f"ask {request.minibatch}")
        self.asked.append(request)

    def wait(self) -> int:
        request = self.asked.pop(0)
        self.events.append(f"wait {request.minibatch}")
        return request.slot

    def close(self) -> None:
        self.events.append("close")


def test_the_next_minibatch_is_asked_for_before_the_current_one_is_used() -> None:
    loader = Diary()
    for slot in Feed(requests(3), loader):
        loader.events.append(f"use slot {slot}")
    assert loader.events == [
        "ask 0",
        "wait 0",
        "ask 1",
        "use slot 0",
        "wait 1",
        "ask 2",
        "use slot 1",
        "wait 2",
        "use slot 0",
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_request_is_answered_once(count: int) -> None:
    assert list(Feed(requests(count), Diary())) == [n % 2 for n in range(count)]
