"""A trainer in a thread, as its launcher sees it."""

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import wait

import pytest

from tandem.launch.ranks import TrainerThread


def fail() -> None:
    raise SystemExit(1)


@pytest.mark.parametrize(("work", "status"), [(lambda: None, 0), (fail, 1)])
def test_its_end_shows_as_a_processs_does(work: object, status: int) -> None:
    here, _there = multiprocessing.Pipe()
    thread = TrainerThread(work, here)  # type: ignore[arg-type]
    assert thread.exitcode is None
    assert thread.pid == os.getpid()
    thread.start()
    assert wait([thread.sentinel], 10)
    thread.join(10)
    assert not thread.is_alive()
    assert thread.exitcode == status


def test_it_has_not_ended_while_it_has_something_to_say() -> None:
    here, there = multiprocessing.Pipe()
    thread = TrainerThread(lambda: there.send("finished"), here)
    thread.start()
    thread.join(10)
    assert not thread.goes_on
    assert thread.exitcode is None
    assert here.recv() == "finished"
    assert thread.exitcode == 0


def test_it_may_say_its_last_word_and_end_while_it_is_looked_at() -> None:
    here, there = multiprocessing.Pipe()

    class JustBefore:
        """Sees that there is nothing yet; then the thread sends, and ends."""

        def poll(self) -> bool:
            found = here.poll()
            thread.start()
            thread.join(10)
            return found

    thread = TrainerThread(lambda: there.send("finished"), JustBefore())  # type: ignore[arg-type]
    assert thread.exitcode is None
    assert here.recv() == "finished"


def test_given_up_it_is_waited_for_no_more() -> None:
    release = threading.Event()
    here, _there = multiprocessing.Pipe()
    thread = TrainerThread(lambda: release.wait(30) and None, here)
    thread.start()
    assert thread.is_alive()
    thread.kill()
    thread.join(10)  # at once
    assert not thread.is_alive()
    assert thread.goes_on
    release.set()


def test_given_up_by_agreement_it_may_still_end() -> None:
    """As a trainer that has told that it diverged, and frees its memory."""
    here, _there = multiprocessing.Pipe()
    thread = TrainerThread(lambda: time.sleep(0.5), here)
    thread.start()
    thread.kill()
    thread.await_end()
    assert not thread.goes_on
