"""The rate of a step: schedules with warm-up and scaling."""

import math

import pytest

from tandem.config.schema import Config, make_config
from tandem.optim import SCHEDULES
from tandem.training.learning_rate import (
    gradual_factor,
    learning_rate,
    scaling_factor,
    warmup_factor,
)

STEPS = 4
# Up in steps 0 to 2, down in nine: the top is exactly at 2.
ONE_CYCLE = [
    *(1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * n / 2)) / 2 for n in range(2)),
    *(4e-6 + (1 - 4e-6) * (1 + math.cos(math.pi * n / 9)) / 2 for n in range(10)),
]


def test_resuming_skips_no_drop() -> None:
    # The original, resumed at epoch 45, had divided only once.
    config = make_config({"learning_rate": 1.0})
    assert learning_rate(config, 45, 0, 10) == 0.01


def test_warm_up_rises_by_equal_amounts() -> None:
    assert [warmup_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup_factor(0, 0) == 1
    assert warmup_factor(0, 0.5) == 1
    assert warmup_factor(0, 2.5) == 0.4


def history_of(errors: tuple[float, ...]) -> list[dict[str, float]]:
    return [{"top1_error": error} for error in errors]


def rates_of(config: Config, errors: tuple[float, ...] = ()) -> list[float]:
    return [
        learning_rate(config, epoch, step, STEPS, history_of(errors))
        for epoch in range(config.n_epochs)
        for step in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"lr_policy": "constant"}, [1.0] * 12),
        ({"lr_step": [1, 2]}, [1] * 4 + [0.1] * 4 + [0.01] * 4),
        ({"lr_policy": "poly", "lr_power": 2}, [(1 - n / 12) ** 2 for n in range(12)]),
        ({"lr_policy": "every", "lr_every": 2, "lr_factor": 0.5}, [1] * 8 + [0.5] * 4),
        ({"lr_policy": "table", "lr_table": {1: 0.5, 2: 3}}, [1] * 4 + [0.5] * 4 + [3] * 4),
        ({"lr_policy": "onecycle", "lr_rise": 0.25}, ONE_CYCLE),
        ({"lr_policy": "cosine"}, [math.cos(math.pi * n / 24) ** 2 for n in range(12)]),
    ],
)
def test_rates_of_every_step(policy: dict[str, object], expected: list[float]) -> None:
    config = make_config({**policy, "learning_rate": 1.0, "n_epochs": 3})
    assert rates_of(config) == pytest.approx(expected)


def test_auto_looks_only_at_epochs_that_lie_before() -> None:
    config = make_config({"lr_policy": "auto", "learning_rate": 1.0, "n_epochs": 9})
    errors = (0.5,) * 9
    assert rates_of(config, errors) == [1] * 24 + [0.1] * 8 + [0.01] * 4
    assert learning_rate(config, 6, 0, STEPS, history_of(errors[:6])) == 0.1


@pytest.mark.parametrize("policy", [*SCHEDULES])
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
        plain = 0.01 / 10 ** sum(epoch >= drop for drop in (20, 40))
        assert learning_rate(config, epoch, 3, 10) == pytest.approx(full * plain, rel=1e-12)
    summed = {"sum_rows": 32, "global_batch": 512, "devices": ("cpu",), "lr_scaling": scaling}
    alone = make_config(summed)  # 512 images are 4 times 128
    assert learning_rate(alone, 0, 3, 10) == pytest.approx(full * 0.01, rel=1e-12)
    warmed = config.model_copy(update={"warmup_epochs": 2.0})
    rates = [learning_rate(warmed, s // 10, s % 10, 10) for s in range(25)]
    assert rates[20:] == pytest.approx([0.01 * full] * 5, rel=1e-12)
    first = 0.01 * (full - 1) / 20 + 0.01 if full > 1 else 0.01 / 20
    assert rates[0] == pytest.approx(first, rel=1e-12)
