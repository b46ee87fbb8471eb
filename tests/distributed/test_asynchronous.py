"""GossipAveraging against a NumPy simulation of its equations, where all is delivered in order."""

import threading
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.distributed import asynchronous
from tandem.distributed.asynchronous import ElasticServer, GossipAveraging, gossip_target
from tandem.distributed.rank_vector import HostVector


class Delivered:
    def Test(self) -> bool:
        return True


class QueueGroup:
    """Messages between ranks by queues: what is sent has arrived."""

    def __init__(self, queues: list[deque[tuple[int, np.ndarray]]], rank: int) -> None:
        self.queues, self.rank, self.size = queues, rank, len(queues)

    def split(self, color: int) -> "QueueGroup":
        return self

    def send(self, vector: np.ndarray, rank: int) -> Delivered:
        self.queues[rank].append((self.rank, vector.copy()))
        return Delivered()

    def receive(self, vector: np.ndarray) -> int | None:
        if not self.queues[self.rank]:
            return None
        source, came = self.queues[self.rank].popleft()
        vector[:] = came
        return source


def test_gossip_follows_its_equations() -> None:
    """Blot et al. 2016, algorithms 3 and 4, with local steps that add a constant."""
    ranks, p, seed, rng = 4, 0.6, 11, np.random.default_rng(0)
    queues: list[deque[tuple[int, np.ndarray]]] = [deque() for _ in range(ranks)]
    weights = [rng.normal(size=2048) for _ in range(ranks)]
    rules = [
        GossipAveraging(group, HostVector([w]), w.size, p, seed)
        for w, group in zip(weights, [QueueGroup(queues, r) for r in range(ranks)], strict=True)  # type: ignore[arg-type]
    ]
    x, a = [w.copy() for w in weights], [1 / ranks] * ranks
    inbox: list[list[tuple[np.ndarray, float]]] = [[] for _ in range(ranks)]
    sent = 0
    for step in range(30):
        for rank in range(ranks):
            change = rng.normal(size=2048)
            weights[rank] += change
            x[rank] = x[rank] + change
            rules[rank].after_update([])
            for other, share in inbox[rank]:
                x[rank] = (a[rank] * x[rank] + share * other) / (a[rank] + share)
                a[rank] += share
            inbox[rank].clear()
            target = gossip_target(seed, step, rank, ranks, p)
            if target is not None:
                a[rank] /= 2
                inbox[target].append((x[rank].copy(), a[rank]))
                sent += 1
            np.testing.assert_allclose(weights[rank], x[rank], rtol=1e-9, atol=1e-12)
            assert np.isclose(rules[rank].share, a[rank], rtol=1e-12)
    assert sent > 40
    assert np.isclose(sum(a) + sum(share for box in inbox for _, share in box), 1)


def test_all_others_are_as_likely() -> None:
    found = Counter(gossip_target(1, step, 2, 4, 0.5) for step in range(4000))
    assert set(found) == {None, 0, 1, 3}
    assert abs(found[None] - 2000) < 150
    assert all(abs(found[rank] - 667) < 120 for rank in (0, 1, 3))
    assert gossip_target(1, 0, 0, 1, 1.0) is None
    assert all(gossip_target(1, step, 0, 2, 1.0) == 1 for step in range(20))


class OneVisit(QueueGroup):
    """The first answer finds the center as it is after the visit."""

    def __init__(self, server: list[ElasticServer], came: np.ndarray) -> None:
        self.server, self.came, self.seen = server, came, np.empty_like(came)
        self.is_answered = threading.Event()

    def receive(self, vector: np.ndarray) -> int | None:
        if self.is_answered.is_set():
            return None
        vector[:] = self.came
        return 1

    def send(self, vector: np.ndarray, rank: int) -> Delivered:
        self.answer, self.seen = vector.copy(), self.server[0].center.copy()
        self.is_answered.set()
        return Delivered()


def test_a_rank_with_the_servers_answer_may_read_the_center() -> None:
    """Zhang, Choromanska, LeCun 2015, algorithm 1: the answer is the center before the visit."""
    center, came = np.zeros(1000, np.float32), np.ones(1000, np.float32)
    servers: list[ElasticServer] = []
    group = OneVisit(servers, came)
    servers.append(ElasticServer(center, group, group, alpha=0.25))
    servers[0].start()
    assert group.is_answered.wait(10)
    servers[0].stop()
    np.testing.assert_array_equal(group.answer, 0)
    np.testing.assert_array_equal(group.seen, np.float32(0.25))


class Broken(QueueGroup):
    """A group whose messages are lost, and which notes that it is aborted."""

    def __init__(self) -> None:
        super().__init__([deque()], 0)
        self.aborted: list[int] = []

    def receive(self, vector: np.ndarray) -> int | None:
        raise ConnectionError("no message can be received")

    def abort(self, status: int) -> None:
        self.aborted.append(status)


def test_a_server_that_fails_ends_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """They wait for its answers, and send heartbeats."""
    group = Broken()
    server = ElasticServer(np.zeros(10), group, group, alpha=0.25)
    server.start()
    server.join(10)
    assert group.aborted == [1]
    assert "ConnectionError: no message can be received" in caplog.text


@pytest.mark.parametrize(("look_seconds", "pauses"), [(1e-6, 4), (1e-3, 0)])
def test_a_waiting_rank_pauses_only_while_nothing_moves(
    monkeypatch: pytest.MonkeyPatch, look_seconds: float, pauses: int
) -> None:
    """MPI moves bytes when it is asked; a look that takes long has moved some."""
    now, looks, slept = [0.0], iter([False] * 4 + [True]), []

    def look() -> bool:
        now[0] += look_seconds
        return next(looks)

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(asynchronous, "time", clock)
    asynchronous._wait(look)
    assert len(slept) == pauses
