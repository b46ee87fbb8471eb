"""The file of a machine's rates: what it means, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cost.exchange import Layout, load
from tandem.cost.machine import ASSUMED_BITS, ASSUMED_LATENCY, Machine
from tandem.errors import InputError
from tests.support.tiny import ROOT

TEXT = """
processor: a machine of two cores
speeds:
- trainers: 1
  threads: 2
  bandwidth: 4e10
  call: 2e-5
  rates: {default: 2e10, convolution: 3e11, convolution input 1x1: 2.5e11, relu: 5e9}
- trainers: 2
  threads: 1
  bandwidth: 2.0e+10
  call: 1.0e-5
  rates: {default: 1.0e+10}
load: 1e8
exchange: {averaged: 4e-10, messages: 2e-5}
"""


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TEXT)
    return found


def machine(**changes: Any) -> Machine:
    return Machine.of({**values(), **changes})


def test_a_file_is_read_and_written_back(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(TEXT)
    read = Machine.read(first)
    read.save(second)
    assert Machine.read(second) == read == machine()
    assert read.speeds[0].bandwidth == 4e10  # which YAML takes as text
    assert "assumed" not in second.read_text()
    assert "network_bw" not in second.read_text()
    with pytest.raises(InputError, match=r"none/machine.yaml: cannot be written: No such file"):
        read.save(tmp_path / "none" / "machine.yaml")


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("convolution", 3e11),
        ("convolution image", 3e11),
        ("convolution input 1x1", 2.5e11),
        ("convolution weight 1x1", 3e11),
        ("relu gradient", 5e9),
        ("pool", 2e10),
    ],
)
def test_a_kind_without_a_rate_has_that_of_its_first_words(kind: str, rate: float) -> None:
    assert machine().speed(1).rate(kind) == rate


def test_a_line_takes_the_longer_of_its_operations_and_its_bytes() -> None:
    speed = machine().speed(1)
    assert speed.seconds("convolution", 6e11, 4e10) == pytest.approx(2 + 2e-5)
    assert speed.seconds("convolution", 3e10, 8e10) == pytest.approx(2 + 2e-5)
    assert speed.seconds("view", 0, 0) == 0


@pytest.mark.parametrize(
    ("trainers", "devices", "bandwidth"),
    [(1, 0, 4e10), (2, 0, 2e10), (3, 0, 4e10 / 3), (8, 0, 5e9), (8, 8, 2e10), (16, 8, 1e10)],
)
def test_more_trainers_than_were_measured_share(
    trainers: int, devices: int, bandwidth: float
) -> None:
    """On GPUs, only where they are more than there are GPUs."""
    speed = machine(devices=devices).speed(trainers)
    assert speed.bandwidth == pytest.approx(bandwidth)
    if trainers > 1:
        slower = 2e10 / bandwidth
        assert speed.rates == {"default": pytest.approx(1e10 / slower)}
        assert speed.call == pytest.approx(1e-5 * slower)


def test_cores_and_trainers() -> None:
    assert (machine().trainers, machine().cores) == (2, 2)
    assert (machine(devices=8).trainers, machine(devices=8).cores) == (8, math.inf)


def test_rates_that_were_not_measured_are_assumed_and_named() -> None:
    known = machine().exchange_rates(2)
    assert known.rates.averaged == 4e-10
    assert known.rates.bytes_between == 8 / ASSUMED_BITS
    assert known.rates.steps_between == ASSUMED_LATENCY
    # Of two trainers at once each has 2e10 bytes/s.
    assert known.rates.bytes_within == pytest.approx(2 / 2e10)
    assert known.rates.added == pytest.approx(12 / 2e10)
    assert known.rates.rounded == pytest.approx((4 + 2) / 2e10)
    assumed = machine(exchange={}).exchange_rates(1).rates
    assert assumed.averaged == pytest.approx((4 + 4) / 4e10)
    assert assumed.messages == assumed.steps_within == ASSUMED_LATENCY
    assert known.assumptions(load("memory", 1000, Layout(1, 2))) == []
    assert known.assumptions(load("ar", 1000, Layout(2, 1))) == [
        "steps_between",
        "bytes_between",
        "added",
    ]


def test_the_keys_of_pydtnn() -> None:
    """In its units, of which that of the network is bits."""
    keys = {"cpu_speed": 4e12, "memory_bw": 5e10, "network_bw": 1e9, "network_lat": 5e-7}
    alone = Machine.of(keys)
    assert alone.speed(1).seconds("convolution", 8e12, 5e10) == pytest.approx(2)
    assert alone.speed(1).seconds("relu", 1, 1e11) == pytest.approx(2)
    for found in (alone, machine(**keys)):
        rates = found.exchange_rates(1).rates
        assert (rates.bytes_between, rates.steps_between) == (8e-9, 5e-7)
    both = machine(**keys).speed(1)
    assert (both.rates, both.bandwidth, both.call) == ({"default": 4e12}, 5e10, 2e-5)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The values of the file, with another value at a place, or with None none."""
    found = values()
    *parts, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    inner: Any = found
    for part in parts:
        inner = inner[part]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("speeds/0/rates/convolution", -1, "convolution is -1, expected a number of FLOP/s above"),
        ("speeds/0/rates/relu", 0, "relu is 0, expected a number of FLOP/s above 0"),
        ("speeds/1/rates/default", math.inf, "default is Infinity, expected a number of FLOP/s"),
        ("speeds/1/rates/default", True, "default is true, expected a number of FLOP/s above 0"),
        ("speeds/1/rates/default", None, "entry 2: rates is {}: no rate 'default', which kinds"),
        ("speeds/0/rates", None, "entry 1: rates is missing; it must be FLOP/s by kind of work"),
        ("speeds/0/rates", [1], "entry 1: rates is [1]; it must be FLOP/s by kind of work"),
        ("speeds/0/rates/convolutoin", 1e9, "unknown kind convolutoin; did you mean convolution?"),
        ("devices", -1, "devices is -1; it must be a number of GPUs"),
        ("speeds/0/bandwidth", None, "bandwidth is missing; it must be a number of bytes/s above"),
        ("speeds/0/bandwidth", -4e10, "bandwidth is -40000000000.0; it must be a number of bytes"),
        ("speeds/0/trainers", 0, "trainers is 0; it must be the trainers that work at once, a"),
        ("speeds/0/threds", 2, "speeds, entry 1: unknown key threds; did you mean threads?"),
        ("speeds/1/trainers", 1, "speeds has two entries for one number of trainers"),
        ("speeds/0", 3, "speeds, entry 1: holds 3; expected keys and their values"),
        ("speeds", 3, "speeds is 3; it must be a list of speeds"),
        ("speeds", None, "holds no speeds; expected speeds, which 'tandem cost --calibrate'"),
        ("load", math.nan, "load is NaN; it must be a number of bytes/s above 0"),
        ("load", "fast", 'load is "fast"; it must be a number of bytes/s above 0'),
        ("lode", 1e8, "unknown key lode; did you mean load?"),
        ("exchange/averaged", -1, "exchange.averaged is -1; it must be a number of seconds per"),
        ("exchange/avaraged", 1, "exchange: unknown key avaraged; did you mean averaged?"),
        ("network_bw", 0, "network_bw is 0; it must be a number of bit/s above 0"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(InputError) as error:
        Machine.of(changed(path, value), "machine.yaml")
    text = str(error.value)
    assert text.startswith("machine.yaml: ")
    assert message in text
    assert "\n" not in text


def test_the_file_in_the_docs() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    block = page.split("```yaml\n")[-1].split("```")[0]
    found = Machine.of(yaml.safe_load(block))
    assert found.exchange_rates(1).rates.bytes_between == pytest.approx(8 / 10e9)
    assert found.speed(1).rate("convolution weight 1x1") == 1.6e12
