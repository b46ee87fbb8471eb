"""A group ends for the living when a trainer dies."""

import multiprocessing
import os
import signal

import pytest

from tandem.distributed import LocalGroup, PeerLost, local_groups


def attend_once(place: LocalGroup) -> None:
    place.barrier()
    signal.pause()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_trainer_is_noticed_at_once(victim: int) -> None:
    context = multiprocessing.get_context("spawn")
    places = local_groups(3)
    mine = places[1 if victim == 0 else 0]
    others = [place for place in places if place is not mine]
    processes = {p.rank: context.Process(target=attend_once, args=(p,)) for p in others}
    for process in processes.values():
        process.start()
    for place in others:
        place.close()
    mine.barrier()
    pid = processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=f"trainer {victim} ended"):
        mine.barrier()
    for process in processes.values():
        process.kill()
        process.join()
