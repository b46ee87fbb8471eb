"""Averages that change nothing where all vectors are equal, however often they are made."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from tandem.distributed import Exchange, ExchangeSettings, LocalGroup, local_groups
from tandem.distributed.exchange import ExchangeGradients, ExchangeParameters, ExchangeShared
from tandem.distributed.rank_vector import HostVector
from tandem.distributed.shares import weights_and_divisor
from tests.support.averages import MOST_GROWTH, growth, weights
from tests.support.threads import run_threads

COLLECTIVES = ("auto", "ar", "asa", "asa16", "hierarchical")
KINDS = {"average": ExchangeParameters, "gradients": ExchangeGradients, "shared": ExchangeShared}


def of(*counts: int) -> list[float]:
    """Shares as a trainer computes them, from the pictures of each."""
    return [count / sum(counts) for count in counts]


THIRDS, FIFTHS, SEVENTHS = of(*[1] * 3), of(*[1] * 5), of(*[1] * 7)
SHORT = of(128, 128, 45)
MORE = [
    FIFTHS,
    SEVENTHS,
    of(100, 100, 13),
    of(128, 45),
    of(128, 128, 0),
    of(*[128] * 4, 7),
    of(*[96] * 6, 31),
]
SLOWLY = [pytest.param(shares, marks=pytest.mark.slow) for shares in MORE]


@pytest.mark.parametrize("shares", [THIRDS, SHORT, *MORE, of(1), of(0, 5), [0.3, 0.7], [1.0, 1.0]])
def test_weights_over_the_divisor_are_the_shares_and_exact_in_float32(shares: list[float]) -> None:
    found, divisor = weights_and_divisor(shares)
    assert 0.5 < divisor <= 1
    assert [np.float32(value) for value in (*found, divisor)] == [*found, divisor]
    assert [w / divisor for w in found] == shares
    total = sum(Fraction(share).limit_denominator(1000) for share in shares)
    assert sum(map(Fraction, found)) == total * Fraction(divisor)


@pytest.mark.parametrize("trainers", [1, 2, 4, 8])
def test_shares_over_a_power_of_two_are_weights_as_they_are(trainers: int) -> None:
    for shares in (of(*[1] * trainers), of(*[32] * (trainers - 1), 0, 32)):
        assert weights_and_divisor(shares) == (tuple(shares), 1.0)


def test_shares_of_no_whole_numbers_are_weights_as_they_are() -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(3)).tolist()
    assert weights_and_divisor(shares) == (tuple(shares), 1.0)


def averaging(
    exchange: str, collective: str, vectors: list[np.ndarray], group: LocalGroup
) -> Callable[[Sequence[float]], None]:
    """What makes one average of the vectors, as one rank."""
    if exchange == "shared":
        return ExchangeShared(group, vectors).before_update
    vector = HostVector(vectors, group.rank, is_common=exchange == "average")
    choice = ExchangeSettings.of({"collective": collective}).collective
    (all_reduce,) = choice.make(vector, [slice(0, vectors[0].size)], group)
    made: Exchange = KINDS[exchange](all_reduce, vector)
    return made.after_update if exchange == "average" else made.before_update


WAYS = [
    *(("average", collective) for collective in COLLECTIVES),
    *(("gradients", collective) for collective in COLLECTIVES if collective != "asa16"),
    ("shared", "auto"),
]


@pytest.mark.parametrize("shares", [THIRDS, SHORT, *SLOWLY])
@pytest.mark.parametrize(("exchange", "collective"), WAYS)
def test_an_average_of_equal_vectors_does_not_grow(
    exchange: str, collective: str, shares: list[float]
) -> None:
    before = weights()
    vectors = [before.copy() for _ in shares]
    run_threads(
        [
            lambda group=group: averaging(exchange, collective, vectors, group)(shares)
            for group in local_groups(len(shares))
        ]
    )
    assert abs(growth(before, vectors[0])) < MOST_GROWTH


@pytest.mark.slow
@pytest.mark.parametrize("shares", [THIRDS, FIFTHS, SEVENTHS, SHORT])
@pytest.mark.parametrize(("exchange", "collective"), WAYS)
def test_weights_do_not_drift_in_three_thousand_averages(
    exchange: str, collective: str, shares: list[float]
) -> None:
    """Between averages all take the same small steps, against float64 without any average.

    Without them, roundings soon lead to a number that the average happens to leave as it is.
    """
    before, rounds = weights(4096), 3000
    vectors = [before.copy() for _ in shares]
    steps = np.random.default_rng(1).normal(size=(64, before.size)).astype("f4") * 1e-4 * before

    def run(group: LocalGroup) -> None:
        average, own = averaging(exchange, collective, vectors, group), vectors[group.rank]
        for number in range(rounds):
            group.barrier()
            own += steps[number % 64] * (1 if number % 128 < 64 else -1)
            group.barrier()
            average(shares)
            if exchange == "shared":  # where the first rank's holds the average
                group.barrier()
                np.copyto(own, vectors[0])

    groups = local_groups(len(shares))
    run_threads([partial(run, group) for group in groups], seconds=120)
    expected = before.astype(float)
    for number in range(rounds):
        expected += steps[number % 64].astype(float) * (1 if number % 128 < 64 else -1)
    assert abs(growth(expected, vectors[0])) < 1e-6
    assert len({vector.tobytes() for vector in vectors}) == 1
