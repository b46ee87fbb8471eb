"""The replay of buckets, against a slow simulation and against sums by hand."""

import numpy as np
import pytest

from tandem.cost.overlap import Average, exposed_seconds


def by_hand(*seconds: tuple[float, float]) -> list[Average]:
    return [Average(*each) for each in seconds]


@pytest.mark.parametrize(
    ("ready", "averages", "exposed"),
    [
        # Nothing left when the last gradient is there.
        ([2.0, 5.0], [(0, 1), (0, 1)], 0),
        # The last bucket is ready at the end: all of it shows.
        ([2.0, 10.0], [(0, 1), (0, 3)], 3),
        # The first takes longer than the computing: the second waits for it.
        ([2.0, 10.0], [(0, 12), (0, 3)], 7),
        # Cores that average don't compute: it shows whenever that is.
        ([2.0, 10.0], [(1, 0), (3, 0)], 4),
        # The core's second delays the end to 11; then 9 seconds on the cable, from 2 to 12.
        ([2.0], [(1, 9)], 2),
        ([], [], 0),
    ],
)
def test_what_shows_of_an_exchange(
    ready: list[float], averages: list[tuple[float, float]], exposed: float
) -> None:
    assert exposed_seconds(10.0, ready, by_hand(*averages)) == pytest.approx(exposed)


def simulated(end: int, ready: list[int], averages: list[tuple[int, int]]) -> int:
    """Tick by tick: a bucket's work on cores first, in which nothing is computed, then on links."""
    computed = now = 0
    waiting = [(at, *seconds) for at, seconds in zip(ready, averages, strict=True)]
    cores = links = 0  # left of the bucket that is being averaged
    while computed < end or waiting or cores or links:
        if not cores and not links and waiting and waiting[0][0] <= computed:
            _, cores, links = waiting.pop(0)
            continue
        now += 1
        if cores:
            cores -= 1
        else:
            links -= links > 0
            computed += computed < end
    return now - end


def test_it_agrees_with_a_simulation() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 6))
        end = int(rng.integers(1, 60))
        ready = sorted(rng.integers(0, end + 1, count).tolist())
        averages = [(int(c), int(n)) for c, n in rng.integers(0, 15, (count, 2))]
        expected = simulated(end, ready, averages)
        found = exposed_seconds(float(end), [float(at) for at in ready], by_hand(*averages))
        assert found == pytest.approx(expected), (end, ready, averages)


def test_by_cores_alone_there_is_no_gain() -> None:
    """As measured within one machine: docs/clusters.md."""
    averages = by_hand((0.3, 0), (0.2, 0), (0.1, 0))
    assert exposed_seconds(2.0, [0.5, 1.0, 2.0], averages) == pytest.approx(0.6)
