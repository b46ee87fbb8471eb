"""The benchmark of exchanges over ranks: that it counts bytes rightly and reports all results.

Seconds are not checked; the model that is fitted to them is, in `test_cost`.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import overlap
from benchmarks.published import THEANO_MPI
from benchmarks.ranks import PEERS, Job, run
from benchmarks.scaling import Model, main, measured_table, predict, predicted_table
from tandem.cost.exchange import STRATEGIES, Layout, Rates, load, seconds
from tandem.cost.machine import Machine
from tests.support.ranks import need_ranks

PARAMETERS = (1_000, 50_000)
RANKS = 3
TRUE = Rates(30e-6, 90e-6, 2e-10, 8e-9, 4e-10, 9e-10)


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    need_ranks()
    return list(run(Job(1, RANKS, PARAMETERS, 2)))


@pytest.mark.slow
def test_bytes_are_those_of_the_formula(measured: list[dict[str, Any]]) -> None:
    """A rank has to receive all but its own part of what it sums, and of the sums."""
    for row in measured:
        asa = 2 * (RANKS - 1) / RANKS * 4 * row["parameters"]
        expected = {"asa": asa, "asa16": asa / 2, "hierarchical": 0}.get(row["name"])
        assert row["bytes_received"] == (expected and pytest.approx(expected))


def synthetic() -> list[dict[str, Any]]:
    """What machines of known rates would take."""
    rows = []
    for machines, each, cores in [(1, 2, 2), (1, 3, 2), (1, 4, 2), (2, 1, 1), (2, 2, 1)]:
        place = {"machines": machines, "ranks_each": each, "cores_each": cores}
        for parameters in (1_000, 1_000_000, 60_000_000):
            for name in STRATEGIES:
                took = seconds(TRUE, load(name, parameters, Layout(machines, each, cores)))
                row = {"parameters": parameters, "name": name, "seconds": [took]}
                rows.append(place | row | {"bytes_received": None, "bytes_by_cable": None})
            for name in PEERS:
                row = {"parameters": parameters, "name": name, "seconds": [1.0]}
                rows.append(place | row | {"bytes_received": None, "bytes_by_cable": None})
    return rows


def test_a_prediction_by_hand() -> None:
    """AlexNet by hierarchical ranks of 64 machines, with a cable of 10 Gbit/s."""
    model = Model.of([row for row in synthetic() if row["name"] in STRATEGIES])
    network, n = THEANO_MPI[0], 60_965_224
    exchange, faster = predict(network, "hierarchical", 512, model.at(10e9))
    waits = 4 * 3 * 30e-6 + (2 * 63 + 2 * 6) * 90e-6
    moves = 2 * 4 * n * 63 / 64 * 8 / 10e9 + n * (15 / 8 + 1) * 4e-10
    assert exchange == pytest.approx(waits + moves, rel=1e-6)
    assert faster == pytest.approx(512 * network.compute / (network.compute + exchange))
    assert max(map(abs, model.errors)) < 1e-6


@pytest.mark.slow
def test_the_report_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ranks.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"system": "Linux"}, *synthetic()])))
    assert main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "2 machine(s) of 2 rank(s), 60,000,000 parameters" in text
    assert "between machines go 0.125 GB/s" in text
    assert "Theano-MPI, asa, measured on 8 GPUs: 0.75 / 6.7" in text
    assert "100 Gbit/s, hierarchical, ranks 8: " in text
    section = text[text.index("exchange:\n") : text.index("seconds of exchange")]
    speed = {"trainers": 1, "threads": 1, "bandwidth": 1e10, "rates": {"default": 1e9}}
    machine = Machine.of({"speeds": [speed], **yaml.safe_load(section)})
    assert machine.exchange.bytes_between == pytest.approx(TRUE.bytes_between, rel=1e-6)
    assert machine.exchange.averaged is None
    assert path.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_table_compares_with_mpi_and_gloo(measured: list[dict[str, Any]]) -> None:
    text = measured_table(measured, None)
    assert text.count("x the speed of MPI allreduce") == len(PARAMETERS) * len(STRATEGIES)
    assert text.count("x the speed of gloo allreduce") == len(PARAMETERS) * len(STRATEGIES)


def test_the_last_strategy_is_not_slower_than_the_first_where_cables_are_slow() -> None:
    model = Model.of([row for row in synthetic() if row["name"] in STRATEGIES])
    assert predicted_table(model).count("1 Gbit/s") == len(THEANO_MPI) * len(STRATEGIES)
    for network in THEANO_MPI:
        asa, hierarchical = (
            predict(network, s, 64, model.at(1e9))[0] for s in ("asa", "hierarchical")
        )
        assert hierarchical < asa


@pytest.mark.slow
def test_the_gain_of_buckets_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--machines", "1", "--batch", "2", "--crop", "67", "--rounds", "1"]
    assert overlap.main(settings) == 0
    names = [re.split(r"  +", line)[0] for line in capsys.readouterr().out.splitlines()]
    buckets = [f"in buckets of {megabytes:g} MB" for megabytes in overlap.BUCKETS]
    assert names == ["no exchange", "as a whole", *buckets]
