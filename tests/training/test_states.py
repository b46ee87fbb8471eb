"""A new optimizer and a network with untrained arrays need no other file than their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytest

from tandem import layers
from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint
from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.command_line import load_config
from tandem.config.schema import Config
from tandem.distributed import local_groups
from tandem.errors import InputError
from tandem.launch.prepare import prepare_run
from tandem.layers import Network, Parameter, Training
from tandem.memory.flat import FlatLayout, Vectors
from tandem.memory.host import ArrayBuffer
from tandem.optim import OPTIMIZERS, Optimizer
from tandem.processes.heartbeat import HeartbeatTable, StatusSlot
from tandem.registry import setting
from tandem.training.compiled_network import CompiledNetwork
from tandem.training.memory import make_slots
from tandem.training.run_spec import RunSpec
from tandem.training.trainer import Trainer
from tandem.training.worker import WorkerArguments
from tests.support.tiny import read_record, settings
from tests.support.trainer_memory import host_memory, noise_slot

BATCH, CROP, CLASSES = 4, 6, 3
KEEP, DECAY = 0.75, 0.01


@dataclass(frozen=True)
class TwoStates(Optimizer):
    """Momentum and a running mean of the weights: a step that is easy to repeat in NumPy."""

    states = ("momentum", "mean_weight")
    momentum: float = setting(0.5, "fraction of the velocity kept", "a number")
    weight_decay: float = setting(DECAY, "decay of weights", "a number")

    def step(
        self,
        weight: Any,
        states: Sequence[Any],
        gradient: Any,
        rate: Any,
        decay: float,
        numbers: Mapping[str, Any],
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
            Parameter("norm.mean", (3,), kind="average", keep=KEEP),
            layers.weight("fc", (3 * crop_size**2, classes), std=0.001),
            layers.bias("fc", classes),
        )

    def logits(self, images: Any, training: Training | None) -> Any:
        if training is not None:
            training.statistics["norm.mean"] = images.mean(axis=(0, 2, 3))
        x = images - self.parameters["norm.mean"].dimshuffle("x", 0, "x", "x")
        x = layers.flatten(x, 3 * self.crop_size**2)
        return layers.fully_connected(x, *self.parameters.of("fc"))


class Run:
    """The memory of one trainer and its compiled functions."""

    def __init__(self, updated: slice | None = None, freeze: tuple[str, ...] = ()) -> None:
        changes: dict[str, Any] = {"freeze": freeze, "init_weights": "w"} if freeze else {}
        config = Config(crop_size=CROP, batch_size=BATCH, precision="float64", threads=1, **changes)
        self.network, optimizer = Centred(CROP, CLASSES, 1.0, "float64"), TwoStates()
        memory = host_memory(self.network, optimizer, BATCH, freeze)
        self.layout, flat = memory.layout, memory.flat
        (self.parameters,), (self.gradients,) = flat["parameters"], flat["gradients"]
        if updated is not None:
            buffers = (
                ArrayBuffer(vector.view(np.uint8)) for vector in (self.parameters, self.gradients)
            )
            memory.updated = Vectors.within(self.layout, *buffers, updated)
        mean = np.full((3, CROP, CROP), 100, np.float32)
        self.model = CompiledNetwork(self.network, config, optimizer, mean, memory)
        self.model.load(dict(self.network.initial_values(1)))


class Incomplete(Centred):
    """Lacks the initial value of a parameter."""

    def initial_values(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        return (pair for pair in super().initial_values(seed) if pair[0] != "fc.weight")


class Misnamed(Centred):
    """Has an initial value of a parameter that it does not declare."""

    def initial_values(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        yield from super().initial_values(seed)
        yield "fc.wieght", np.zeros(3, np.float32)


class Unmeasured(Centred):
    """Reports no statistic of its running mean."""

    def logits(self, images: Any, training: Training | None) -> Any:
        logits = super().logits(images, training)
        if training is not None:
            del training.statistics["norm.mean"]
        return logits


class Overmeasured(Centred):
    """Reports a statistic of a parameter that is trained."""

    def logits(self, images: Any, training: Training | None) -> Any:
        logits = super().logits(images, training)
        if training is not None:
            training.statistics["fc.bias"] = logits.mean(axis=0)
        return logits


class Mismeasured(Centred):
    """Reports a statistic that is a number for each colour of each picture."""

    def logits(self, images: Any, training: Training | None) -> Any:
        logits = super().logits(images, training)
        if training is not None:
            training.statistics["norm.mean"] = images.mean(axis=(2, 3))
        return logits


class Unused(Centred):
    """Has a parameter that its output does not depend on."""

    def __init__(self, crop_size: int, classes: int, width: float, dtype: str) -> None:
        super().__init__(crop_size, classes, width, dtype)
        self.parameters.add(layers.bias("gain", classes))


class Undeclared(Centred):
    """Has a shared variable that is no parameter, so that it would never be trained or saved."""

    def logits(self, images: Any, training: Training | None) -> Any:
        gain = pytensor.shared(np.ones(CLASSES, self.dtype), name="gain.weight")
        return super().logits(images, training) * gain


class Doubled(Centred):
    """Declares two parameters of one name."""

    def __init__(self, crop_size: int, classes: int, width: float, dtype: str) -> None:
        super().__init__(crop_size, classes, width, dtype)
        self.parameters.add(layers.bias("fc", classes))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Incomplete, "network: Incomplete has no initial value of fc.weight"),
        (Misnamed, "network: Misnamed has an initial value of fc.wieght, which it does not decl"),
        (Unmeasured, "network: Unmeasured reports no statistic of norm.mean, which is not traine"),
        (Overmeasured, "Overmeasured reports a statistic of fc.bias, which is no array"),
        (Mismeasured, r"Mismeasured \(norm.mean\): found a statistic of Matrix.*, expected Vector"),
        (Unused, "network: Unused has a loss that does not depend on gain.bias"),
        (Undeclared, "network: Undeclared uses gain.weight, a shared variable that is not among"),
        (Doubled, "network: fc.bias is declared twice"),
    ],
)
def test_a_network_whose_parts_disagree_is_refused(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    network: type[Network],
    message: str,
) -> None:
    monkeypatch.setattr("tandem.backend.set_threads", lambda threads: None)
    monkeypatch.setattr("tandem.backend.keep_freed_memory", lambda: None)
    with pytest.raises(InputError, match=message):
        run_here(data, tmp_path / "run", network=f"{__name__}:{network.__name__}")


def train(run: Run, steps: range) -> None:
    for number in steps:
        run.model.compute_gradients(noise_slot(run.network, BATCH, BATCH, number), epoch=0)
        run.model.update(1e-5)


def test_memory_and_update_carry_both_states_and_the_untrained_array() -> None:
    run = Run()
    assert run.layout.states == TwoStates.states
    before = {name: value.copy() for name, value in run.model.state()[0].items()}
    slot = noise_slot(run.network, BATCH, BATCH)
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


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the toy optimizer the one that runs choose, under the name of the default."""
    monkeypatch.setattr(OPTIMIZERS, "_choices", {})
    OPTIMIZERS.register("sgd")(TwoStates)


