"""The rate and decay of each parameter that a run updates."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tandem.errors import InputError
from tandem.layers.parameter import Parameter, layer_of
from tandem.validation import suggestion


@dataclass(frozen=True)
class ParameterRate:
    """How one parameter learns."""

    factor: float  # its rate, as a multiple of the run's
    decay: float  # per step and unit of its rate


def learned_rates(
    declared: Mapping[str, Parameter],
    freeze: Collection[str] = (),
    lr_multipliers: Mapping[str, float] | None = None,
    weight_decay: float = 0.0,
) -> dict[str, ParameterRate]:
    """The rate of every parameter that is learned, in the network's order.

    The layers of `freeze` are left out, and `lr_multipliers` are factors on the rates of layers.
    Raises InputError if the network has no such layer, or if none is left to learn.
    """
    multipliers = lr_multipliers or {}
    check_layers("freeze", freeze, declared)
    check_layers("lr_multipliers", multipliers, declared)
    rates = {
        name: ParameterRate(
            parameter.rate * multipliers.get(layer_of(name), 1.0),
            weight_decay if parameter.decay else 0.0,
        )
        for name, parameter in declared.items()
        if parameter.trainable and layer_of(name) not in freeze
    }
    if not rates:
        raise InputError("freeze names every layer of the network: none is left to learn")
    return rates


def running_averages(
    declared: Mapping[str, Parameter], freeze: Collection[str] = ()
) -> dict[str, float]:
    """The arrays that a run updates without training them, and what a step keeps of each."""
    return {
        name: parameter.keep
        for name, parameter in declared.items()
        if not parameter.trainable and layer_of(name) not in freeze
    }


def check_layers(setting: str, given: Iterable[str], parameters: Iterable[str]) -> None:
    """Refuse the name of a layer that the network does not have.

    `setting` is the key of the configuration that names the layers `given`. The InputError names
    the layer, the nearest of the network's, and all of them.
    """
    layers = list(dict.fromkeys(layer_of(name) for name in parameters))
    for layer in given:
        if layer not in layers:
            hint = suggestion(layer.partition(".")[0], layers) or "."
            raise InputError(
                f"{setting}: the network has no layer {layer!r}{hint} It has {', '.join(layers)}"
            )
