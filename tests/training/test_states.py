"""A new optimizer and a network with untrained arrays need no other file than their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import layers
from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from tandem.config.schema import Config
from tandem.layers import DropoutKeys, Network, Parameter
from tandem.layers.network import NetworkDescription
from tandem.memory import HostBuffer, Slot, SlotLayout
from tandem.memory.flat import FlatLayout, Vectors
from tandem.optim import OPTIMIZERS, Optimizer
from tandem.optim.parameter_groups import learned_rates, running_averages
from tandem.training.compiled_network import CompiledNetwork

BATCH, CROP, CLASSES = 4, 6, 3
KEEP, DECAY = 0.75, 0.01


@dataclass(frozen=True)
class TwoStates(Optimizer):
    """Momentum and a running mean of the weights: a step that is easy to repeat in NumPy."""

    states = ("momentum", "mean_weight")
    momentum: float = 0.5
    weight_decay: float = DECAY

    def step(
        self, weight: Any, states: Sequence[Any], gradient: Any, rate: Any, decay: float
    ) -> tuple[Any, tuple[Any, ...]]:
        velocity, mean = states
        velocity = self.momentum * velocity - rate * (gradient + decay * weight)
        weight = weight + velocity
        return weight, (velocity, 0.5 * mean + 0.5 * weight)


class Centred(Network):
    """A linear network of pictures minus their running mean by colour."""

    def __init__(self, crop_size: int, classes: int, width: float, dtype: str) -> None:
        super().__init__(crop_size, classes, dtype)
        self.parameters.add(
            Parameter("norm.mean", (3,), trainable=False, keep=KEEP),
            layers.weight("fc", (3 * crop_size**2, classes), std=0.001),
            layers.bias("fc", classes),
        )

    def logits(self, images: Any, dropout: DropoutKeys | None) -> Any:
        if dropout is not None:
            dropout.statistics["norm.mean"] = images.mean(axis=(0, 2, 3))
        x = images - self.parameters["norm.mean"].dimshuffle("x", 0, "x", "x")
        x = layers.flatten(x, 3 * self.crop_size**2)
        return layers.fully_connected(x, *self.parameters.of("fc"))


class Run:
    """The memory of one trainer and its compiled functions."""

    def __init__(self, updated: slice | None = None, freeze: tuple[str, ...] = ()) -> None:
        changes: dict[str, Any] = {"freeze": freeze, "init_weights": "w"} if freeze else {}
        config = Config(crop_size=CROP, batch_size=BATCH, precision="float64", threads=1, **changes)
        self.network, optimizer = Centred(CROP, CLASSES, 1.0, "float64"), TwoStates()
        declared = self.network.parameters.declared
        learned, averages = learned_rates(declared, freeze), running_averages(declared, freeze)
        self.layout = FlatLayout.of(
            {name: declared[name].shape for name in learned},
            "float64",
            states=optimizer.states,
            untrained={name: declared[name].shape for name in averages},
        )
        buffers = [
            HostBuffer.create(n) for n in (self.layout.parameters_nbytes, self.layout.nbytes)
        ]
        self.parameters, self.gradients = (b.array(b.nbytes // 8, "float64") for b in buffers)
        self.model = CompiledNetwork(
            self.network,
            config,
            optimizer,
            np.full((3, CROP, CROP), 100, np.float32),
            Vectors.on(self.layout, *buffers),
            device_crops=False,
            updated=None if updated is None else Vectors.within(self.layout, *buffers, updated),
        )
        self.model.load(dict(self.network.initial_values(1)))

    def checkpoint(self) -> Checkpoint:
        description = NetworkDescription(CROP, CLASSES, 1.0)
        return Checkpoint(*self.model.state(), description, untrained=("norm.mean",))


def slot_of(seed: int) -> Slot:
    rng, layout = np.random.default_rng(seed), SlotLayout(BATCH, CROP)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    slot.pictures[...] = rng.integers(0, 256, slot.pictures.shape)
    slot.labels[...] = rng.integers(0, CLASSES, BATCH)
    slot.valid[...] = BATCH
    return slot


def train(run: Run, steps: range) -> None:
    for number in steps:
        run.model.compute_gradients(slot_of(number), epoch=0)
        run.model.update(1e-5)


def test_memory_and_update_carry_both_states_and_the_untrained_array() -> None:
    run = Run()
    assert run.layout.states == TwoStates.states
    before = {name: value.copy() for name, value in run.model.state()[0].items()}
    slot = slot_of(0)
    run.model.compute_gradients(slot, epoch=0)
    gradients = run.layout.views(run.gradients.copy())
    images = slot.pictures.astype(float).transpose(0, 3, 1, 2) - 100
    np.testing.assert_allclose(gradients["norm.mean"], images.mean(axis=(0, 2, 3)), rtol=1e-12)
    run.model.update(1e-5)
    weights, states = run.model.state()
    expected = KEEP * before["norm.mean"] + (1 - KEEP) * gradients["norm.mean"]
    np.testing.assert_allclose(weights["norm.mean"], expected, rtol=1e-12)
    assert all(list(values) == ["fc.weight", "fc.bias"] for values in states.values())
    for name, rate, decay in (("fc.weight", 1e-5, DECAY), ("fc.bias", 2e-5, 0.0)):
        velocity = -rate * (gradients[name] + decay * before[name])
        np.testing.assert_allclose(states["momentum"][name], velocity, rtol=1e-12)
        np.testing.assert_allclose(weights[name], before[name] + velocity, rtol=1e-12)
        np.testing.assert_allclose(states["mean_weight"][name], weights[name] / 2, rtol=1e-12)


def test_parts_of_the_vectors_are_updated_as_the_whole_is() -> None:
    """As where trainers share one copy, and each updates a shard of it."""
    whole = Run()
    size = whole.layout.size
    train(whole, range(1))
    for part in (slice(0, size // 2), slice(size // 2, size)):
        half = Run(part)
        before = half.parameters[:size].copy()
        train(half, range(1))
        expected = np.where(np.isin(np.arange(size), np.r_[part]), whole.parameters[:size], before)
        np.testing.assert_array_equal(half.parameters[:size], expected)


def test_a_checkpoint_carries_them_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    straight, first, second = Run(), Run(), Run()
    train(straight, range(6))
    train(first, range(3))
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, first.checkpoint())
    shapes = {name: p.shape for name, p in first.network.parameters.declared.items()}
    found = read_checkpoint(path, shapes)
    assert found.untrained == ("norm.mean",)
    assert sorted(found.trained) == ["fc.bias", "fc.weight"]
    second.model.load(found.weights, found.states)
    train(second, range(3, 6))
    assert second.parameters.tobytes() == straight.parameters.tobytes()


def test_a_frozen_layer_keeps_its_running_average() -> None:
    run = Run(freeze=("norm",))
    train(run, range(2))
    assert not run.model.state()[0]["norm.mean"].any()
    assert run.layout.untrained == ()


def test_an_optimizer_is_registered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_choices", dict(OPTIMIZERS._choices))
    OPTIMIZERS.register("two-states")(TwoStates)
    made = OPTIMIZERS.make("two-states", dict(Config(momentum=0.25)))
    assert made == TwoStates(0.25, 0.0005)
