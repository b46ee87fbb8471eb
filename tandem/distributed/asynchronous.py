"""Rules by which ranks need not wait for one another: elastic averaging, and gossip.

Every rank trains weights of its own, with momenta of its own, on its part of each minibatch, and
now and then lets them be drawn towards the others'. The order in which ranks come is that of real
time, so no two runs have the same bits.
"""

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from tandem.distributed.allreduce import ShardedAllReduce, blocks
from tandem.distributed.exchange import Exchange
from tandem.distributed.group import Engine
from tandem.philox import Purpose, words

Access = Callable[[], AbstractContextManager[Any]]

_PAUSE_SECONDS = 0.0005
_MOVING_SECONDS = 2e-5  # a look that takes so long has moved bytes


class PointToPoint(Protocol):
    """Vectors from one rank to another. Each thread that uses one has its own."""

    rank: int
    size: int

    def send(self, vector: np.ndarray, rank: int) -> "Sending":
        """Begin to send a vector, which stays as it is until it has been received."""
        ...

    def receive(self, vector: np.ndarray) -> int | None:
        """Receive what has come, if anything has; from whom."""
        ...


class Sending(Protocol):
    """A vector that is on its way."""

    def Test(self) -> bool:
        """Whether it has been received, or is in safe hands."""
        ...


class AsynchronousExchange(Exchange):
    """An exchange after which ranks do not hold the same weights.

    Parameters
    ----------
    engine : Engine
        All ranks.
    weights : float (n,)
        This rank's.
    access : callable, optional
        Gives the context in which `weights` are used, if they are a copy of those on a GPU.
    """

    is_synchronous = False

    def __init__(self, engine: Engine, weights: np.ndarray, access: Access = nullcontext) -> None:
        self._engine, self._weights, self._access = engine, weights, access
        self._is_centred = False

    @contextlib.contextmanager
    def consensus_weights(self) -> Iterator[None]:
        """For a while, hold what the ranks agree on in place of this rank's own weights.

        All ranks enter together, and nobody's weights change meanwhile. Within itself, it does
        nothing more.
        """
        if self._is_centred:
            yield
            return
        self._settle()
        with self._access():
            own, self._is_centred = self._weights.copy(), True
            self._take_centre()
        try:
            yield
        finally:
            with self._access():
                np.copyto(self._weights, own)
            self._is_centred = False

    @abstractmethod
    def _settle(self) -> None:
        """Return when nothing is on its way to any rank."""

    @abstractmethod
    def _take_centre(self) -> None:
        """Overwrite the weights with the centre, the same bits at every rank."""


def elastic_step(weights: np.ndarray, other: np.ndarray, alpha: float) -> None:
    """Draw weights towards others: ``w <- w - alpha (w - other)``, in place.

    Parameters
    ----------
    weights, other : float (n,)
    alpha : float
        By what part of the difference.
    """
    kind = weights.dtype.type
    for block in blocks(weights.size):
        weights[block] -= kind(alpha) * (weights[block] - other[block])


class ElasticServer(threading.Thread):
    """Has the centre, and answers those who come with their weights, one after another.

    ``g <- g + alpha (w - g)``; the answer is g as it was before (Zhang, Choromanska, LeCun 2015,
    arXiv 1412.6651, section 3.1, algorithm 1).

    Parameters
    ----------
    centre : float (n,)
        At first what all ranks begin with.
    asks, answers : PointToPoint
        By which weights come and the centre goes.
    alpha : float
        The moving rate.
    """

    def __init__(
        self, centre: np.ndarray, asks: PointToPoint, answers: PointToPoint, alpha: float
    ) -> None:
        super().__init__(name="server", daemon=True)
        self.centre = centre
        self._asks, self._answers, self._alpha = asks, answers, alpha
        self._stopped = threading.Event()

    def run(self) -> None:
        """Answer until `stop`."""
        came, answer = np.empty_like(self.centre), np.empty_like(self.centre)
        while not self._stopped.is_set():
            rank = self._asks.receive(came)
            if rank is None:
                time.sleep(_PAUSE_SECONDS)
                continue
            np.copyto(answer, self.centre)
            # Before the answer: who has it may take the centre as it is to be after this visit.
            elastic_step(self.centre, came, self._alpha)
            _wait(self._answers.send(answer, rank).Test)

    def stop(self) -> None:
        """Answer no more. Nobody asks any more."""
        self._stopped.set()
        self.join()


class ElasticAveraging(AsynchronousExchange):
    """EASGD: every `tau` steps, weights and a centre are drawn towards each other.

    ``w <- w - alpha (w - g)`` here, with the centre g as the server's answer gives it.

    Parameters
    ----------
    engine : Engine
        All ranks.
    weights : float (n,)
        This rank's, the same at all ranks at first.
    asks, answers : PointToPoint
        To and from the server, which is on rank 0.
    server : ElasticServer or None
        The server, started, on rank 0.
    alpha : float
        The moving rate.
    tau : int
        Steps between visits.
    access : callable, optional
        See `AsynchronousExchange`.
    """

    def __init__(
        self,
        engine: Engine,
        weights: np.ndarray,
        asks: PointToPoint,
        answers: PointToPoint,
        server: ElasticServer | None,
        alpha: float,
        tau: int,
        access: Access = nullcontext,
    ) -> None:
        super().__init__(engine, weights, access)
        self._asks, self._answers, self._server = asks, answers, server
        self._alpha, self._tau, self._steps = alpha, tau, 0
        self._answer = np.empty_like(weights)

    def after_update(self, shares: Sequence[float]) -> None:
        """Visit the server when it is time."""
        self._steps += 1
        if self._steps % self._tau:
            return
        with self._access():
            sending = self._asks.send(self._weights, 0)
            _wait(lambda: self._answers.receive(self._answer) is not None)
            _wait(sending.Test)
            elastic_step(self._weights, self._answer, self._alpha)

    def _settle(self) -> None:
        self._engine.all_gather_object(None)  # who is here has the server's answer

    def _take_centre(self) -> None:
        if self._server is not None:
            np.copyto(self._weights, self._server.centre)
        whole = slice(0, self._weights.size)
        nothing = slice(self._weights.size, self._weights.size)
        parts = [whole, *[nothing] * (self._engine.size - 1)]
        self._engine.all_gather(self._weights, parts)

    def leave(self) -> None:
        """See `Exchange`: the server ends."""
        self._settle()
        if self._server is not None:
            self._server.stop()


