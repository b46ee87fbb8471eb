"""Batch normalisation in a run: groups of rows, short minibatches, auxiliary heads, resuming."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode

from tandem.artifacts.checkpoint import Checkpoint, initial_weights, save_checkpoint
from tandem.config.schema import Config
from tandem.distributed.kernels import average_into_all
from tandem.layers import Network, Training
from tandem.layers.network import NetworkDescription
from tandem.memory import Slot
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork
from tests.support.norm_network import CROP, NETWORK, NormNetwork, Plain
from tests.support.trainer_memory import host_memory, noise_slot

ROWS, CLASSES = 2, 3
MEAN = np.full((3, CROP, CROP), 100, np.float32)
AVERAGES = ("conv1.norm.running_mean", "fc1.norm.running_var")


class Compiled:
    """The functions of trainers, computed one after another, and the memory that they share."""

    def __init__(
        self,
        batch: int,
        records: bool = False,
        freeze: tuple[str, ...] = (),
        network: type[Network] = NormNetwork,
        **options: float,
    ) -> None:
        changes: dict[str, Any] = {"freeze": freeze, "init_weights": "w"} if freeze else {}
        config = Config(
            crop_size=CROP,
            batch_size=batch,
            norm_rows=ROWS,
            precision="float64",
            threads=1,
            learning_rate=0.1,
            **changes,
        )
        self.batch = batch
        self.network = network(CROP, CLASSES, width=1.0, dtype="float64", **options)
        memory = host_memory(self.network, SGD(), batch, freeze)
        memory.records = records
        self.layout, self.gradients = memory.layout, memory.flat["gradients"][0]
        self.model = CompiledNetwork(self.network, config, SGD(), MEAN, memory)
        self.model.load(dict(self.network.initial_values(1)))
        self.slot_of = partial(noise_slot, self.network)

    def step(self, whole: Slot, rows: int) -> dict[str, np.ndarray]:
        """A step of as many trainers as the valid rows of a global minibatch need, and one more.

        Returns weights and the averages of statistics and gradients.
        """
        counts = [min(max(rows - first, 0), self.batch) for first in self.firsts(len(whole.labels))]
        parts = []
        for first, count in zip(self.firsts(len(whole.labels)), counts, strict=True):
            slot = self.slot_of(self.batch, count, seed=99)
            for name in ("pictures", "labels", "indices"):
                getattr(slot, name)[:count] = getattr(whole, name)[first : first + count]
            self.model.compute_gradients(slot, 0, count)
            assert self.model.is_finite()
            assert count or not self.gradients.any()
            parts.append(self.gradients.copy())
        average_into_all(parts, [count / rows for count in counts])
        self.gradients[...] = parts[0]
        found = {f"gradient/{name}": v for name, v in self.layout.views(parts[0]).items()}
        self.model.update(0.1)
        return found | {name: value.copy() for name, value in self.model.state()[0].items()}

    def firsts(self, rows: int) -> range:
        return range(0, rows, self.batch)


@pytest.fixture(scope="module")
def trainers() -> list[Compiled]:
    """Three trainers, and one, of a global minibatch of twelve."""
    return [Compiled(batch) for batch in (4, 12)]


def test_the_number_of_trainers_changes_nothing(trainers: list[Compiled]) -> None:
    """Whole minibatches and short ones: a trainer without rows, a group that is cut, one row."""
    for seed, rows in enumerate((12, 12, 7, 4, 12, 1)):
        whole = trainers[0].slot_of(12, 12, seed=seed)
        found = [each.step(whole, rows) for each in trainers]
        for other in found[:-1]:
            assert other.keys() == found[-1].keys()
            for name, value in found[-1].items():
                np.testing.assert_allclose(other[name], value, 1e-9, 1e-12, err_msg=name)
        assert all(np.abs(found[-1][name]).max() > 0 for name in AVERAGES)


def test_averages_are_of_groups_of_valid_rows(trainers: list[Compiled]) -> None:
    """By loops, of the input of the first normalisation: the convolution."""
    one = trainers[-1]
    images = np.random.default_rng(1).integers(0, 256, (12, CROP, CROP, 3))
    for rows in (12, 5):
        before = one.model.state()[0]["conv1.norm.running_var"].copy()
        filters = one.model.state()[0]["conv1.weight"].copy()
        whole = one.slot_of(12, 12)
        whole.pictures[...] = images
        outputs = np.zeros((12, *filters.shape[:1], 5, 5))
        for n, k, i, j in np.ndindex(outputs.shape):
            window = images[n, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].transpose(2, 0, 1) - 100.0
            outputs[n, k, i, j] = (window * filters[k]).sum()
        variances, counts = [], []
        for first in range(0, rows, ROWS):
            group = outputs[first : min(first + ROWS, rows)]
            counts.append(len(group))
            variances.append([group[:, k].var(ddof=1) for k in range(len(filters))])
        expected = np.average(variances, axis=0, weights=counts)
        found = one.step(whole, rows)
        np.testing.assert_allclose(found["gradient/conv1.norm.running_var"], expected, rtol=1e-9)
        np.testing.assert_allclose(
            found["conv1.norm.running_var"], 0.9 * before + 0.1 * expected, rtol=1e-9
        )


def test_auxiliary_heads_are_trained_and_neither_reported_nor_validated() -> None:
    """Against PyTensor's gradient of the sum of both costs, and the main head's loss."""
    weight = 0.3
    compiled = Compiled(4, auxiliary=weight)
    network, slot = compiled.network, compiled.slot_of(4, 4)
    compiled.model.compute_gradients(slot, 0, 4)
    found = compiled.layout.views(compiled.gradients.copy())
    compiled.model.update(0.0)
    network.initialize(1)
    images = slot.pictures.transpose(0, 3, 1, 2).astype(float) - 100
    training = Training(*(pt.constant(n, dtype="int64") for n in (1, 0, slot.indices)), rows=ROWS)
    logits = network.logits(pt.constant(images), training)
    labels, valid = pt.constant(slot.labels), pt.constant(np.int64(4))
    ((outputs, part),) = training.auxiliary
    assert part == weight
    main, head = (network.cost(each, labels, valid) for each in (logits, outputs))
    names = ["conv1.weight", "fc2.bias", "head.weight"]
    wanted = pt.grad(main + weight * head, [network.parameters[name] for name in names])
    loss, *expected = pytensor.function([], [main, *wanted], mode=Mode("py", None))()
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(found[name], value, 1e-9, 1e-15, err_msg=name)
    assert compiled.model.take_sums("train").loss == pytest.approx(4 * loss, rel=1e-12)
    graph = compiled.model.functions.compiled("validation")[0].maker.fgraph
    used = {variable.name for variable in graph.inputs if graph.clients[variable]}
    assert "fc2.weight" in used
    assert not {"head.weight", "head.bias"} & used


def test_a_frozen_layer_normalises_by_its_running_averages() -> None:
    """And so do all below it; they are neither updated nor asked for a statistic."""
    compiled = Compiled(4, freeze=("conv1",))
    assert [name for name, _ in compiled.layout.untrained] == [
        "fc1.norm.running_mean",
        "fc1.norm.running_var",
    ]
    whole, name = compiled.slot_of(4, 4), "conv1.norm.running_var"
    first = compiled.step(whole, 4)
    compiled.model.load(dict(compiled.network.initial_values(1)) | {name: np.full(4, 9.0)})
    second = compiled.step(whole, 4)
    assert (second[name] == 9).all()
    assert np.abs(first["gradient/fc2.bias"] - second["gradient/fc2.bias"]).max() > 1e-6


@pytest.mark.slow
def test_functions_that_are_recorded_compute_the_same() -> None:
    """A whole step of a trainer alone as well, and short minibatches in a slot between others."""
    apart, recorded, alone = Compiled(8), Compiled(8, records=True), Compiled(8, records=True)
    slot = apart.slot_of(8, 8)
    for rows in (8, 3, 8, 1, 3):
        slot.valid[...] = rows
        for each in (apart, recorded):
            each.model.compute_gradients(slot, 0, rows)
            each.model.update(0.1)
        assert alone.model.step(slot, 0, 0.1, rows)()
    expected = apart.model.state()[0]
    for other in (recorded, alone):
        for name, value in other.model.state()[0].items():
            np.testing.assert_allclose(value, expected[name], 1e-11, 1e-15, err_msg=name)


def test_a_minibatch_is_short_by_its_position() -> None:
    """The second function is compiled when it is needed; another network has one only."""
    compiled = Compiled(4)
    made = compiled.model.functions._compiled
    for rows, expected in ((4, ["gradients"]), (3, ["gradients", "short gradients"])):
        compiled.model.compute_gradients(compiled.slot_of(4, rows), 0, rows)
        assert list(made) == expected
    compiled = Compiled(4, network=Plain)
    compiled.model.compute_gradients(compiled.slot_of(4, 3), 0, 3)
    assert list(compiled.model.functions._compiled) == ["gradients"]


def test_initial_weights_have_their_averages(tmp_path: Path) -> None:
    """Those of layers that begin at random are left out, with all below them."""
    network = NormNetwork(CROP, CLASSES, 1.0, "float32")
    weights = {name: value + 2 for name, value in network.initial_values(3)}
    description = NetworkDescription(CROP, CLASSES, 1.0, network=NETWORK)
    averages = tuple(n for n, p in network.parameters.declared.items() if not p.trainable)
    path = tmp_path / "w.safetensors"
    save_checkpoint(path, Checkpoint(weights, {}, description, untrained=averages))
    shapes = {name: value.shape for name, value in weights.items()}
    found = initial_weights(path, shapes, ["fc1"], description)
    assert found.keys() == {name for name in weights if not name.startswith("fc1")}
    np.testing.assert_array_equal(found["conv1.norm.running_var"], np.full(4, 3, np.float32))
