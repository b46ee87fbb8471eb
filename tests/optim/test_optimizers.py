"""Each optimizer against the one of the same name in torch.optim, over 40 steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import device_mode, device_shared
from tandem.config.schema import make_config
from tandem.errors import InputError
from tandem.optim import OPTIMIZERS, Optimizer, optimizer_of

STEPS, SHAPE = 40, (3, 4)
BETAS = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
TORCH_BETAS = {"betas": (0.8, 0.95), "eps": 1e-6}
Case = tuple[str, dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]
CASES: list[Case] = [
    ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    ("rmsprop", {}, torch.optim.RMSprop, {}),
    (
        "rmsprop",
        {"rmsprop_decay": 0.8, "rmsprop_epsilon": 1e-3},
        torch.optim.RMSprop,
        {"alpha": 0.8, "eps": 1e-3},
    ),
    (
        "rmsprop",
        {"rmsprop_momentum": 0.8, "rmsprop_centered": True},
        torch.optim.RMSprop,
        {"momentum": 0.8, "centered": True},
    ),
    ("adam", {}, torch.optim.Adam, {}),
    ("adam", {**BETAS, "adam_amsgrad": True}, torch.optim.Adam, {**TORCH_BETAS, "amsgrad": True}),
    ("adamw", {"adam_amsgrad": True}, torch.optim.AdamW, {"amsgrad": True}),
    ("adam", BETAS, torch.optim.Adam, TORCH_BETAS),
    ("adamw", {}, torch.optim.AdamW, {}),
    ("adamw", BETAS, torch.optim.AdamW, TORCH_BETAS),
    ("nadam", {}, torch.optim.NAdam, {}),
    (
        "nadam",
        {**BETAS, "nadam_decay": 0.1},
        torch.optim.NAdam,
        {**TORCH_BETAS, "momentum_decay": 0.1},
    ),
    # Their epsilons are elsewhere; those of ours are tested in `tandem.parallel`'s rules.
    ("adagrad", {"adagrad_epsilon": 1e-30}, torch.optim.Adagrad, {"eps": 1e-15}),
    ("adamax", {"adam_epsilon": 1e-15}, torch.optim.Adamax, {"eps": 1e-15}),
    (
        "adadelta",
        {"adadelta_decay": 0.8, "adadelta_epsilon": 1e-3},
        torch.optim.Adadelta,
        {"rho": 0.8, "eps": 1e-3},
    ),
]


def made(name: str, **settings: Any) -> Optimizer:
    return OPTIMIZERS.chosen(dict(make_config({"optimizer": name, **settings})))


@contextmanager
def float64_scalars() -> Iterator[None]:
    """NAdam keeps a product of PyTorch's default type."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def rate_of(step: int, settings: Mapping[str, Any]) -> float:
    """A rate that changes; velocities of ours have it inside, torch's outside."""
    return 0.02 if "momentum" in settings else 0.02 / (1 + step % 7)


def by_torch(
    kind: type[torch.optim.Optimizer], gradients: np.ndarray, **settings: Any
) -> list[np.ndarray]:
    with float64_scalars():
        weight = torch.nn.Parameter(torch.ones(SHAPE))
        optimizer = kind([weight], lr=1.0, **settings)  # type: ignore[call-arg]
        found = []
        for step, gradient in enumerate(gradients):
            optimizer.param_groups[0]["lr"] = rate_of(step, settings)
            weight.grad = torch.tensor(gradient)
            optimizer.step()
            found.append(weight.detach().numpy().copy())
        return found


def compiled(
    optimizer: Optimizer, decay: float, dtype: str, mode: Any
) -> Callable[..., np.ndarray]:
    """A step over shared variables; it returns the weights after it."""
    kind = device_shared if mode is None else pytensor.shared
    weight, *states = (
        kind(value, name=name)
        for name, value in [("w", np.ones(SHAPE, dtype))]
        + [(state, np.zeros(SHAPE, dtype)) for state in optimizer.states]
    )
    gradient = pt.tensor("gradient", dtype=dtype, shape=SHAPE)
    numbers = {
        key: pt.tensor(key, dtype=dtype, shape=()) for key in ("rate", *optimizer.numbers(0))
    }
    new_weight, new_states = optimizer.step(
        weight, states, gradient, numbers["rate"], decay, numbers
    )
    function = pytensor.function(
        [gradient, *numbers.values()],
        [],
        updates=[(weight, new_weight), *zip(states, new_states, strict=True)],
        mode=mode or device_mode("cpu"),
    )

    def step(gradient: np.ndarray, rate: float, updates: int) -> np.ndarray:
        values = (rate, *optimizer.numbers(updates).values())
        function(gradient.astype(dtype), *(np.asarray(value, dtype) for value in values))
        return np.array(weight.get_value())

    return step


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "settings", "kind", "theirs"), CASES)
def test_forty_steps_equal_torch(
    name: str,
    settings: dict[str, Any],
    kind: type[torch.optim.Optimizer],
    theirs: dict[str, Any],
    decay: float,
) -> None:
    gradients = np.random.default_rng(3).normal(size=(STEPS, *SHAPE)) ** 3
    expected = by_torch(kind, gradients, **theirs, weight_decay=decay)
    for dtype, mode, tolerance in (
        ("float64", None, 1e-10),
        ("float64", "FAST_COMPILE", 1e-10),
        ("float32", None, 2e-5),
    ):
        step = compiled(made(name, **settings), decay, dtype, mode)
        for number, gradient in enumerate(gradients):
            found = step(gradient, rate_of(number, theirs), number)
            np.testing.assert_allclose(found, expected[number], rtol=tolerance, atol=tolerance)


