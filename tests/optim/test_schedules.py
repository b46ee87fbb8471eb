"""Learning rates against simulations that remember what they did, and at their boundaries."""

import math
import random

import pytest

from tandem.config.schema import Config, make_config
from tandem.optim.schedules import (
    auto_rate,
    cosine_rate,
    gradual_factor,
    learning_rate,
    poly_rate,
    scaling_factor,
    step_rate,
    warmup_factor,
)

NAN = math.nan


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


def test_step_at_its_boundaries() -> None:
    rates = [step_rate(epoch, 1.0, (20, 40)) for epoch in (0, 19, 20, 39, 40, 1000)]
    assert rates == [1, 1, 0.1, 0.1, 0.01, 0.01]


def test_resuming_skips_no_drop() -> None:
    # The original, resumed at epoch 45, had divided only once.
    config = make_config({"learning_rate": 1.0})
    assert learning_rate(config, 45, 0, 10) == 0.01


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
    assert [auto_rate(1.0, [0.5] * done, 0.01) for done in range(11)] == [
        *[1, 1, 1, 1, 1, 1],
        *[0.1, 0.1, 0.01, 0.01, 0.001],
    ]


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


def test_poly_falls_to_zero() -> None:
    assert poly_rate(0, 0.5, 10, 2.0) == 0.5
    assert poly_rate(5, 0.5, 10, 2.0) == 0.125
    assert poly_rate(5, 0.5, 10, 1.0) == 0.25
    assert poly_rate(10, 0.5, 10, 2.0) == 0
    assert poly_rate(11, 0.5, 10, 0.5) == 0


def test_cosine_falls_to_zero() -> None:
    assert cosine_rate(0, 0.5, 10) == 0.5
    assert cosine_rate(5, 0.5, 10) == pytest.approx(0.25)
    assert cosine_rate(10 / 3, 0.5, 10) == pytest.approx(0.375)
    assert cosine_rate(10, 0.5, 10) == 0
    assert cosine_rate(11, 0.5, 10) == 0


def test_warm_up_rises_by_equal_amounts() -> None:
    assert [warmup_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup_factor(0, 0) == 1
    assert warmup_factor(0, 0.5) == 1
    assert warmup_factor(0, 2.5) == 0.4


# What learning_rate makes of them

STEPS = 4


def rates_of(config: Config, errors: tuple[float, ...] = ()) -> list[float]:
    return [
        learning_rate(config, epoch, step, STEPS, errors)
        for epoch in range(config.n_epochs)
        for step in range(STEPS)
    ]


def test_constant() -> None:
    config = make_config({"lr_policy": "constant", "learning_rate": 0.3, "n_epochs": 3})
    assert rates_of(config) == [0.3] * 12


def test_step() -> None:
    config = make_config({"learning_rate": 1.0, "lr_step": [1, 2], "n_epochs": 3})
    assert rates_of(config) == [1] * 4 + [0.1] * 4 + [0.01] * 4


def test_poly_and_cosine_fall_from_step_to_step() -> None:
    poly = make_config({"lr_policy": "poly", "lr_power": 2, "learning_rate": 1.0, "n_epochs": 3})
    assert rates_of(poly) == pytest.approx([(1 - n / 12) ** 2 for n in range(12)])
    cosine = make_config({"lr_policy": "cosine", "learning_rate": 1.0, "n_epochs": 3})
    expected = [math.cos(math.pi * n / 24) ** 2 for n in range(12)]
    assert rates_of(cosine) == pytest.approx(expected)


def test_auto_looks_only_at_epochs_that_lie_before() -> None:
    config = make_config({"lr_policy": "auto", "learning_rate": 1.0, "n_epochs": 9})
    errors = (0.5,) * 9
    assert rates_of(config, errors) == [1] * 24 + [0.1] * 8 + [0.01] * 4
    assert learning_rate(config, 6, 0, STEPS, errors[:6]) == 0.1


@pytest.mark.parametrize("policy", ["step", "auto", "poly", "cosine", "constant"])
def test_warm_up_multiplies_every_policy(policy: str) -> None:
    plain = make_config({"lr_policy": policy, "n_epochs": 3, "lr_step": [1]})
    warmed = make_config({**plain.model_dump(mode="json"), "warmup_epochs": 1.5})
    factors = [min((n + 1) / 6, 1) for n in range(12)]
    expected = [rate * factor for rate, factor in zip(rates_of(plain), factors, strict=True)]
    assert rates_of(warmed) == pytest.approx(expected)
    assert rates_of(warmed)[0] > 0


def test_a_scaled_rate_rises_from_that_of_one_trainer() -> None:
    """Goyal et al. 2017, section 2.2: from eta to k eta, by equal amounts."""
    assert [gradual_factor(step, 4, 9.0) for step in range(6)] == [3, 5, 7, 9, 9, 9]
    assert gradual_factor(0, 0, 9.0) == 9
    assert scaling_factor("linear", 8) == 8
    assert scaling_factor("sqrt", 9) == 3


@pytest.mark.parametrize(("scaling", "full"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_scaling_multiplies_the_policy(scaling: str, full: float) -> None:
    config = make_config({"devices": ["cpu"] * 4, "lr_scaling": scaling})
    for epoch in (0, 19, 20, 40):
        plain = step_rate(epoch, 0.01, (20, 40))
        assert learning_rate(config, epoch, 3, 10) == pytest.approx(full * plain, rel=1e-12)
    warmed = config.model_copy(update={"warmup_epochs": 2.0})
    rates = [learning_rate(warmed, s // 10, s % 10, 10) for s in range(25)]
    assert rates[20:] == pytest.approx([0.01 * full] * 5, rel=1e-12)
    first = 0.01 * (full - 1) / 20 + 0.01 if full > 1 else 0.01 / 20
    assert rates[0] == pytest.approx(first, rel=1e-12)
