"""What is learned at which rate, and layers that the network does not have."""

from typing import Any

import pytest

from tandem.errors import InputError
from tandem.layers.parameter import Parameter, bias, weight
from tandem.optim.parameter_groups import (
    ParameterRate,
    check_layers,
    learned_rates,
    running_averages,
)

DECLARED = {
    parameter.name: parameter
    for layer in ("conv1", "fc8")
    for parameter in (weight(layer, (2, 2), std=0.1), bias(layer, 2))
}


def rates(**settings: Any) -> dict[str, ParameterRate]:
    return learned_rates(DECLARED, weight_decay=0.5, **settings)


def test_biases_learn_at_twice_the_rate_and_do_not_decay() -> None:
    assert rates() == {
        "conv1.weight": ParameterRate(1.0, 0.5),
        "conv1.bias": ParameterRate(2.0, 0.0),
        "fc8.weight": ParameterRate(1.0, 0.5),
        "fc8.bias": ParameterRate(2.0, 0.0),
    }


def test_multipliers_are_of_whole_layers() -> None:
    found = rates(lr_multipliers={"fc8": 10})
    assert [rate.factor for rate in found.values()] == [1, 2, 10, 20]
    assert [rate.decay for rate in found.values()] == [0.5, 0, 0.5, 0]


def test_what_is_frozen_is_left_out() -> None:
    assert list(rates(freeze=["conv1"])) == ["fc8.weight", "fc8.bias"]
    with pytest.raises(InputError, match="every layer"):
        rates(freeze=["conv1", "fc8"])


@pytest.mark.parametrize("setting", ["freeze", "lr_multipliers"])
def test_unknown_layers_name_the_nearest(setting: str) -> None:
    for name in ("fc9", "FC8", "conv1.weight"):
        value = [name] if setting == "freeze" else {name: 2.0}
        with pytest.raises(InputError) as caught:
            rates(**{setting: value})
        nearest = "fc8" if "8" in name or "9" in name else "conv1"
        assert str(caught.value) == (
            f"{setting}: the network has no layer {name!r}; did you mean {nearest}? "
            "It has conv1, fc8"
        )
    with pytest.raises(InputError, match=r"no layer 'xyz'\. It has"):
        check_layers("freeze", ["xyz"], DECLARED)


def test_what_is_not_trained_has_no_rate_and_is_averaged_unless_frozen() -> None:
    mean = Parameter("norm.mean", (3,), trainable=False, keep=0.9)
    declared = {**DECLARED, "norm.mean": mean}
    assert learned_rates(declared, weight_decay=0.5) == rates()
    assert running_averages(declared) == {"norm.mean": 0.9}
    assert running_averages(declared, ["norm"]) == {}


def test_a_parameters_own_rate_and_decay() -> None:
    declared = {"norm.scale": Parameter("norm.scale", (3,), decay=False, rate=0.5)}
    assert learned_rates(declared, lr_multipliers={"norm": 4}, weight_decay=0.5) == {
        "norm.scale": ParameterRate(2.0, 0.0)
    }
