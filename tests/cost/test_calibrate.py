"""Measuring a machine: what is combined how, and small measurements."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.config.hardware import available_cores, available_memory
from tandem.cost import calibrate as module
from tandem.cost.calibrate import (
    EXCHANGED,
    Division,
    Measured,
    _measure,
    _warn_if_busy,
    calibrate,
    divisions,
    exchange_rates,
    loader_rate,
    make_steps,
    speed,
)
from tandem.cost.exchange import Layout, Rates, load, seconds
from tandem.cost.fitting import TimedLine, TimedSteps
from tandem.cost.machine import Machine
from tandem.cost.probes import LargeFilters, Probe
from tandem.cost.timed_steps import TimedNetwork
from tandem.distributed import local_groups
from tandem.errors import InputError
from tandem.ops.work import KINDS, Work


@pytest.mark.parametrize(
    ("cores", "memory", "expected"),
    [
        (1, math.inf, [(1, 1)]),
        (2, 24e9, [(1, 2), (2, 1)]),
        (2, 1e9, [(1, 2)]),
        (6, math.inf, [(1, 6), (2, 3), (4, 1)]),
        (64, 256e9, [(1, 64), (2, 32), (4, 16), (8, 8)]),
        (64, 16e9, [(1, 64), (2, 32), (4, 16)]),
    ],
)
def test_trainers_share_the_cores(
    cores: int, memory: float, expected: list[tuple[int, int]]
) -> None:
    assert divisions(cores, memory) == [Division(*pair) for pair in expected]


def test_a_speed_is_that_of_all_trainers_who_worked_at_once() -> None:
    """Here the second one's steps take twice as long."""
    works = [Work("update", 10**9, 4 * 10**9), Work("convolution", 10**10, 10**6)]
    parts = [
        Measured(
            Division(2, 4),
            [TimedSteps([TimedLine(work, factor * 0.1)], factor * 0.1, 9.0) for work in works],
            [],
        )
        for factor in (1, 2)
    ]
    found = speed([*parts, Measured(Division(2, 4), [], [])])
    assert (found.trainers, found.threads) == (2, 4)
    assert found.rates["convolution"] == pytest.approx(2e10 / 0.3)
    assert found.bandwidth == pytest.approx(8e9 / 0.3)
    assert found.call == pytest.approx(0)


def test_the_rates_of_an_exchange_are_found() -> None:
    rates = Rates(messages=2e-5, averaged=3e-10)
    cores = 4
    found = [
        Measured(
            Division(trainers, cores // trainers),
            [],
            [seconds(rates, load("memory", n, Layout(1, trainers, cores))) for n in EXCHANGED]
            if trainers > 1
            else [],
        )
        for trainers in (1, 2, 4)
    ]
    fitted = exchange_rates(found, cores)
    assert fitted.messages == pytest.approx(2e-5, rel=1e-3)
    assert fitted.averaged == pytest.approx(3e-10, rel=1e-3)
    assert fitted.bytes_between is None
    assert exchange_rates(found[:1], 1).averaged is None


def test_steps_end_by_the_first_trainers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    steps: list[tuple[str, bool]] = []

    def network(name: str) -> Any:
        return SimpleNamespace(step=lambda counts: steps.append((name, counts)))

    (alone,) = local_groups(1)
    make_steps(alone, [network("a"), network("b")], 1.5, rounds=9)
    assert steps == [(name, counts) for counts in (False, True, True) for name in "ab"]


def test_a_loader_is_measured() -> None:
    assert 1e6 < loader_rate(4, rounds=1) < math.inf


def test_a_busy_machine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    quiet, busy = (Measured(Division(1, 1), [TimedSteps([], 1.0, n)], []) for n in (1.2, 2.0))
    _warn_if_busy([quiet])
    assert not caplog.records
    _warn_if_busy([quiet, busy])
    assert "took 2.0 times as long" in caplog.text


def test_a_process_that_ends_early_is_one_sentence() -> None:
    """Here for a deadline that is no number."""
    with pytest.raises(InputError, match=r"a process that measured this machine ended early; exp"):
        _measure([Division(1, 1)], None, 1)  # type: ignore[arg-type]


def test_each_line_of_a_step_is_timed() -> None:
    network = TimedNetwork(Probe(LargeFilters, 67, 2, width=1 / 16))
    seconds = []
    for counts in (False, True, True, True):
        begun = time.perf_counter()
        network.step(counts)
        seconds.append(time.perf_counter() - begun)
    found = network.take()
    kinds = {line.work.kind for line in found.lines}
    assert kinds > {"convolution", "convolution weight image", "lrn gradient", "product", "update"}
    assert kinds <= {*KINDS}
    # Two of three steps count.
    assert found.step == pytest.approx(sum(sorted(seconds[1:])[:2]) / 2, rel=0.3)
    assert found.slowest == pytest.approx(max(seconds[1:]), rel=0.3)
    assert 0.3 * found.step < sum(line.seconds for line in found.lines) < found.step


@pytest.mark.slow
def test_this_machine_is_measured_in_minutes() -> None:
    begun = time.monotonic()
    machine = calibrate()
    assert time.monotonic() - begun < 240  # beside another test
    assert Machine.of(machine.plain()) == machine
    cores = len(available_cores())
    assert [(s.trainers, s.threads) for s in machine.speeds] == [
        (division.trainers, division.threads) for division in divisions(cores, available_memory())
    ]
    for found in machine.speeds:
        # Kinds that only copy have no rate, and nobody needs the gradient of pictures.
        others = {"move", "view", "convolution input image"}
        assert set(found.rates) >= {"default", *KINDS} - others
    assert machine.load is not None
    assert (machine.exchange.averaged is None) == (cores == 1)


@pytest.mark.slow
def test_ctrl_c_ends_a_measurement_in_a_word(tmp_path: Path) -> None:
    """On a terminal all processes get the signal."""
    command = [sys.executable, "-m", "tandem", "cost", "--calibrate"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        time.sleep(12)  # the processes have started, and most of their imports are done
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(30) == 130
    assert first.startswith("measuring ")
    assert rest == "stopped by SIGINT\n"
    assert not [*tmp_path.iterdir()]
