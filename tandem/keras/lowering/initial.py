"""The distributions of initial values, from Keras's initializers."""

import math
from collections.abc import Sequence
from typing import Any

from tandem.layers.parameter import Distribution, Kind

_TRUNCATED = 0.87962566103423978  # standard deviation of a normal one cut off at two

_SCALES: dict[str, tuple[float, str, str]] = {
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
}


def distribution(
    layer: Any, key: str, kind: Kind, shape: Sequence[int], fans: tuple[int, int] | None
) -> tuple[float, float, Distribution]:
    """Mean, standard deviation and distribution of a parameter's initial values.

    Of initializers that draw no independent numbers, such as orthogonal ones, it is Glorot's: a
    run that starts from a Keras model has the values of that model anyway.
    """
    given = layer.value(key)
    name = given.get("class_name") if isinstance(given, dict) else given
    config = given.get("config") if isinstance(given, dict) else {}
    config = config if isinstance(config, dict) else {}

    def number(name: str, default: float) -> float:
        found = config.get(name, default)
        if type(found) not in (int, float) or not abs(found) < 1e30:
            raise layer.fault(f"{name} {found} of {key}", "a finite number")
        return float(found)

    if name in ("Zeros", "Ones", "Constant"):
        return number("value", float(name == "Ones")), 0.0, "normal"
    if name in ("RandomNormal", "TruncatedNormal"):
        std = abs(number("stddev", 0.05))
        return number("mean", 0.0), std, "truncated" if name[0] == "T" else "normal"
    if name == "RandomUniform":
        low, high = number("minval", -0.05), number("maxval", 0.05)
        return (low + high) / 2, abs(high - low) / math.sqrt(12), "uniform"
    if name is None and kind != "weight":
        return float(kind == "scale"), 0.0, "normal"
    scale, mode, drawn = _SCALES.get(str(name), _SCALES["GlorotUniform"])
    if name == "VarianceScaling":
        scale = abs(number("scale", 1.0))
        mode, drawn = str(config.get("mode", "fan_in")), str(config.get("distribution"))
    fan_in, fan_out = fans or (math.prod(shape[:-1]), math.prod(shape[-1:]))
    fan = {"fan_in": fan_in, "fan_out": fan_out}.get(mode, (fan_in + fan_out) / 2)
    std = math.sqrt(scale / max(1, fan))
    if drawn == "uniform":
        return 0.0, std, "uniform"
    if drawn == "truncated_normal":
        return 0.0, std / _TRUNCATED, "truncated"
    return 0.0, std, "normal"
