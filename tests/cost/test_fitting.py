"""The speed that follows from timed lines, against the speed by which they were timed."""

from dataclasses import replace

import pytest

from tandem.cost.fitting import TimedLine, fit_speed
from tandem.cost.machine import Speed
from tandem.ops.work import Work

SPEED = Speed(
    trainers=2,
    threads=3,
    bandwidth=4e10,
    call=2e-5,
    rates={"default": 2e9, "elementwise": 2e9, "convolution": 3e11, "norm": 1e10, "update": 1e10},
)
WORKS = [
    Work("convolution", 10**9, 10**7),
    Work("convolution", 5 * 10**9, 10**7),
    Work("norm", 10**8, 10**8),
    Work("update", 4 * 10**8, 16 * 10**8),
    Work("elementwise", 10**7, 10**8),
    *[Work("elementwise", 1, 12)] * 5,
    Work("move", 0, 10**8),
    Work("view", 0, 0),
]


def timed(works: list[Work] = WORKS) -> list[TimedLine]:
    return [TimedLine(w, SPEED.seconds(w.kind, w.flops, w.nbytes)) for w in works]


def fitted(lines: list[TimedLine], steps: float = 0.0) -> Speed:
    return fit_speed(lines, steps, SPEED.trainers, SPEED.threads)


def test_the_speed_by_which_lines_were_timed_is_found() -> None:
    found = fitted(timed())
    assert (found.trainers, found.threads) == (2, 3)
    assert found.rates == pytest.approx(SPEED.rates, rel=1e-2)
    assert found.bandwidth == pytest.approx(SPEED.bandwidth, rel=1e-3)
    assert found.call == pytest.approx(SPEED.call, rel=1e-3)


def test_steps_take_as_long_as_they_did() -> None:
    """Also the time between lines, and that of views."""
    lines = [replace(line, seconds=1.1 * line.seconds) for line in timed()]
    lines[-1] = replace(lines[-1], seconds=2e-3)
    steps = sum(line.seconds for line in lines) + 5e-3
    found = fitted(lines, steps)
    predicted = sum(found.seconds(w.kind, w.flops, w.nbytes) for w in WORKS)
    assert predicted == pytest.approx(steps, rel=1e-3)


def test_conversions_count_for_the_lines_that_need_them() -> None:
    conversion = TimedLine(Work("convolution", 0, 0), 0.02)
    assert fitted([*timed(), conversion]).rates["convolution"] == pytest.approx(
        6e9 / (6e9 / 3e11 + 0.02), rel=1e-3
    )


def test_without_an_elementwise_line_the_default_follows_from_the_bandwidth() -> None:
    found = fitted([line for line in timed() if line.work.kind != "elementwise"])
    assert found.rates["default"] == found.bandwidth / 12
    assert found.call == 0


def test_a_step_without_an_update_has_no_bandwidth() -> None:
    with pytest.raises(ValueError, match="no line updates weights"):
        fitted(timed(WORKS[:3]))
