"""The end of training before the last epoch, against a loop that remembers."""

import math
import random
from typing import Any

import pytest

from tandem.artifacts.metrics_log import ValidationRecord
from tandem.config.resolve import check_settings
from tandem.config.schema import make_config
from tandem.errors import InputError
from tandem.layers.monitored import is_higher_better
from tandem.training.early_end import reason_to_end


def ends_by_a_loop(values: list[float], patience: int, limit: float | None, rises: bool) -> int:
    """Epochs until a program that remembers the best value ends."""
    best, since = None, 0
    for done, value in enumerate(values, 1):
        signed = value if rises else -value
        if limit is not None and signed >= (limit if rises else -limit):
            return done
        if not math.isnan(value) and (best is None or signed > best):
            best, since = signed, 0
        else:
            since += 1
        if patience and since == patience:
            return done
    return len(values) + 1


@pytest.mark.parametrize("seed", range(30))
def test_training_ends_where_a_loop_does(seed: int) -> None:
    source = random.Random(seed)
    name, rises = source.choice([("validation_loss", False), ("top1_error", False), ("f1", True)])
    patience, limit = source.choice([0, 1, 2, 4]), source.choice([None, 0.6])
    values, value = [], 0.4 if rises else 0.8
    for _ in range(25):
        value += (1 if rises else -1) * source.choice([0.03, 0.0, -0.01])
        values.append(math.nan if source.random() < 0.1 else value)
    config = make_config(
        {"stop_patience": patience, "stop_at": limit, "stop_monitor": name, "metrics": ["f1"]}
    )
    history = [{name: value} for value in values]
    expected = ends_by_a_loop(values, patience, limit, rises)
    for done in range(26):
        assert (reason_to_end(config, history[:done]) is not None) == (done >= expected)


def test_epochs_without_a_validation_do_not_count() -> None:
    config = make_config({"stop_patience": 2})
    nothing = ValidationRecord(1, 1, math.nan, math.nan, math.nan, 0).monitored
    seen = ValidationRecord(3, 3, 1.0, 0.5, 0.5, 7).monitored
    assert reason_to_end(config, [nothing, nothing, seen, nothing, nothing]) is None
    assert reason_to_end(config, [seen, seen, seen]) is not None


def test_names_of_ones_own_rise_as_keras_s() -> None:
    for name in ("sparse_categorical_accuracy", "out_accuracy", "val_auc", "f1", "my_precision"):
        assert is_higher_better(name), name
    for name in ("cosine_similarity", "cosine_similarity_1"):
        assert is_higher_better(name), name
    for name in ("validation_loss", "mae", "my_distance", "top1_error"):
        assert not is_higher_better(name), name


def test_the_reason_names_value_and_setting() -> None:
    history = [{"top1_error": 0.5}, {"top1_error": 0.625}, {"top1_error": 0.75}]
    config = make_config({"stop_patience": 2, "stop_monitor": "top1_error"})
    assert reason_to_end(config, history) == (
        "top1_error has not improved on 0.5 for 2 epochs: training ends"
    )
    config = make_config({"stop_at": 0.5, "stop_monitor": "top1_error"})
    assert reason_to_end(config, history) == (
        "top1_error is 0.5 and has reached stop_at, 0.5: training ends"
    )
    assert reason_to_end(make_config({}), history) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"stop_at": 0.5, "stop_monitor": "f1"},
            "stop_monitor: f1 is not measured: add it",
        ),
        ({"stop_patience": 1, "stop_monitor": "top1"}, "stop_monitor: top1 is not measured"),
        (
            {"stop_patience": 1, "stop_monitor": "validation_los"},
            "there is no value 'validation_los'; did you mean validation_loss",
        ),
        ({"lr_policy": "plateau", "lr_monitor": "mae"}, "lr_monitor: mae is not measured"),
        (
            {"lr_policy": "plateau", "lr_monitor": "x"},
            "There are validation_loss, top1_error",
        ),
    ],
)
def test_only_what_is_measured_can_be_monitored(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        check_settings(make_config(values))


def test_what_is_measured_can_be_monitored() -> None:
    check_settings(make_config({"stop_patience": 1, "stop_monitor": "f1", "metrics": ["f1"]}))
    check_settings(make_config({"lr_policy": "step", "lr_monitor": "f1"}))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("stop_patience", -1, "a whole number of epochs from 0 to 2147483647"),
        ("stop_at", "low", "a number, or null"),
        ("lr_patience", -1, "a whole number of epochs from 0 to 2147483647"),
        ("lr_factor", 1, "a number above 0 and below 1"),
        ("lr_every", 0, "a whole number of epochs from 1 to 2147483647"),
        ("lr_min", -0.1, "a number of at least 0"),
        ("lr_rise", 0, "a number above 0 and below 1"),
        ("lr_begin_divisor", 0.5, "a number of at least 1"),
        ("lr_table", {-1: 0.1}, "whole numbers of epochs and rates above 0"),
        ("lr_table", {0: 0}, "whole numbers of epochs and rates above 0"),
    ],
)
def test_settings_that_cannot_be_used(key: str, value: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        make_config({key: value})


def test_a_table_comes_back_from_json_with_numbers() -> None:
    config = make_config({"lr_policy": "table", "lr_table": {0: "5e-3", 30: 0.01}})
    assert dict(config)["lr_table"] == {0: 0.005, 30: 0.01}
    assert make_config(config.model_dump(mode="json")) == config
