"""Each update rule against loops over single numbers, in float64, on one worker and on two."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt

from tandem.parallel.extensions import updates
from tandem.parallel.extensions.train import make_train_function

STEPS = 4
RATE = 0.1
# Numbers other than the defaults, so that each of them counts:
RULES: dict[str, dict[str, float]] = {
    "sgd": {"lr": RATE},
    "sgd_nonflat": {"lr": RATE},
    "momentum": {"lr": RATE, "momentum": 0.7},
    "nesterov_momentum": {"lr": RATE, "momentum": 0.7},
    "adagrad": {"lr": RATE, "epsilon": 1e-3},
    "rmsprop": {"lr": RATE, "rho": 0.8, "epsilon": 1e-3},
    "adadelta": {"lr": RATE, "rho": 0.8, "epsilon": 1e-3},
    "adam": {"lr": RATE, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
    "adamax": {"lr": RATE, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
}
DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {},
    "sgd_nonflat": {},
    "momentum": {"momentum": 0.9},
    "nesterov_momentum": {"momentum": 0.9},
    "adagrad": {"lr": 1.0, "epsilon": 1e-6},
    "rmsprop": {"lr": 1.0, "rho": 0.9, "epsilon": 1e-6},
    "adadelta": {"lr": 1.0, "rho": 0.95, "epsilon": 1e-6},
    "adam": {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adamax": {"lr": 0.002, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
}


def stepped(rule: str, p: float, gradients: list[float], n: dict[str, float]) -> list[float]:
    """One number after each step, by the formulas of the papers; states start at 0."""
    v = s = d = 0.0
    values = []
    for t, g in enumerate(gradients, start=1):
        if rule.startswith("sgd"):
            p -= n["lr"] * g
        elif rule == "momentum":
            v = n["momentum"] * v - n["lr"] * g
            p += v
        elif rule == "nesterov_momentum":
            v = n["momentum"] * v - n["lr"] * g
            p += n["momentum"] * v - n["lr"] * g
        elif rule == "adagrad":
            s += g * g
            p -= n["lr"] * g / math.sqrt(s + n["epsilon"])
        elif rule == "rmsprop":
            s = n["rho"] * s + (1 - n["rho"]) * g * g
            p -= n["lr"] * g / math.sqrt(s + n["epsilon"])
        elif rule == "adadelta":
            s = n["rho"] * s + (1 - n["rho"]) * g * g
            u = g * math.sqrt(d + n["epsilon"]) / math.sqrt(s + n["epsilon"])
            d = n["rho"] * d + (1 - n["rho"]) * u * u
            p -= n["lr"] * u
        else:
            v = n["beta1"] * v + (1 - n["beta1"]) * g
            if rule == "adam":
                s = n["beta2"] * s + (1 - n["beta2"]) * g * g
                rate = n["lr"] * math.sqrt(1 - n["beta2"] ** t) / (1 - n["beta1"] ** t)
                p -= rate * v / (math.sqrt(s) + n["epsilon"])
            else:
                s = max(n["beta2"] * s, abs(g))
                p -= n["lr"] / (1 - n["beta1"] ** t) * v / (s + n["epsilon"])
        values.append(p)
    return values


def model(make: Callable[..., Any], dtype: str = "float64") -> tuple[Any, list[Any], Any, Any]:
    """A loss whose gradients are averages of rows, whatever the parameters are."""
    x, y = pt.matrix("x", dtype=dtype), pt.vector("y", dtype=dtype)
    params = [make(value, name=f"p{i}") for i, value in enumerate(first_values(dtype))]
    flat = pt.concatenate([param.flatten() for param in params])
    return pt.mean(y * x.dot(flat)), params, x, y


def first_values(dtype: str = "float64") -> list[np.ndarray]:
    return [np.arange(6, dtype=dtype).reshape(2, 3), np.asarray(-1.0, dtype), np.ones(2, dtype)]


def minibatches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Minibatches of lengths that two workers cannot divide evenly, and of one row."""
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(n, 9)), rng.normal(size=n)) for n in (7, 1, 12, 5)]


def expected(rule: str, numbers: dict[str, float]) -> list[np.ndarray]:
    gradients = np.array([(y[:, None] * x).mean(axis=0) for x, y in minibatches()])
    first = np.concatenate([value.ravel() for value in first_values()])
    last = [
        stepped(rule, p, [float(g) for g in gradients[:, i]], numbers)[-1]
        for i, p in enumerate(first)
    ]
    return [np.reshape(last[:6], (2, 3)), np.asarray(last[6]), np.array(last[7:])]


def trained(make: Callable[..., Any], rule: str, numbers: dict[str, Any], **call: Any) -> list[Any]:
    loss, params, x, y = model(make)
    train = make_train_function(loss, params, x, y, getattr(updates, rule), **numbers)
    for batch in minibatches():
        train(*batch, **call)
    return params