@pytest.mark.usefixtures("chosen")
def test_a_run_and_its_checkpoints_carry_them_and_resuming_gives_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.backend.set_threads", lambda threads: None)
    monkeypatch.setattr("tandem.backend.keep_freed_memory", lambda: None)
    found = {}
    for name, epochs in (("straight", [2]), ("resumed", [1, 2])):
        for n_epochs in epochs:
            layout = run_here(
                data, tmp_path / name, n_epochs=n_epochs, resume_train=n_epochs > epochs[0]
            )
        assert (layout.states, [n for n, _ in layout.untrained]) == (
            TwoStates.states,
            ["norm.mean"],
        )
        found[name] = read_checkpoint(tmp_path / name / "epoch-0002.safetensors")
    straight, resumed = found["straight"], found["resumed"]
    assert straight.untrained == resumed.untrained == ("norm.mean",)
    assert straight.weights["norm.mean"].any()
    groups = [(straight.weights, resumed.weights)]
    groups += [(straight.states[name], resumed.states[name]) for name in TwoStates.states]
    for ours, theirs in groups:
        assert any(value.any() for value in ours.values())
        assert {n: v.tobytes() for n, v in ours.items()} == {
            n: v.tobytes() for n, v in theirs.items()
        }


def adam(run: Path, data: Path, epochs: int, optimizer: str = "adam", **changes: Any) -> Checkpoint:
    resume = run.exists()
    run_here(data, run, n_epochs=epochs, resume_train=resume, optimizer=optimizer, **changes)
    return read_checkpoint(run / f"epoch-{epochs:04}.safetensors")


def test_numbers_of_an_optimizer_follow_the_updates_through_a_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.backend.set_threads", lambda threads: None)
    monkeypatch.setattr("tandem.backend.keep_freed_memory", lambda: None)
    straight = adam(tmp_path / "straight", data, 2)
    first = adam(tmp_path / "resumed", data, 1)
    resumed = adam(tmp_path / "resumed", data, 2)
    assert (first.state.updates, straight.state.updates) == (7, 14)
    assert list(straight.states) == ["first_moment", "second_moment"]
    for name, value in straight.states["second_moment"].items():
        assert value.any()
        for ours, theirs in (
            (straight.weights, resumed.weights),
            *((straight.states[state], resumed.states[state]) for state in straight.states),
        ):
            assert ours[name].tobytes() == theirs[name].tobytes()
    # Another optimizer begins with states of zero, although these have the same names.
    other = adam(tmp_path / "resumed", data, 3, "nadam", exact=False)
    assert (other.state.step, other.state.updates) == (21, 7)
    begun = abs(other.states["second_moment"]["fc.weight"]).mean()
    assert begun < 0.6 * abs(resumed.states["second_moment"]["fc.weight"]).mean()


