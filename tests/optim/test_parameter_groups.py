"""What is learned at which rate, and layers that the network does not have."""

from typing import Any

import pytest

from tandem.errors import InputError
from tandem.layers.parameter import Parameter, bias, norm, weight
from tandem.optim.parameter_groups import ParameterGroups, ParameterRate, check_layers

DECLARED = {
    parameter.name: parameter
    for layer in ("conv1", "fc8")
    for parameter in (weight(layer, (2, 2), std=0.1), bias(layer, 2))
}


def rates(**settings: Any) -> dict[str, ParameterRate]:
    return ParameterGroups(**settings).learned(DECLARED, weight_decay=0.5)


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
    assert list(rates(freeze=["conv1", "fc8.bias"])) == ["fc8.weight"]
    with pytest.raises(InputError, match="every layer"):
        rates(freeze=["conv1", "fc8"])


@pytest.mark.parametrize("setting", ["freeze", "lr_multipliers"])
def test_unknown_layers_name_the_nearest(setting: str) -> None:
    for name in ("fc9", "FC8", "conv1.weights" if setting == "freeze" else "conv1.weight"):
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
    mean = Parameter("norm.mean", (3,), "average", keep=0.9)
    declared = {**DECLARED, "norm.mean": mean}
    assert ParameterGroups().learned(declared, weight_decay=0.5) == rates()
    assert ParameterGroups().averages(declared) == {"norm.mean": 0.9}
    assert ParameterGroups(["norm"]).averages(declared) == {}


def test_rate_and_decay_are_by_kind() -> None:
    declared = {p.name: p for p in (*DECLARED.values(), *norm("bn", 3))}
    groups = ParameterGroups(
        lr_multipliers={"bn": 4}, bias_rate=1.5, decay_kinds=("weight", "scale", "bias")
    )
    assert groups.learned(declared, weight_decay=0.5) == {
        "conv1.weight": ParameterRate(1.0, 0.5),
        "conv1.bias": ParameterRate(1.5, 0.5),
        "fc8.weight": ParameterRate(1.0, 0.5),
        "fc8.bias": ParameterRate(1.5, 0.5),
        "bn.weight": ParameterRate(4.0, 0.5),
        "bn.bias": ParameterRate(4.0, 0.0),
    }
    assert groups.averages(declared) == {"bn.running_mean": 0.9, "bn.running_var": 0.9}


def test_a_layer_stands_for_all_below_it() -> None:
    layers = ("layer1.0.conv1", "layer1.1.conv1", "layer10.0.conv1", "fc")
    made = [(weight(layer, (2, 2), 0.1), *norm(layer, 2)[2:]) for layer in layers]
    declared = {parameter.name: parameter for group in made for parameter in group}
    groups = ParameterGroups(["layer1"], {"layer10": 3.0, "layer10.0": 5.0})
    assert groups.learned(declared) == {
        "layer10.0.conv1.weight": ParameterRate(5.0, 0.0),
        "fc.weight": ParameterRate(1.0, 0.0),
    }
    averaged = [name.partition(".")[0] for name in groups.averages(declared)]
    assert averaged == ["layer10", "layer10", "fc", "fc"]
    with pytest.raises(InputError) as caught:
        ParameterGroups(["layer1.0.conv2"]).learned(declared)
    assert str(caught.value) == (
        "freeze: the network has no layer 'layer1.0.conv2'; did you mean layer1.0.conv1? "
        "It has layer1, layer10, fc"
    )
