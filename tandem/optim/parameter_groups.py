"""What a run learns, and at which rates: one entry for each parameter, wherever it is updated."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem.config.schema import Config
from tandem.errors import InputError


@dataclass(frozen=True)
class ParameterRate:
    """How one parameter learns.

    Attributes
    ----------
    factor : float
        Its rate, as a multiple of the run's.
    decay : float
        Its decay per step and unit of its rate.
    """

    factor: float
    decay: float


def learned_rates(kinds: Mapping[str, str], config: Config) -> dict[str, ParameterRate]:
    """The rate of every parameter that is learned; a parameter of a frozen layer is left out.

    Weights learn at the run's rate and decay; biases learn at twice the rate and do not decay
    (Krizhevsky et al. 2012, section 5, and the original's program). ``lr_multipliers`` multiplies
    both in a layer.

    Parameters
    ----------
    kinds : mapping of str to "weight" or "bias"
        What each parameter is, by name, in the network's order.
    config : Config
        Its ``freeze``, ``lr_multipliers`` and ``weight_decay``.

    Returns
    -------
    dict of str to ParameterRate
        By name, in the network's order.

    Raises
    ------
    InputError
        A layer is unknown to the network, or none is left to learn.
    """
    check_layers("freeze", config.freeze, kinds)
    check_layers("lr_multipliers", config.lr_multipliers, kinds)
    rates = {}
    for name, kind in kinds.items():
        layer = layer_of(name)
        if layer in config.freeze:
            continue
        multiplier = config.lr_multipliers.get(layer, 1.0)
        rates[name] = (
            ParameterRate(2 * multiplier, 0.0)
            if kind == "bias"
            else ParameterRate(multiplier, config.weight_decay)
        )
    if not rates:
        raise InputError("freeze names every layer of the network: none is left to learn")
    return rates


def check_layers(setting: str, given: Iterable[str], parameters: Iterable[str]) -> None:
    """Refuse the name of a layer that the network does not have.

    Parameters
    ----------
    setting : str
        The key of the configuration, for the message.
    given : iterable of str
        The layers that it names.
    parameters : iterable of str
        The names of the network's parameters.

    Raises
    ------
    InputError
        Names the layer, the nearest of the network's, and all of them.
    """
    layers = list(dict.fromkeys(layer_of(name) for name in parameters))
    for layer in given:
        if layer not in layers:
            nearest = difflib.get_close_matches(layer.lower().partition(".")[0], layers, 1)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            raise InputError(
                f"{setting}: the network has no layer {layer!r}; {hint}It has {', '.join(layers)}"
            )


def layer_of(parameter: str) -> str:
    """The layer that a parameter is of: ``conv1`` for ``conv1.weight``."""
    return parameter.rpartition(".")[0]
