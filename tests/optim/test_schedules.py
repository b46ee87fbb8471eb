"""Learning rates against simulations that remember what they did, and at their boundaries."""

import math
import random
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from tandem.optim.schedules import (
    SCHEDULES,
    Auto,
    Cosine,
    Every,
    Moment,
    OneCycle,
    Plateau,
    Poly,
    Schedule,
    Step,
    Table,
)

NAN = math.nan


def step_rate(epoch: int, base: float, drops: tuple[int, ...]) -> float:
    return Step(lr_step=drops).rate(base, Moment(epoch, epoch, 60))


def auto_rate(base: float, errors: list[float], threshold: float) -> float:
    done = len(errors)
    history = [{"top1_error": error} for error in errors]
    return Auto(threshold).rate(base, Moment(done, done, 60, history))


def test_every_schedule_has_a_name() -> None:
    assert list(SCHEDULES) == [
        *("step", "every", "plateau", "auto", "poly", "cosine", "constant", "onecycle", "table")
    ]


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


# Against torch.optim.lr_scheduler


def made_by_torch(kind: Any, base: float, **settings: Any) -> tuple[SGD, Any]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    return optimizer, kind(optimizer, **settings)


def rates_by_torch(kind: Any, base: float, steps: int, **settings: Any) -> list[float]:
    """The rates of so many steps of a scheduler that needs no metric."""
    optimizer, scheduler = made_by_torch(kind, base, **settings)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer steps here
        for step in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            if step < steps - 1:
                scheduler.step()
    return rates


@pytest.mark.parametrize("factor", [0.1, 0.2, 0.97])
def test_a_factor_at_epochs_is_that_of_torch(factor: float) -> None:
    moments = [Moment(epoch, epoch, 30) for epoch in range(30)]
    milestones = rates_by_torch(lr_scheduler.MultiStepLR, 0.5, 30, milestones=[7, 9], gamma=factor)
    found = [Step(factor, (7, 9)).rate(0.5, moment) for moment in moments]
    assert found == pytest.approx(milestones, rel=1e-12)
    every = rates_by_torch(lr_scheduler.StepLR, 0.5, 30, step_size=4, gamma=factor)
    found = [Every(factor, 4).rate(0.5, moment) for moment in moments]
    assert found == pytest.approx(every, rel=1e-12)


def test_without_a_factor_the_rate_is_divided_as_ever() -> None:
    """The bits of runs from before there was one."""
    for epoch, drops in ((0, 0), (20, 1), (40, 2)):
        assert Step().rate(0.01, Moment(epoch, epoch, 60)) == 0.01 / 10**drops


@pytest.mark.parametrize(
    ("name", "mode"), [("validation_loss", "min"), ("top1_error", "min"), ("f1", "max")]
)
@pytest.mark.parametrize("seed", range(6))
def test_plateau_falls_where_torch_does(name: str, mode: str, seed: int) -> None:
    source = random.Random(seed)
    settings = {
        "factor": source.choice([0.1, 0.5]),
        "patience": source.choice([0, 1, 3]),
        "threshold": source.choice([1e-4, 0.02]),
        "cooldown": source.choice([0, 2, 5]),
    }
    least = source.choice([0.0, 0.004])
    sign = 1 if mode == "min" else -1
    values, value = [], 1.0
    for _ in range(60):
        value -= sign * source.choice([-0.01, 0.0, 0.0, 0.004, 0.03]) * value
        values.append(NAN if source.random() < 0.05 else value)
    optimizer, scheduler = made_by_torch(
        lr_scheduler.ReduceLROnPlateau, 0.1, mode=mode, min_lr=least, **settings
    )
    expected = [0.1]
    for value in values:
        scheduler.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    ours = Plateau(
        lr_factor=settings["factor"],
        lr_patience=int(settings["patience"]),
        lr_threshold=settings["threshold"],
        lr_cooldown=int(settings["cooldown"]),
        lr_min=least,
        lr_monitor=name,
    )
    history = [{name: value, "another": 0.0} for value in values]
    found = [ours.rate(0.1, Moment(done, done, 60, history[:done])) for done in range(61)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 1


def test_epochs_in_which_a_value_was_not_measured_do_not_count() -> None:
    """Those before a resume that began to monitor it."""
    history = [{"top1_error": 0.5}] * 40 + [{"f1": 0.5}] * 2
    plateau = Plateau(lr_patience=1, lr_monitor="f1")
    assert plateau.rate(1.0, Moment(42, 42, 60, history)) == 1
    assert plateau.rate(1.0, Moment(43, 43, 60, [*history, {"f1": 0.5}])) == 0.1


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (40, {}),
        (100, {"pct_start": 0.1, "div_factor": 10.0, "final_div_factor": 100.0}),
        (7, {"pct_start": 0.9}),
    ],
)
def test_one_cycle_is_that_of_torch(steps: int, settings: dict[str, float]) -> None:
    expected = rates_by_torch(
        lr_scheduler.OneCycleLR,
        0.5,
        steps,
        max_lr=0.5,
        total_steps=steps,
        cycle_momentum=False,
        **settings,
    )
    defaults = {"pct_start": 0.3, "div_factor": 25.0, "final_div_factor": 1e4}
    ours = OneCycle(*(defaults | settings).values())
    found = [ours.rate(0.5, Moment(0, n / steps, 1, (), n, steps)) for n in range(steps)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert ours.rate(0.5, Moment(2, 2, 1, (), 2 * steps, steps)) == found[-1]


def test_a_table_holds_from_each_of_its_epochs_on() -> None:
    table = Table({3: 0.5, 1: 0.25})
    rates = [table.rate(0.1, Moment(epoch, epoch, 5)) for epoch in range(5)]
    assert rates == [0.1, 0.25, 0.25, 0.5, 0.5]
    assert Table().rate(0.1, Moment(9, 9, 10)) == 0.1


def test_rates_fall_to_zero_without_an_end() -> None:
    assert Every(lr_every=1).rate(0.1, Moment(700, 700, 800)) < 1e-300
    assert auto_rate(0.1, [1.0] * 700, 0.01) < 1e-300
