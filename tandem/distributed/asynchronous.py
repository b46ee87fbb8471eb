"""Rules by which ranks need not wait for one another: elastic averaging, and gossip.

Every rank trains weights of its own, with optimizer state of its own, on its part of each
minibatch, and now and then draws them towards the others'. The order in which weights are
exchanged is that of real time, so no two runs have the same bits.
"""

import contextlib
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.distributed.allreduce import ShardedAllReduce, blocks
from tandem.distributed.choices import NEEDS_MPI, RULES, RuleChoice
from tandem.distributed.exchange import Exchange, rank_vector
from tandem.distributed.group import Group
from tandem.distributed.mpi import MpiGroup
from tandem.distributed.rank_vector import RankVector
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.philox import Purpose, words
from tandem.registry import setting
from tandem.validation import MOST

if TYPE_CHECKING:
    from tandem.distributed.factory import ExchangeSettings

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.0005
_MOVING_SECONDS = 2e-5  # a look that takes so long has moved bytes


class AsynchronousExchange(Exchange):
    """An exchange after which ranks do not hold the same weights.

    Weights are the first `size` elements of this rank's vector of parameters.
    """

    is_synchronous = False

    def __init__(self, group: MpiGroup, vector: RankVector, size: int) -> None:
        super().__init__(vector)
        self._group = group
        self._weights, self._access = vector.on_host(size)
        self._is_swapped = False

    @contextlib.contextmanager
    def consensus_weights(self) -> Iterator[None]:
        """Swap in the consensus weights for this rank's own.

        Nobody's weights change meanwhile. Within itself, it does nothing more.
        """
        if self._is_swapped:
            yield
            return
        self._complete()
        with self._access():
            own, self._is_swapped = self._weights.copy(), True
            self._load_consensus()
        try:
            yield
        finally:
            with self._access():
                np.copyto(self._weights, own)
            self._is_swapped = False

    def leave(self) -> None:
        self._complete()
        super().leave()

    @abstractmethod
    def _complete(self) -> None:
        """Return when nothing is on its way to any rank."""

    @abstractmethod
    def _load_consensus(self) -> None:
        """Overwrite the weights with the consensus, the same bits at every rank."""


def elastic_step(weights: np.ndarray, other: np.ndarray, alpha: float) -> None:
    """Draw weights towards others: ``w <- w - alpha (w - other)``, in place."""
    kind = weights.dtype.type
    for block in blocks(weights):
        weights[block] -= kind(alpha) * (weights[block] - other[block])


class ElasticServer(threading.Thread):
    """Thread that holds the center, and answers ranks that send weights, one after another.

    ``g <- g + alpha (w - g)``; the answer is g as it was before (Zhang, Choromanska, LeCun 2015,
    arXiv 1412.6651, section 3.1, algorithm 1). The center is at first the weights that all ranks
    begin with. If it fails, it ends all ranks, which would wait for its answers.
    """

    def __init__(self, center: np.ndarray, asks: MpiGroup, answers: MpiGroup, alpha: float) -> None:
        super().__init__(name="server", daemon=True)
        self.center = center
        self._asks, self._answers, self._alpha = asks, answers, alpha
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            self._serve()
        except BaseException:
            log.exception("error: the run has ended: the server of elastic averaging failed")
            self._answers.abort(1)

    def _serve(self) -> None:
        came, answer = np.empty_like(self.center), np.empty_like(self.center)
        while not self._stopped.is_set():
            rank = self._asks.receive(came)
            if rank is None:
                time.sleep(_PAUSE_SECONDS)
                continue
            np.copyto(answer, self.center)
            # Before the answer: a rank that has it may read the center, with this visit in it.
            elastic_step(self.center, came, self._alpha)
            _wait(self._answers.send(answer, rank).Test)

    def stop(self) -> None:
        """Stop answering, when no rank asks any more."""
        self._stopped.set()
        self.join()


class ElasticAveraging(AsynchronousExchange):
    """EASGD: every `tau` steps, weights and a center are drawn towards each other.

    ``w <- w - alpha (w - g)`` here, with the center g as the answer of the server on rank 0 has it.
    The weights are the same at all ranks at first.
    """

    def __init__(
        self, group: MpiGroup, vector: RankVector, size: int, alpha: float, tau: int
    ) -> None:
        super().__init__(group, vector, size)
        self._asks, self._answers = group.split(0), group.split(0)
        self._alpha, self._tau, self._steps = alpha, tau, 0
        self._answer = np.empty_like(self._weights)
        self.server: ElasticServer | None = None
        if group.rank == 0:
            center = self._weights.copy()
            self.server = ElasticServer(center, self._asks, self._answers, alpha)
            self.server.start()

    def after_update(self, shares: Sequence[float]) -> None:
        self._steps += 1
        if self._steps % self._tau:
            return
        with self._access():
            sending = self._asks.send(self._weights, 0)
            _wait(lambda: self._answers.receive(self._answer) is not None)
            _wait(sending.Test)
            elastic_step(self._weights, self._answer, self._alpha)

    def _complete(self) -> None:
        self._group.barrier()  # a rank that is here has the server's answer

    def _load_consensus(self) -> None:
        if self.server is not None:
            np.copyto(self._weights, self.server.center)
        size = self._weights.size
        parts = [slice(0, size), *[slice(size, size)] * (self._group.size - 1)]
        self._group.all_gather(self._weights, parts)

    def leave(self) -> None:
        super().leave()
        if self.server is not None:
            self.server.stop()