class GossipAveraging(AsynchronousExchange):
    """GOSGD: now and then a rank sends its weights to another, which mixes them in.

    With probability p after a step, rank r halves its share ``a_r`` of the consensus and sends
    ``(w_r, a_r)`` to another rank at random; rank s does ``w_s <- (a_s w_s + a w) / (a_s + a)`` and
    ``a_s <- a_s + a`` with all that has come, before it sends itself (Blot, Picard, Cord, Thome
    2016, arXiv 1611.09726, algorithms 3 and 4). Shares begin at 1/N and always add up to 1, with
    those that are on their way. The consensus is the average by shares.

    Who sends does not wait: with two parcels on their way, to ranks that are slow, it sends no
    third. Who receives waits for the bytes, and MPI may move those of a large parcel only while its
    sender is in MPI too: up to a step of it.

    Parameters
    ----------
    engine : Engine
        All ranks.
    weights : float (n,)
        This rank's.
    post : PointToPoint
        Between ranks.
    probability : float
        Of sending, after each step.
    seed : int
        Whether and to whom is sent is a function of it, the rank, and the number of the step.
    access : callable, optional
        See `AsynchronousExchange`.
    """

    def __init__(
        self,
        engine: Engine,
        weights: np.ndarray,
        post: PointToPoint,
        probability: float,
        seed: int,
        access: Access = nullcontext,
    ) -> None:
        super().__init__(engine, weights, access)
        self._post, self._probability, self._seed = post, probability, seed
        self.share = 1 / engine.size
        self._steps, self._sent, self._received = 0, 0, 0
        self._on_their_way: list[tuple[Sending, np.ndarray]] = []
        self._incoming = np.empty(weights.nbytes + 8, np.uint8)
        self._sum = ShardedAllReduce(engine, weights)

    def after_update(self, shares: Sequence[float]) -> None:
        """Mix in what has come, and perhaps send."""
        self._mix()
        target = gossip_target(
            self._seed, self._steps, self._engine.rank, self._engine.size, self._probability
        )
        self._steps += 1
        if target is not None and self._has_room():
            self._send(target)

    def _send(self, rank: int) -> None:
        self.share /= 2
        parcel = np.empty_like(self._incoming)
        weights, share = self._parts(parcel)
        with self._access():
            np.copyto(weights, self._weights)
        share[0] = self.share
        self._on_their_way.append((self._post.send(parcel, rank), parcel))
        self._sent += 1

    def _has_room(self) -> bool:
        """Whether not too many parcels are on their way, each of the size of the network."""
        self._on_their_way = [pair for pair in self._on_their_way if not pair[0].Test()]
        return len(self._on_their_way) < 2

    def _parts(self, parcel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of a parcel, the weights and the share."""
        nbytes = self._weights.nbytes
        return parcel[:nbytes].view(self._weights.dtype), parcel[nbytes:].view(np.float64)

    def _mix(self) -> None:
        while self._post.receive(self._incoming) is not None:
            weights, share = self._parts(self._incoming)
            total = self.share + float(share[0])
            with self._access():
                elastic_step(self._weights, weights, float(share[0]) / total)
            self.share = total
            self._received += 1

    def _settle(self) -> None:
        while True:
            self._mix()
            counts = self._engine.all_gather_object((self._sent, self._received))
            if sum(sent for sent, _ in counts) == sum(received for _, received in counts):
                return

    def _take_centre(self) -> None:
        shares = self._engine.all_gather_object(self.share)
        self._sum.average(self._weights, [share / sum(shares) for share in shares])

    def leave(self) -> None:
        """See `Exchange`: everything that was sent is received."""
        self._settle()
        _wait(lambda: all(sending.Test() for sending, _ in self._on_their_way))


def gossip_target(seed: int, step: int, rank: int, ranks: int, probability: float) -> int | None:
    """To whom a rank sends after a step, any other rank being as likely; None for nobody.

    Parameters
    ----------
    seed, step, rank : int
        Of which it is a function.
    ranks : int
        How many there are.
    probability : float
        Of sending at all.
    """
    if ranks == 1:
        return None
    whether, whom = words(seed, step, np.array([rank]), Purpose.GOSSIP, 2)[0]
    if whether >= probability * 2**32:
        return None
    other = int(whom) * (ranks - 1) >> 32
    return other + (other >= rank)


def _wait(done: Callable[[], Any]) -> None:
    """Wait for another rank. If it dies, the job is ended from outside.

    MPI moves a part of a message whenever it is asked: with pauses while nothing moves, and without
    while something does.
    """
    while True:
        begun = time.perf_counter()
        if done():
            return
        if time.perf_counter() - begun < _MOVING_SECONDS:
            time.sleep(_PAUSE_SECONDS)
