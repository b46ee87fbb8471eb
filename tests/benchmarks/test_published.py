"""Theano-MPI's figures: that they agree with each other, and how near predictions come."""

import numpy as np
import pytest

from benchmarks import published
from benchmarks.published import (
    GPUS,
    THEANO_MPI,
    TIMED,
    exchange_seconds,
    gpu_speed,
    node_load,
    node_rates,
)
from tandem.cost.exchange import Layout, load, seconds, speedup
from tandem.cost.steps import Line, TrainerStep
from tandem.memory.flat import FlatLayout
from tandem.ops.work import Work
from tandem.training.attribution import NodeOrigin
from tests.support.tiny import ROOT

PLACE = NodeOrigin("conv1", "forward")


def test_the_reports_seconds_of_computing_agree_with_its_speed_ups() -> None:
    """Background: AlexNet 5.3, 6.7, 7.1; GoogLeNet 7.1 to 7.3; VGG 4.3, 6.7, 7.2."""
    expected = {
        "AlexNet": (5.3, 6.7, 7.1),
        "GoogLeNet": (7.1, 7.2, 7.3),
        "VGG-16": (4.3, 6.7, 7.2),
    }
    for network in THEANO_MPI:
        found = [
            speedup(8, network.compute, exchange / network.steps)
            for exchange in network.exchange.values()
        ]
        np.testing.assert_allclose(found, expected[network.name], atol=0.11)


def is_comparable(name: str, batch: int, ranks: int) -> bool:
    """VGG-16 at 16 images computed for 55.12 s on 8 GPUs, where 358.29 / 8 is 44.79."""
    return (name, batch, ranks) != ("VGG-16", 16, 8)


@pytest.mark.parametrize("ranks", GPUS[1:])
def test_computing_on_several_gpus_is_that_on_one_but_for_one(ranks: int) -> None:
    for network in TIMED:
        spent = network.computing[GPUS.index(ranks)] / (network.computing[0] / ranks)
        is_equal = spent == pytest.approx(1, abs=0.05)
        assert is_equal == is_comparable(network.name, network.batch, ranks)


@pytest.mark.parametrize("left_out", [None, *{network.name: None for network in TIMED}])
def test_speed_ups_are_within_a_tenth(left_out: str | None) -> None:
    """Also of networks to which nothing was fitted."""
    rates = node_rates([network for network in TIMED if network.name != left_out])
    for network in TIMED:
        for ranks, expected in network.speedups.items():
            exchange = exchange_seconds(network.parameters, ranks, rates, 10e9)
            found = speedup(ranks, network.compute, exchange)
            is_near = found == pytest.approx(expected, rel=0.1)
            assert is_near == is_comparable(network.name, network.batch, ranks)


def test_a_rings_bytes() -> None:
    """By hand: each GPU sends 2 (N - 1) / N of 4 bytes, and a half of eight to the other four."""
    found = {ranks: node_load(1000, ranks) for ranks in GPUS[1:]}
    within = {ranks: 4000 * 2 * (n - 1) / n for ranks, n in {2: 2, 4: 4, 8: 4}.items()}
    assert {ranks: each.bytes_within for ranks, each in found.items()} == pytest.approx(within)
    assert [each.bytes_between for each in found.values()] == [0, 0, 4000]
    assert not any(each.added for each in found.values())


def test_an_exchange_between_nodes_is_beside_that_within() -> None:
    rates = node_rates()
    within = seconds(rates, node_load(10**6, 8))
    assert exchange_seconds(10**6, 1, rates, 1e9) == 0
    assert exchange_seconds(10**6, 8, rates, 1e9) == within
    asked = load("asa", 10**6, Layout(4, 1))
    between = asked.bytes_between * 8e-9 + asked.steps_between * 50e-6
    assert exchange_seconds(10**6, 32, rates, 1e9) == pytest.approx(within + between)


def made(flops: int, nbytes: int) -> TrainerStep:
    lines = tuple(Line("A", Work("product", *work), PLACE) for work in ((flops, 0), (0, nbytes)))
    return TrainerStep(1, 1, lines, (), FlatLayout.of({"a": (1,)}, "float32"))


def test_a_rate_and_a_bandwidth_are_found_again() -> None:
    steps = [made(f, b) for f, b in ((10**12, 10**9), (10**11, 10**10), (10**12, 10**11))]
    measured = [
        sum(line.work.flops / 3e12 + line.work.nbytes / 2e10 for line in step.lines)
        for step in steps
    ]
    speed = gpu_speed(steps, measured)
    assert speed.rate("product") == pytest.approx(3e12, rel=1e-4)
    assert speed.bandwidth == pytest.approx(2e10, rel=1e-4)


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network whose work is made up: 1,000 GFLOP and 10 GB."""
    monkeypatch.setattr(published.Timed, "step", made(10**12, 10**10))
    text = published.report(ranks=(1, 8, 512))
    table = [line.split() for line in text.splitlines()]
    assert ["AlexNet,", "128", "8", "6.38", "+0.9%", "6.33"] in [cells[:6] for cells in table]
    assert "4 of 5 are within 10% of the published ones" in text
    assert text.count("ResNet-50, 64") == 1 + 3


@pytest.mark.slow
def test_computing_by_counted_work_is_within_15_percent() -> None:
    steps = [network.step for network in TIMED]
    measured = [network.compute for network in TIMED]
    speed = gpu_speed(steps, measured)
    found = [sum(step.seconds(speed)) for step in steps]
    np.testing.assert_allclose(found, measured, rtol=0.15)
    for row in published.rows(speed, steps, 10e9, GPUS):
        if row.published and is_comparable(row.network.name, row.network.batch, row.ranks):
            assert row.counted == pytest.approx(row.published, rel=0.1)


def test_the_table_in_the_docs() -> None:
    """Ranks, and for each network the predicted speed-up and its deviation."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    table = page[page.index("| ranks | AlexNet, 128") : page.index("The fifteenth speed-up")]
    names, *lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()]
    networks = {f"{network.name}, {network.batch}": network for network in TIMED}
    rates = node_rates()
    for first, *cells in lines[2:]:
        ranks = int(first)
        for name, cell in zip(names[1:], cells, strict=True):
            network = networks[name]
            exchange = exchange_seconds(network.parameters, ranks, rates, 10e9)
            predicted = speedup(ranks, network.compute, exchange)
            number, *deviation = cell.split(" ", 1)
            assert float(number) == pytest.approx(predicted, rel=5e-3)
            expected = network.speedups.get(ranks)
            assert bool(deviation) == bool(expected)
            if expected:
                assert deviation == [f"({predicted / expected - 1:+.1%})".replace("%", " %")]
