"""The distributions of initial values, from Keras's initializers."""

import math
import re
from collections.abc import Sequence
from typing import Any

from tandem.layers.parameter import Distribution, Kind

_TRUNCATED = 0.87962566103423978  # standard deviation of a normal one cut off at two

_SCALED = re.compile("(Glorot|He|Lecun)(Uniform|Normal)")


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
    match = _SCALED.fullmatch(str(name))
    author, drawn = match.groups() if match else ("Glorot", "Uniform")
    scale, mode = 2.0 if author == "He" else 1.0, "fan_avg" if author == "Glorot" else "fan_in"
    if name == "VarianceScaling":
        scale = abs(number("scale", 1.0))
        mode, drawn = str(config.get("mode", "fan_in")), str(config.get("distribution"))
    fan_in, fan_out = fans or (math.prod(shape[:-1]), math.prod(shape[-1:]))
    fan = {"fan_in": fan_in, "fan_out": fan_out}.get(mode, (fan_in + fan_out) / 2)
    std = math.sqrt(scale / max(1, fan))
    if drawn in ("uniform", "Uniform"):
        return 0.0, std, "uniform"
    is_plain = drawn == "untruncated_normal"
    return 0.0, std if is_plain else std / _TRUNCATED, "normal" if is_plain else "truncated"
