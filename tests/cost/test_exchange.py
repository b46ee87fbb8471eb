"""The model of an exchange's cost, against known rates and published figures."""

import math
from dataclasses import asdict, astuple

import numpy as np
import pytest

from tandem.cost.exchange import (
    LOCAL,
    STRATEGIES,
    Layout,
    Load,
    Rates,
    fit,
    load,
    not_measured,
    seconds,
    speedup,
)
from tandem.distributed.allreduce import shard

TRUE = Rates(30e-6, 90e-6, 2e-10, 8e-9, 4e-10, 9e-10, 20e-6, 3e-10)
LAYOUTS = [Layout(m, r, c) for m, r, c in [(1, 2, 2), (1, 3, 2), (1, 4, 2), (2, 1, 1), (2, 2, 1)]]
SIZES = (1_000, 250_000, 7_000_000, 60_000_000)


EVERY = STRATEGIES + LOCAL


def loads() -> list[Load]:
    return [
        load(name, n, where)
        for name in EVERY
        for n in SIZES
        for where in LAYOUTS
        if name in STRATEGIES or where.machines == 1
    ]


def test_known_rates_are_found_again() -> None:
    found = fit(loads(), [seconds(TRUE, each) for each in loads()])
    np.testing.assert_allclose(astuple(found), astuple(TRUE), rtol=1e-6)


def test_rates_are_found_under_noise() -> None:
    rng = np.random.default_rng(0)
    noisy = [seconds(TRUE, each) * rng.lognormal(0, 0.05) for each in loads()]
    np.testing.assert_allclose(astuple(fit(loads(), noisy)), astuple(TRUE), rtol=0.2)


def test_what_was_not_measured_is_not_known() -> None:
    here = [each for each in loads() if not each.bytes_between]
    found = fit(here, [seconds(TRUE, each) for each in here])
    missing = ["steps_between", "bytes_between"]
    assert [name for name, rate in asdict(found).items() if math.isnan(rate)] == missing
    assert not_measured(found, loads()) == missing
    assert not_measured(found, here) == []
    assert seconds(found, here[0]) == pytest.approx(seconds(TRUE, here[0]))
    assert math.isnan(seconds(found, load("asa", 1000, Layout(2, 1))))


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rates can't be fitted to 2 measurements"):
        fit([load("asa", 10, Layout(1, 2)), load("asa", 10, Layout(1, 3))], [1, 1])


@pytest.mark.parametrize("strategy", EVERY)
def test_one_rank_costs_nothing(strategy: str) -> None:
    assert seconds(TRUE, load(strategy, 10**8, Layout(1, 1))) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(64, 8)])
def test_no_parameters_cost_waiting_and_many_cost_bandwidth(strategy: str, layout: Layout) -> None:
    waiting = load(strategy, 0, layout)
    assert astuple(waiting)[2:] == (0, 0, 0, 0, 0, 0)
    assert sum(astuple(waiting)) > 0
    many, twice = (seconds(TRUE, load(strategy, n, layout)) for n in (10**12, 2 * 10**12))
    assert twice / many == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("machines", [1, 2, 8])
def test_more_parameters_and_more_ranks_cost_more(strategy: str, machines: int) -> None:
    times = np.array(
        [
            [seconds(TRUE, load(strategy, n, Layout(machines, r, 2))) for n in SIZES]
            for r in range(1, 9)
            if machines * r > 1
        ]
    )
    assert (np.diff(times, axis=1) > 0).all()
    assert (np.diff(times, axis=0) > 0).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("cores", [2, math.inf])
def test_what_is_touched_in_shared_memory(ranks: int, cores: float) -> None:
    """By the loops of the kernels, over the shards of all trainers."""
    parameters, vectors = 12 * 1024, range(ranks)
    touched = dict.fromkeys(LOCAL, 0)
    for rank in range(ranks):
        part = shard(parameters, ranks, rank)
        for _ in range(part.start, part.stop, 1024):
            touched["memory"] += 1024 * (len(vectors) + len(vectors))  # read, and written
            touched["shared"] += 1024 * (len(vectors) + 1)
    for strategy, elements in touched.items():
        found = load(strategy, parameters, Layout(1, ranks, cores))
        # One read and written at a time, by all cores that there are.
        assert found.averaged == pytest.approx(elements / 2 / min(ranks, cores))
        assert found.messages == 2 * (2 * (ranks - 1))


def test_what_has_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no model of nccl"):
        load("nccl", 1000, Layout(1, 2))
    with pytest.raises(ValueError, match="memory: no memory is shared by 2 machines"):
        load("memory", 1000, Layout(2, 2))


def test_bytes_that_leave_a_machine() -> None:
    """By hand, for two machines of two ranks: 4 n bytes is 1."""

    def out(strategy: str, ranks_each: int) -> float:
        return load(strategy, 1000, Layout(2, ranks_each)).bytes_between / 4000

    # Of one rank each: half of the vector, twice.
    assert [out(name, 1) for name in STRATEGIES] == [1, 1, 0.5, 1]
    # Of two: each rank gives a quarter to both of the others, then three quarters go by the ring.
    assert [out(name, 2) for name in STRATEGIES] == [1, 1.75, 0.875, 1]


def test_what_ranks_do_one_after_another() -> None:
    """By hand, for two machines of two ranks that share a core, so they take turns."""
    n, turns = 1000, 2
    found = {name: load(name, n, Layout(2, 2, 1)) for name in STRATEGIES}
    barriers = 2 * 2  # two, of as many rounds as 4 has powers of two
    for name, messages in {"ar": 2 * 2, "asa": 2 * 3, "asa16": 2 * 3}.items():
        assert found[name].steps_between == turns * (messages + barriers)
        assert found[name].steps_within == 0
    # Averages before and after that of the leaders have two barriers each.
    assert found["hierarchical"].steps_within == turns * 2 * 2
    assert found["hierarchical"].steps_between == 2 + 2
    assert {name: each.added / n for name, each in found.items()} == {
        "ar": turns,
        "asa": turns,  # of its quarter, four terms
        "asa16": 0,
        "hierarchical": 2 + 1 + 1,  # both vectors, the copy of the sum, the other leader's
    }
    # To send, as received, the sum, and what is gathered.
    assert found["asa16"].rounded == turns * (n + n + n / 4 + n)


def test_a_rank_alone_on_each_machine_sends_as_by_the_papers_formula() -> None:
    for ranks in (2, 3, 8, 512):
        expected = 2 * 4 * 1000 * (ranks - 1) / ranks
        assert load("asa", 1000, Layout(ranks, 1)).bytes_between == pytest.approx(expected)
        assert load("asa16", 1000, Layout(ranks, 1)).bytes_between == pytest.approx(expected / 2)


def test_speed_up() -> None:
    assert speedup(8, 1.0, 0.0) == 8
    assert speedup(8, 1.0, 1.0) == 4
    assert speedup(512, 0.0, 1.0) == 0