class GossipAveraging(AsynchronousExchange):
    """GOSGD: now and then a rank sends its weights to another, which mixes them in.

    With probability p after a step, rank r halves its share ``a_r`` of the consensus and sends
    ``(w_r, a_r)`` to another rank at random; rank s does ``w_s <- (a_s w_s + a w) / (a_s + a)`` and
    ``a_s <- a_s + a`` with every message that has come, before it sends itself (Blot, Picard, Cord,
    Thome 2016, arXiv 1611.09726, algorithms 3 and 4). Shares begin at 1/N and always add up to 1,
    with those in flight. The consensus is the average by shares.

    Sends do not block; at most two are in flight. A rank that receives waits for the bytes, and MPI
    may move those of a large message only while its sender is in MPI too: up to a step of it.
    """

    def __init__(
        self, group: MpiGroup, vector: RankVector, size: int, probability: float, seed: int
    ) -> None:
        super().__init__(group, vector, size)
        self._messages, self._probability, self._seed = group.split(0), probability, seed
        self.share = 1 / group.size
        self._steps, self._sent, self._received = 0, 0, 0
        self._in_flight: list[tuple[Any, np.ndarray]] = []
        self._incoming = np.empty(self._weights.nbytes + 8, np.uint8)
        self._sum = ShardedAllReduce(group, self._weights)

    def after_update(self, shares: Sequence[float]) -> None:
        self._mix()
        target = gossip_target(
            self._seed, self._steps, self._group.rank, self._group.size, self._probability
        )
        self._steps += 1
        if target is not None and self._has_room():
            self._send(target)

    def _send(self, rank: int) -> None:
        self.share /= 2
        message = np.empty_like(self._incoming)
        weights, share = self._parts(message)
        with self._access():
            np.copyto(weights, self._weights)
        share[0] = self.share
        self._in_flight.append((self._messages.send(message, rank), message))
        self._sent += 1

    def _has_room(self) -> bool:
        """Return whether few enough messages are in flight, each of the size of the network."""
        self._in_flight = [pair for pair in self._in_flight if not pair[0].Test()]
        return len(self._in_flight) < 2

    def _parts(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The weights and the share in a message."""
        nbytes = self._weights.nbytes
        return message[:nbytes].view(self._weights.dtype), message[nbytes:].view(np.float64)

    def _mix(self) -> None:
        while self._messages.receive(self._incoming) is not None:
            weights, share = self._parts(self._incoming)
            total = self.share + float(share[0])
            with self._access():
                elastic_step(self._weights, weights, float(share[0]) / total)
            self.share = total
            self._received += 1

    def _complete(self) -> None:
        while True:
            self._mix()
            counts = self._group.all_gather_object((self._sent, self._received))
            if sum(sent for sent, _ in counts) == sum(received for _, received in counts):
                return

    def _load_consensus(self) -> None:
        shares = self._group.all_gather_object(self.share)
        self._sum.average(self._weights, [share / sum(shares) for share in shares])

    def leave(self) -> None:
        super().leave()
        _wait(lambda: all(sending.Test() for sending, _ in self._in_flight))


def gossip_target(seed: int, step: int, rank: int, ranks: int, probability: float) -> int | None:
    """The rank that another sends to after a step, all others as likely; None for none.

    It is a function of the seed, the step and the rank.
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


@RULES.register("easgd")
@dataclass(frozen=True)
class Elastic(RuleChoice):
    """Elastic averaging, by a server."""

    easgd_alpha: float = setting(
        0.5,
        "easgd: moving rate of weights and consensus weights",
        "a number above 0 and below 1",
        gt=0,
        lt=1,
    )
    easgd_tau: int = setting(
        1,
        "easgd: steps between exchanges with the server",
        f"a whole number of steps from 1 to {MOST}",
        ge=1,
        le=MOST,
    )

    requires = (NEEDS_MPI,)

    def make(
        self, settings: "ExchangeSettings", memory: HostMemory | CudaMemory, group: Group
    ) -> Exchange:
        return ElasticAveraging(*_weights(memory, group), self.easgd_alpha, self.easgd_tau)


@RULES.register("gosgd")
@dataclass(frozen=True)
class Gossip(RuleChoice):
    """Gossip: ranks send each other weights at random."""

    gosgd_p: float = setting(
        0.1,
        "gosgd: probability of sending after a step",
        "a number above 0 and at most 1",
        gt=0,
        le=1,
    )

    requires = (NEEDS_MPI,)

    def make(
        self, settings: "ExchangeSettings", memory: HostMemory | CudaMemory, group: Group
    ) -> Exchange:
        return GossipAveraging(*_weights(memory, group), self.gosgd_p, settings.seed)


def _weights(memory: HostMemory | CudaMemory, group: Group) -> tuple[MpiGroup, RankVector, int]:
    """Return what an `AsynchronousExchange` is made of."""
    if not isinstance(group, MpiGroup):
        raise TypeError(f"ranks that are not in step need MPI, not {type(group).__name__}")
    return group, rank_vector(memory, "parameters", group), memory.layout.size
