"""Predicted steps, against sums by hand from a machine of round rates."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.config.schema import make_config
from tandem.cost.machine import ExchangeRates, Machine
from tandem.cost.predict import Exchange, Predictor, check_modelled
from tandem.cost.steps import Line, TrainerStep, trainer_step
from tandem.distributed.buckets import Bucket
from tandem.errors import InputError
from tandem.memory.flat import FlatLayout
from tandem.ops.work import Work
from tandem.training.attribution import NodeOrigin

MEGA = 64 * 15625  # elements: a million, without padding
LAYOUT = FlatLayout.of({"a": (MEGA,), "b": (3 * MEGA,)}, "float32", states=("momentum",))
BUCKETS = (
    Bucket(frozenset({"b"}), slice(MEGA, 4 * MEGA)),
    Bucket(frozenset({"a"}), slice(0, MEGA)),
)
PLACE = NodeOrigin("a", "forward")
LINES = (
    Line("Forward", Work("product", 10**9, 0), PLACE),
    Line("GradientOfB", Work("product", 2 * 10**9, 0), PLACE, ("b",)),
    Line("GradientOfA", Work("product", 3 * 10**9, 0), PLACE),
)
UPDATE = (Line("Update", Work("update", 0, 10**9), PLACE),)
VALUES: dict[str, Any] = {
    "speeds": [
        {"trainers": 1, "threads": 2, "bandwidth": 2e9, "rates": {"default": 2e9}},
        {"trainers": 2, "threads": 1, "bandwidth": 1e9, "rates": {"default": 1e9}},
    ],
    "load": 1e6,
    "exchange": {
        "averaged": 1e-7,
        "messages": 1e-3,
        "steps_within": 0,
        "steps_between": 0,
        "bytes_within": 0,
        "bytes_between": 1e-7,
        "added": 0,
    },
}


def predictor(how: Exchange, ranks_each: int = 2, **changes: Any) -> Predictor:
    buckets = BUCKETS if how.bucket_mb else ()
    step = TrainerStep(8, 10**6, LINES, UPDATE, LAYOUT, buckets)
    return Predictor(step, Machine.of({**VALUES, **changes}), how, ranks_each)


def test_one_trainer_computes_and_loads() -> None:
    found = predictor(Exchange("average")).predict(1)
    assert (found.compute, found.exchange, found.exposed, found.load) == (3.5, 0, 0, 1)
    assert (found.step, found.images_per_second) == (3.5, 8 / 3.5)
    assert (found.speedup, found.efficiency) == (1, 1)


def test_a_loader_that_is_slower_decides() -> None:
    found = predictor(Exchange("average"), load=1e5).predict(1)
    assert (found.load, found.step) == (10, 10)


@pytest.mark.parametrize(
    ("what", "update", "averaged"),
    [
        ("average", 1, 8 * MEGA),  # weights and momenta
        ("gradients", 1, 4 * MEGA),
        ("shared", 1 / 2, 4 * MEGA * 3 / 4),  # each updates a half, and writes only the first
    ],
)
def test_two_trainers_exchange_in_memory(what: str, update: float, averaged: float) -> None:
    """Between two barriers, after a vote: each is a message to the first trainer and back."""
    found = predictor(Exchange(what)).predict(2)
    exchange = averaged * 1e-7 + 3 * 2 * 1e-3
    assert found.compute == pytest.approx(6 + update)
    assert (found.load, found.images) == (1, 16)  # each has a loader
    assert (found.exchange, found.exposed) == (pytest.approx(exchange), pytest.approx(exchange))
    assert found.step == pytest.approx(6 + update + exchange)
    assert found.speedup == pytest.approx(2 * 3.5 / found.step)
    assert found.efficiency == pytest.approx(found.speedup / 2)


def test_float64_is_two_numbers() -> None:
    made = predictor(Exchange("gradients"))
    assert made.sizes == [4 * MEGA]
    double = replace(made.step, layout=replace(LAYOUT, dtype="float64"))
    assert replace(made, step=double).sizes == [8 * MEGA]


def test_over_machines_bytes_go_by_cables() -> None:
    found = predictor(Exchange("gradients"), ranks_each=1).predict(2)
    assert (found.machines, found.compute) == (2, 3.5)
    assert found.exchange == pytest.approx(4 * 4 * MEGA * 1e-7)
    assert found.exposed == found.exchange


def test_buckets_travel_meanwhile() -> None:
    found = predictor(Exchange("gradients", bucket_mb=1), ranks_each=1).predict(2)
    # The first, of 1.2 s, is ready after half of the 3 s; the second, of 0.4 s, at their end.
    assert found.exchange == pytest.approx(1.6)
    assert found.exposed == pytest.approx(0.4)
    longer = {**VALUES["exchange"], "bytes_between": 1e-6}
    found = predictor(Exchange("gradients", bucket_mb=1), ranks_each=1, exchange=longer).predict(2)
    assert found.exchange == pytest.approx(16)
    assert found.exposed == pytest.approx(1.5 + 16 - 3)


def test_what_cores_do_in_an_exchange_delays_computing_but_on_gpus() -> None:
    adding = {**VALUES["exchange"], "added": 1e-7, "bytes_between": 0}
    buckets = Exchange("gradients", bucket_mb=1)
    found = predictor(buckets, ranks_each=1, exchange=adding).predict(2)
    assert found.exposed == pytest.approx(found.exchange)
    on_gpus = predictor(buckets, ranks_each=1, exchange=adding, devices=1).predict(2)
    assert on_gpus.exposed == pytest.approx(0.1)
    assert on_gpus.exchange == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("exchange", "ranks", "strategy"),
    [
        (Exchange("average"), 2, "memory"),
        (Exchange("average"), 4, "asa"),
        (Exchange("gradients", bucket_mb=1), 2, "asa"),  # which is of ranks alone
        (Exchange("gradients", "hierarchical"), 4, "hierarchical"),
        (Exchange("shared"), 2, "shared"),
    ],
)
def test_strategies(exchange: Exchange, ranks: int, strategy: str) -> None:
    made = predictor(exchange)
    assert exchange.strategy(made.layout(ranks)) == strategy
    assert made.predict(ranks).step > 0


def test_assumed_rates_are_named() -> None:
    made = predictor(Exchange("gradients"), exchange={"averaged": 1e-7})
    assert made.assumptions([1]) == []
    assert made.assumptions([2]) == ["messages"]
    # From the bandwidth that each of two trainers has.
    assumed = predictor(Exchange("gradients"), exchange={"messages": 0})
    assert assumed.predict(2).exchange == pytest.approx(4 * MEGA * 8 / 1e9)
    found = ["messages", "steps_between", "bytes_within", "bytes_between", "added"]
    assert made.assumptions([1, 2, 4]) == found


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="ranks: found 5, expected a multiple of ranks_each, 2"):
        predictor(Exchange("average")).predict(5)
    with pytest.raises(InputError, match="one copy of the weights on one machine, and 4 ranks"):
        predictor(Exchange("shared")).predict(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collective": "nccl"}, "collective: nccl has no model: it depends on the links"),
        ({"rule": "easgd"}, "rule: easgd has no model: its trainers are not in step"),
        ({"fully_connected": "sharded"}, "fully_connected: sharded has no model: see tandem"),
        ({"norm_rows": "global"}, "norm_rows: global has no model: see tandem placement"),
        ({"global_batch": 256}, "global_batch: found 256, expected null: a prediction is of"),
        ({"para_load": False}, "para_load: false has no model: its trainers load between steps"),
        ({"exchange": "shared", "collective": "asa"}, "exchange: shared is one copy of the weight"),
        ({"precision": "float64", "collective": "asa16"}, "collective: asa16 is for float32, and"),
        ({"optimizer": "adam", "exchange": "average"}, "exchange: average averages the results"),
    ],
)
def test_settings_without_a_model_are_refused(settings: dict[str, Any], message: str) -> None:
    """Some because no run could have them."""
    with pytest.raises(InputError) as error:
        check_modelled(make_config(settings))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("collective", ["auto", "ar", "asa", "asa16", "hierarchical"])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_what_has_a_model_is_predicted(collective: str, on_gpus: bool) -> None:
    exchange = {"exchange": "gradients", "collective": collective, "bucket_mb": 1}
    check_modelled(make_config(exchange), on_gpus)


@pytest.mark.slow
@pytest.mark.parametrize(("bucket_mb", "measured"), [(5, 4.26), (25, 4.50), (100, 4.64)])
def test_buckets_of_the_benchmark_are_predicted(bucket_mb: float, measured: float) -> None:
    """docs/clusters.md: AlexNet's gradients took 2.05 s, with the exchange as a whole 6.19 s."""
    settings = {"batch_size": 32, "exchange": "gradients", "bucket_mb": bucket_mb}
    step = trainer_step(make_config(settings), classes=1000)
    rates = {"default": 5e9, "convolution": 1.5e11, "product": 1.2e11}  # of a core
    speed = {"trainers": 1, "threads": 1, "bandwidth": 2e10, "call": 2e-5, "rates": rates}
    alone = Machine.of({"speeds": [speed]})
    factor = step.seconds(alone.speed(1))[0] / 2.05
    machine = alone.model_copy(update={"speeds": (alone.speed(1).slower(1 / factor),)})
    nbytes = 4 * step.layout.size
    found = {"bytes_between": 3.9 / nbytes, "added": 0.24 / (nbytes / 4), "steps_between": 0}
    machine = machine.model_copy(update={"exchange": ExchangeRates(**found)})
    predicted = Predictor(step, machine, Exchange("gradients", "asa", bucket_mb), 1).predict(2)
    assert predicted.exchange == pytest.approx(6.19 - 2.05, rel=0.01)
    assert 2.05 + predicted.exposed == pytest.approx(measured, rel=0.15)
