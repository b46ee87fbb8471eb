"""Buckets of gradients, and the thread that averages them."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from tandem.distributed.allreduce import AllReduce
from tandem.distributed.buckets import Bucket, BucketedGradients, divide
from tandem.distributed.rank_vector import HostVector
from tests.support.tiny import wait_until

OFFSETS, SIZE = {"a": 0, "b": 10, "c": 20, "d": 60}, 64


class Note(AllReduce):
    """Doubles its vector, in another thread than the main one."""

    def __init__(self, name: str, calls: list[str], gate: threading.Event | None = None) -> None:
        self._name, self._calls, self._gate = name, calls, gate

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        if self._gate is not None:
            assert self._gate.wait(10)
        assert threading.current_thread() is not threading.main_thread()
        self._calls.append(self._name)
        vector *= 2


class Fail(AllReduce):
    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        raise ConnectionError("the other rank has ended")


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, ["d", "c", "b", "a"]),
        (19, ["d", "c", "b", "a"]),
        (20, ["d", "c", "ab"]),
        (44, ["cd", "ab"]),
        (54, ["bcd", "a"]),
        (64, ["abcd"]),
        (1000, ["abcd"]),
    ],
)
def test_a_vector_is_divided_from_its_end(most: int, expected: list[str]) -> None:
    buckets = divide(OFFSETS, SIZE, most)
    assert ["".join(sorted(bucket.names)) for bucket in buckets] == expected
    covered = [i for b in reversed(buckets) for i in range(b.extent.start, b.extent.stop)]
    assert covered == list(range(SIZE))
    for bucket in buckets:
        assert bucket.extent.stop - bucket.extent.start <= most or len(bucket.names) == 1


def make(
    calls: list[str], gate: threading.Event | None = None
) -> tuple[BucketedGradients, np.ndarray]:
    vector = np.ones(SIZE)
    buckets = divide(OFFSETS, SIZE, 44)
    works = [Note("later", calls, gate), Note("earlier", calls)]
    return BucketedGradients(buckets, HostVector([vector]), works), vector


def test_a_bucket_goes_while_others_are_being_computed() -> None:
    calls: list[str] = []
    exchange, vector = make(calls)
    exchange.before_gradients([1.0])
    exchange.on_gradient_ready("d")
    exchange.on_gradient_ready("c")
    wait_until(lambda: calls, 10)
    assert calls == ["later"]
    np.testing.assert_array_equal(vector, [1] * 20 + [2] * 44)
    exchange.on_gradient_ready("b")
    exchange.on_gradient_ready("a")
    exchange.before_update([1.0])
    assert calls == ["later", "earlier"]
    np.testing.assert_array_equal(vector, 2)


def test_buckets_go_in_their_order_whatever_gets_ready_first() -> None:
    calls: list[str] = []
    exchange, _ = make(calls)
    for _ in range(2):
        exchange.before_gradients([1.0])
        for name in "abcd":
            exchange.on_gradient_ready(name)
        exchange.before_update([1.0])
    assert calls == ["later", "earlier"] * 2


def test_a_step_that_is_not_used_ends_before_the_next_begins() -> None:
    calls: list[str] = []
    gate = threading.Event()
    exchange, _ = make(calls, gate)
    exchange.before_gradients([1.0])
    for name in "dcba":
        exchange.on_gradient_ready(name)
    threading.Timer(0.1, gate.set).start()
    exchange.before_gradients([1.0])
    assert calls == ["later", "earlier"]
    for name in "dcba":
        exchange.on_gradient_ready(name)
    exchange.leave()
    assert calls == ["later", "earlier"] * 2


def test_an_error_comes_out_where_the_buckets_are_waited_for() -> None:
    vector = HostVector([np.ones(4)])
    exchange = BucketedGradients([Bucket(frozenset("a"), slice(0, 4))], vector, [Fail()])
    exchange.before_gradients([1.0])
    exchange.on_gradient_ready("a")
    with pytest.raises(ConnectionError, match="the other rank has ended"):
        exchange.before_update([1.0])
