"""Double buffering: what is asked for when, how long it is waited for, and a loader that fails."""

import os
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from tandem.data.augment import Augmentation
from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.errors import InputError
from tandem.memory import HostSlots, SlotLayout
from tandem.processes.messages import Ready, Stop
from tandem.training.input_pipeline import (
    InProcessLoader,
    InputPipeline,
    Loader,
    LoaderError,
    ProcessLoader,
)
from tandem.training.messages import MinibatchReady
from tests.support.coded_pictures import SIZE, coded_picture, label_of, write_coded


def requests(count: int) -> Iterator[MinibatchRequest]:
    for number in range(count):
        yield MinibatchRequest(number % 2, "train", 0, number, np.array([number]))


class FakeLoader(Loader):
    """A loader that logs its calls."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.asked: list[MinibatchRequest] = []

    def request(self, request: MinibatchRequest) -> None:
        self.events.append(f"ask {request.minibatch}")
        self.asked.append(request)

    def wait(self) -> int:
        request = self.asked.pop(0)
        self.events.append(f"wait {request.minibatch}")
        return request.slot

    def close(self) -> None:
        self.events.append("close")


def test_the_next_minibatch_is_asked_for_before_the_current_one_is_used() -> None:
    loader = FakeLoader()
    for slot in InputPipeline(requests(3), loader):
        loader.events.append(f"use slot {slot}")
    assert loader.events == [
        *("ask 0", "wait 0", "ask 1", "use slot 0", "wait 1", "ask 2", "use slot 1"),
        *("wait 2", "use slot 0"),
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_request_is_answered_once(count: int) -> None:
    pipeline = InputPipeline(requests(count), FakeLoader())
    assert list(pipeline) == [n % 2 for n in range(count)]
    with pytest.raises(StopIteration):
        next(pipeline)


def test_the_first_minibatch_is_asked_for_at_once_and_no_more() -> None:
    loader, source = FakeLoader(), requests(9)
    pipeline = InputPipeline(source, loader)
    assert loader.events == ["ask 0"]
    next(pipeline)
    assert next(source).minibatch == 2
    pipeline.close()
    assert loader.events[-1] == "close"


def test_a_slot_that_is_in_use_is_not_filled() -> None:
    pipeline = InputPipeline(
        [MinibatchRequest(1, "train", 0, k, np.array([k])) for k in range(2)], FakeLoader()
    )
    with pytest.raises(ValueError, match="two requests in a row are for slot 1"):
        next(pipeline)


def test_an_answer_for_another_slot_is_noticed() -> None:
    loader = FakeLoader()
    pipeline = InputPipeline(requests(3), loader)
    loader.asked[0] = MinibatchRequest(1, "train", 0, 0, np.array([0]))
    with pytest.raises(RuntimeError, match="filled slot 1, expected 0"):
        next(pipeline)


def test_a_trainer_without_a_loader_fills_when_it_waits_and_raises_errors(tmp_path: Path) -> None:
    dataset = write_coded(tmp_path, (4, 1))
    settings = Augmentation(SIZE, False, False, False, 0)
    slots = HostSlots.create(SlotLayout.of_pictures(1, SIZE), rank=0)

    def pipeline() -> InputPipeline:
        builder = MinibatchBuilder(dataset, dataset, settings, crop_here=False)
        return InputPipeline(requests(5), InProcessLoader(builder, slots))

    whole = pipeline()
    assert not slots.arrays[0].valid
    for index, slot in enumerate(whole):
        expected = coded_picture(index, label_of(index))
        np.testing.assert_array_equal(slots.arrays[slot].pictures[0], expected)
    whole.close()
    os.truncate(dataset.paths[0], 10)
    with pytest.raises(InputError, match="truncated"):
        next(pipeline())


# A loader process, as its messages


def test_messages_of_a_loader_process() -> None:
    here, there = Pipe()
    loader = ProcessLoader(here)
    pipeline = InputPipeline(requests(2), loader)
    assert there.recv().minibatch == 0
    there.send(MinibatchReady(0))
    assert next(pipeline) == 0
    assert there.recv().minibatch == 1
    pipeline.close()
    pipeline.close()
    assert there.recv() == Stop()
    with pytest.raises(EOFError):
        there.recv()


def test_a_loader_that_is_gone_without_a_word() -> None:
    here, there = Pipe()
    there.close()
    loader = ProcessLoader(here)
    for act in (loader.wait, lambda: loader.request(next(requests(1)))):
        with pytest.raises(LoaderError, match="its loader has ended"):
            act()
    loader.close()


def test_a_message_of_another_kind_is_refused() -> None:
    here, there = Pipe()
    there.send(Ready())
    with pytest.raises(TypeError, match="sent Ready, expected MinibatchReady"):
        ProcessLoader(here).wait()