def by_hand(gradients: np.ndarray, kept: float, overwrites: int) -> list[np.ndarray]:
    """Lion with decay beside its step, whose weights become their averages now and then."""
    weight, momentum = np.ones(SHAPE), np.zeros(SHAPE)
    average, found = weight, []
    for step, gradient in enumerate(gradients):
        gradient = gradient + 0.1 * weight
        weight = weight - 0.02 * np.sign(0.8 * momentum + 0.2 * gradient)
        momentum = 0.7 * momentum + 0.3 * gradient
        average = kept * average + (1 - kept) * weight if step else weight
        weight = average if overwrites and step % overwrites == overwrites - 1 else weight
        found.append(weight)
    return found


@pytest.mark.parametrize("overwrites", [0, 7])
def test_lion_and_averages_of_weights_are_their_definitions(overwrites: int) -> None:
    gradients = np.random.default_rng(3).normal(size=(STEPS, *SHAPE))
    settings = {"lion_beta1": 0.8, "lion_beta2": 0.7, "average_weights": 0.9}
    config = make_config({"optimizer": "lion", **settings, "average_overwrites": overwrites})
    optimizer = optimizer_of(dict(config))
    assert optimizer.states == ("momentum", "weight_average")
    for mode in (None, "FAST_COMPILE"):
        step = compiled(optimizer, 0.1, "float64", mode)
        expected = by_hand(gradients, 0.9, overwrites)
        for number, gradient in enumerate(gradients):
            found = step(gradient, 0.02, number)
            np.testing.assert_allclose(found, expected[number], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_a_step_maps_zeros_to_zeros(name: str) -> None:
    """So the padding of flat vectors stays zero."""
    optimizer = made(name)
    zeros = [pt.constant(np.zeros(3)) for _ in range(2 + len(optimizer.states))]
    numbers = {key: pt.constant(value) for key, value in optimizer.numbers(5).items()}
    weight, states = optimizer.step(zeros[0], zeros[2:], zeros[1], pt.constant(0.1), 0.5, numbers)
    for value in (weight, *states):
        np.testing.assert_array_equal(value.eval(mode="FAST_COMPILE"), np.zeros(3))


def test_numbers_are_those_of_the_update_whatever_was_asked_before() -> None:
    nadam = made("nadam")
    straight = [nadam.numbers(updates) for updates in range(60)]
    for updates in (59, 7, 7, 30, 0):
        assert nadam.numbers(updates) == straight[updates]
        assert made("nadam").numbers(updates) == straight[updates]
    for name in OPTIMIZERS:
        for updates in (0, 10**6):
            assert all(np.isfinite([*made(name).numbers(updates).values()]))


def test_the_linear_ones_are_named() -> None:
    assert [name for name in OPTIMIZERS if OPTIMIZERS[name].is_linear] == ["sgd"]
    assert not made("sgd").numbers(7)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("adam_beta1", 1, "a number of at least 0 and below 1"),
        ("adam_beta2", -0.1, "a number of at least 0 and below 1"),
        ("adam_epsilon", 0, "a number above 0"),
        ("rmsprop_decay", 1, "a number of at least 0 and below 1"),
        ("nadam_decay", -1, "a number of at least 0"),
        (
            "optimizer",
            "ftrl",
            "it must be sgd, adadelta, adagrad, adam, adamw, adamax, lion,",
        ),
    ],
)
def test_settings_that_cannot_be_used(key: str, value: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        make_config({key: value})


def test_new_settings_are_left_out_of_saved_ones_at_their_defaults() -> None:
    """So configurations of old checkpoints stay equal."""
    saved = make_config({}).model_dump()
    assert not [key for key in saved if key.startswith(("ada", "nadam", "rmsprop"))]
    assert make_config({"adam_beta1": 0.5}).model_dump()["adam_beta1"] == 0.5
