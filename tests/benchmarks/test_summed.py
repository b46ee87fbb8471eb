"""The benchmark of sums by groups at tiny sizes: no times."""

from benchmarks.summed import measure


def test_both_kinds_of_step_are_made() -> None:
    assert all(seconds > 0 for seconds in measure(2, 1, 67, 0.05, rounds=1))
