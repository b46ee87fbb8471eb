"""Each update rule against loops over single numbers, in float64, on one worker and on two."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem.parallel as synk
from tandem.parallel.extensions import updates
from tandem.parallel.extensions.train import make_train_function, make_train_function_theano

RATE = 0.1
QUICK = ("sgd_nonflat", "momentum")  # compiling functions of all takes long
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
    "adagrad": {"learning_rate": 1.0, "epsilon": 1e-6},
    "rmsprop": {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6},
    "adadelta": {"learning_rate": 1.0, "rho": 0.95, "epsilon": 1e-6},
    "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adamax": {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
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


@pytest.fixture
def on_one(one: synk.Pool, monkeypatch: pytest.MonkeyPatch) -> synk.Pool:
    monkeypatch.setattr(synk, "_default", one)
    return one


@pytest.fixture
def on_two(two: synk.Pool, monkeypatch: pytest.MonkeyPatch) -> synk.Pool:
    monkeypatch.setattr(synk, "_default", two)
    return two


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_that_of_its_paper(rule: str, on_one: synk.Pool) -> None:
    for make in (pytensor.shared, synk.shared):
        params = trained(make, rule, RULES[rule])
        for param, wanted in zip(params, expected(rule, RULES[rule]), strict=True):
            np.testing.assert_allclose(param.get_value(), wanted, rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_arguments_and_defaults_are_those_of_the_original(rule: str) -> None:
    parameters = inspect.signature(getattr(updates, rule)).parameters.values()
    names = [parameter.name for parameter in parameters]
    numbers = [name.replace("lr", "learning_rate") for name in RULES[rule]]
    assert names == ["loss", "params", *numbers, "lr"]
    defaults = {p.name: p.default for p in parameters if p.default not in (p.empty, None)}
    assert defaults == DEFAULTS[rule]


@pytest.mark.parametrize(
    "rule",
    [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in RULES],
)
def test_two_workers_make_the_steps_of_one_in_two_slices(
    rule: str, on_two: synk.Pool, one: synk.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = synk.shared if rule in ("adam", "sgd_nonflat") else pytensor.shared
    params = trained(make, rule, RULES[rule])
    ranks = [on_two.get_value(rank, params) for rank in (0, 1)]
    monkeypatch.setattr(synk, "_default", one)
    alone = trained(make, rule, RULES[rule], num_slices=2)
    for first, second, param in zip(*ranks, alone, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, param.get_value())


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("rule", ["momentum", "nesterov_momentum"])
def test_rules_of_ones_own_have_velocities(rule: str, alone: bool, on_two: synk.Pool) -> None:
    """Over two workers, and by this process alone."""

    def own(loss: Any, params: list[Any], lr: float, momentum: float) -> Any:
        stored, flat, parts = updates.flat_unflat_grads(loss, params)
        steps = [(p, p - lr * g) for p, g in zip(params, parts, strict=True)]
        apply = getattr(updates, f"apply_{rule}")
        return [(stored, flat)], apply(steps, momentum), stored

    loss, params, x, y = model(pytensor.shared if alone else synk.shared)
    make = make_train_function_theano if alone else make_train_function
    train = make(loss, params, x, y, own, **RULES[rule])
    for batch in minibatches():
        train(*batch)
    for p, value in zip(params, expected(rule, RULES[rule]), strict=True):
        np.testing.assert_allclose(p.get_value(), value, rtol=1e-12)


def test_gradients_lie_in_one_flat_vector(on_one: synk.Pool) -> None:
    loss, params, x, y = model(pytensor.shared)
    grad_updates, param_updates, flat = updates.sgd(loss, params, RATE)
    assert len(grad_updates) == len(param_updates) == 3
    assert flat.get_value().shape == (3 * 256 // 8,)  # each begins on a boundary of 256 bytes
    synk.function([x, y], updates=grad_updates)(*minibatches()[0])
    rows, factors = minibatches()[0]
    gradient = (factors[:, None] * rows).mean(axis=0)
    found = flat.get_value()
    np.testing.assert_allclose(found[:6], gradient[:6], rtol=1e-12)
    np.testing.assert_allclose(found[[32, 64, 65]], gradient[6:], rtol=1e-12)
    view = grad_updates[0][0]
    assert view.get_value(borrow=True).base is not None
    flat.set_value(np.zeros(96))
    assert not view.get_value().any()


def test_float32_stays_float32_and_rates_may_be_variables(on_one: synk.Pool) -> None:
    for rule in ("sgd_nonflat", "adam"):
        loss, params, x, y = model(pytensor.shared, "float32")
        rate = pytensor.shared(0.0, name="rate")
        train = make_train_function(loss, params, x, y, getattr(updates, rule), rate)
        rows, factors = minibatches()[0]
        batch = rows.astype("float32"), factors.astype("float32")
        train(*batch)
        for param, value in zip(params, first_values("float32"), strict=True):
            assert param.get_value().dtype == np.float32
            np.testing.assert_array_equal(param.get_value(), value)
        rate.set_value(0.5)
        train(*batch)
        assert not np.array_equal(params[0].get_value(), first_values()[0])


@pytest.mark.parametrize("rule", [rule for rule in RULES if len(RULES[rule]) > 1])
def test_every_number_may_be_a_shared_variable(rule: str, on_one: synk.Pool) -> None:
    """As rates that are annealed are; then a rule is no fused Op."""
    numbers = RULES[rule]
    wanted = expected(rule, numbers)
    shared = {name: pytensor.shared(number, name=name) for name, number in numbers.items()}
    for param, value in zip(trained(pytensor.shared, rule, shared), wanted, strict=True):
        np.testing.assert_allclose(param.get_value(), value, rtol=1e-12)


def test_the_loss_is_that_of_all_rows_before_the_step(on_two: synk.Pool) -> None:
    loss, params, x, y = model(synk.shared)
    train = make_train_function(loss, params, x, y, updates.sgd, lr=0.0)
    rows, factors = minibatches()[0]
    flat = np.concatenate([value.ravel() for value in first_values()])
    wanted = (factors * rows.dot(flat))[[4, 0, 2]].mean()
    np.testing.assert_allclose(train(rows, factors, batch=[4, 0, 2], num_slices=2), wanted)


def test_what_cannot_be_trained_is_refused(on_one: synk.Pool) -> None:
    loss, params, x, _ = model(pytensor.shared)
    with pytest.raises(ValueError, match="no parameters"):
        updates.adam(loss, [])
    with pytest.raises(TypeError, match="learning_rate is missing"):
        updates.sgd(loss, params)
    with pytest.raises(TypeError, match="parameter 1 is x"):
        updates.sgd(loss, [params[0], x], RATE)
    count = pytensor.shared(np.int64(3), name="count")
    with pytest.raises(TypeError, match="parameter 0 is count"):
        updates.sgd(loss, [count], RATE)
