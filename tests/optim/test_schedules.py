"""Learning rates against simulations that remember what they did, and at their boundaries."""

import math
import random

import pytest

from tandem.optim.schedules import SCHEDULES, Auto, Cosine, Moment, Poly, Schedule, Step

NAN = math.nan


def step_rate(epoch: int, base: float, drops: tuple[int, ...]) -> float:
    return Step(drops).rate(base, Moment(epoch, epoch, 60))


def auto_rate(base: float, errors: list[float], threshold: float) -> float:
    done = len(errors)
    return Auto(threshold).rate(base, Moment(done, done, 60, errors))


def test_every_schedule_has_a_name() -> None:
    assert list(SCHEDULES) == ["step", "auto", "poly", "cosine", "constant"]


def simulate_steps(base: float, drops: tuple[int, ...], epochs: int) -> list[float]:
    """The rate of every epoch, by a program that divides it at the end of an epoch."""
    rates, rate = [], base
    for done in range(epochs):
        if done in drops:
            rate /= 10
        rates.append(rate)
    return rates


def simulate_auto(base: float, errors: list[float], threshold: float) -> list[float]:
    """The rate of every epoch, by a program that decides after each and remembers the division."""
    rates, rate, waiting = [base], base, 0
    for done in range(1, len(errors) + 1):
        waiting = max(waiting - 1, 0)
        if done > 5 and waiting == 0:
            before, now = errors[done - 3], errors[done - 1]
            improved = not math.isnan(before) and not math.isnan(now) and before - now >= threshold
            if not improved:
                rate /= 10
                waiting = 2
        rates.append(rate)
    return rates


@pytest.mark.parametrize("drops", [(20, 40), (25, 45), (1,), (), (3, 4, 5), (70,)])
def test_step_divides_where_a_simulation_does(drops: tuple[int, ...]) -> None:
    rates = [step_rate(epoch, 0.01, drops) for epoch in range(60)]
    assert rates == pytest.approx(simulate_steps(0.01, drops, 60), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_auto_divides_where_a_simulation_does(seed: int) -> None:
    source = random.Random(seed)
    errors, error = [], 1.0
    for _ in range(60):
        error -= source.choice([0.0, 0.001, 0.004, 0.006, 0.02])
        errors.append(NAN if source.random() < 0.05 else error)
    expected = simulate_auto(0.01, errors, 0.01)
    found = [auto_rate(0.01, errors[:done], 0.01) for done in range(61)]
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(set(expected)) > 2


def test_auto_looks_at_epoch_six_first() -> None:
    rates = [auto_rate(1.0, [0.5] * done, 0.01) for done in range(11)]
    assert rates == [1, 1, 1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001]


def test_auto_keeps_the_rate_while_the_error_falls() -> None:
    falling = [1 - 0.01 * n for n in range(30)]
    assert auto_rate(1.0, falling, 0.015) == 1
    # Two epochs improve by 0.02, which is less than 0.025 throughout: after epochs 6, 8, 10 ...
    assert auto_rate(1.0, falling[:10], 0.025) == pytest.approx(1e-3)


def test_auto_takes_exactly_the_threshold_as_enough() -> None:
    errors = [1.0, 1.0, 1.0, 0.75, 0.75, 0.5]
    assert auto_rate(1.0, errors, 0.25) == 1
    assert auto_rate(1.0, errors, 0.2500001) == 0.1


def test_auto_waits_until_the_window_lies_after_a_division() -> None:
    # Stalls up to epoch 6, then gains in each of the next two epochs only half of the threshold.
    errors = [0.5] * 6 + [0.375, 0.25]
    assert auto_rate(1.0, errors[:6], 0.25) == 0.1
    assert auto_rate(1.0, errors[:7], 0.25) == 0.1
    assert auto_rate(1.0, errors[:8], 0.25) == 0.1
    assert auto_rate(1.0, [*errors[:7], 0.3], 0.25) == 0.01


@pytest.mark.parametrize("place", [-1, -3])
def test_auto_takes_an_error_that_is_no_number_as_no_improvement(place: int) -> None:
    errors = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    assert auto_rate(1.0, errors, 0.01) == 1
    errors[place] = NAN
    assert auto_rate(1.0, errors, 0.01) == 0.1


@pytest.mark.parametrize(
    ("schedule", "done", "expected"),
    [
        *[(Poly(2.0), 0, 0.5), (Poly(2.0), 5, 0.125), (Poly(1.0), 5, 0.25)],
        *[(Poly(2.0), 10, 0), (Poly(0.5), 11, 0)],
        *[(Cosine(), 0, 0.5), (Cosine(), 5, 0.25), (Cosine(), 10 / 3, 0.375)],
        *[(Cosine(), 10, 0), (Cosine(), 11, 0)],
    ],
)
def test_poly_and_cosine_fall_to_zero(schedule: Schedule, done: float, expected: float) -> None:
    assert schedule.rate(0.5, Moment(int(done), done, 10)) == pytest.approx(expected)