def test_metrics_are_in_the_record_and_in_the_history(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.backend.set_threads", lambda threads: None)
    monkeypatch.setattr("tandem.backend.keep_freed_memory", lambda: None)
    run = tmp_path / "run"
    chosen: dict[str, Any] = {"metrics": ["accuracy", "f1"], "print_freq": 3}
    run_here(data, run, loss="binary_cross_entropy", **chosen)
    lines = read_record(run)
    assert [list(line["metrics"]) for line in lines] == [["accuracy", "f1"]] * 3
    for line in lines:
        assert line["metrics"]["accuracy"] == pytest.approx(1 - line["top1_error"])
        assert 0 < line["loss"] < 2
    state = read_checkpoint(run / "epoch-0001.safetensors").state
    assert state.pending.sums[0].images == 1
    assert len(state.pending.sums[0].values["class_right"]) == CLASSES
    (epoch,) = state.history
    assert epoch == {
        "validation_loss": lines[-1]["loss"],
        "top1_error": lines[-1]["top1_error"],
        "top5_error": lines[-1]["top5_error"],
        **lines[-1]["metrics"],
    }
    # What was not measured before is not known in the first line after a resume.
    run_here(
        data,
        run,
        loss="binary_cross_entropy",
        print_freq=3,
        metrics=["accuracy", "mse"],
        n_epochs=2,
        resume_train=True,
    )
    first, second = [line["metrics"] for line in read_record(run)[3:5]]
    assert first["mse"] is None
    assert second["mse"] > 0 < first["accuracy"]


@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_within_the_patience_ends_where_it_would_have(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    monkeypatch.setattr("tandem.backend.set_threads", lambda threads: None)
    monkeypatch.setattr("tandem.backend.keep_freed_memory", lambda: None)
    ending: dict[str, Any] = {
        "stop_patience": 2,
        "stop_monitor": "top5_error",  # always 0, of three classes
        "snapshot_freq": 50,
        "lr_policy": "plateau",
        "lr_patience": 0,
        "lr_monitor": "top5_error",
    }
    ended = {}
    for name, interrupted in (("straight", None), ("resumed", epochs)):
        run = tmp_path / name
        if interrupted:
            run_here(data, run, n_epochs=interrupted, **ending)
        run_here(data, run, n_epochs=9, resume_train=interrupted is not None, **ending)
        assert list_checkpoints(run)[-1].name == "epoch-0003.safetensors"
        ended[name] = read_checkpoint(list_checkpoints(run)[-1])
        rates = [line["learning_rate"] for line in read_record(run) if line["event"] == "train"]
        assert rates[::7] == pytest.approx([1e-7, 1e-7, 1e-8])
    straight, resumed = ended["straight"], ended["resumed"]
    assert straight.state.history == resumed.state.history
    for name, value in straight.weights.items():
        assert value.tobytes() == resumed.weights[name].tobytes()
    # Nothing is left to do.
    spec = spec_of(data, tmp_path / "resumed", n_epochs=9, resume_train=True, **ending)
    assert spec.is_complete
    reason = "top5_error has not improved on 0 for 2 epochs: training ends"
    assert spec.reason_complete == reason


def spec_of(data: Path, run: Path, network: str = f"{__name__}:Centred", **changes: Any) -> RunSpec:
    """A run of one trainer, as prepared."""
    values = {"crop_size": CROP, "width": 1, "learning_rate": 1e-7, **changes}
    arguments = settings(data, run, network=network, **values)
    return prepare_run(
        load_config(
            [*arguments, "--para_load", "false", "--tensorboard", "false", "--precision", "float64"]
        )
    )


def run_here(
    data: Path, run: Path, network: str = f"{__name__}:Centred", **changes: Any
) -> FlatLayout:
    """Train in this process, as its only trainer; return the layout of its memory."""
    run.mkdir(exist_ok=True)
    spec = spec_of(data, run, network, **changes)
    (group,) = local_groups(1)
    status = StatusSlot(HeartbeatTable.create(("launcher", "trainer 0"), timeout=60), index=1)
    launcher, end = Pipe()
    trainer = Trainer(spec, WorkerArguments(0, group, None, make_slots(spec, 0), status), end)
    trainer.train()
    trainer.finish()
    trainer.close()
    launcher.close()
    return trainer.memory.layout


def test_a_frozen_layer_keeps_its_running_average() -> None:
    run = Run(freeze=("norm",))
    train(run, range(2))
    assert not run.model.state()[0]["norm.mean"].any()
    assert run.layout.untrained == ()


@pytest.mark.usefixtures("chosen")
def test_an_optimizer_is_registered_by_name() -> None:
    OPTIMIZERS.register("two-states")(TwoStates)
    made = OPTIMIZERS.make("two-states", dict(Config(momentum=0.25)))
    assert made == TwoStates(momentum=0.25, weight_decay=0.0005)
