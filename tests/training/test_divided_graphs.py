"""Trainers that divide one graph compute what one trainer does."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from pytensor.graph.traversal import applys_between

from alex_net import AlexNet
from tandem.config.schema import make_config
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.parameters import HostMemory
from tandem.ops.collective import Collective
from tandem.optim import SGD
from tandem.training.compiled_network import CROPS, CompiledNetwork
from tandem.training.division import Division, divide
from tandem.training.setup import parameter_layout
from tests.support.divided import SmallNetwork, Together
from tests.support.norm_network import NormNetwork
from tests.support.trainer_memory import noise_slot

ROWS = 12  # of a global minibatch

slow = pytest.mark.slow
SHARDED, SINGLE = {"fully_connected": "sharded"}, {"fully_connected": "single"}
GLOBAL = {"norm_rows": "global"}


def assert_equal_states(found: Any, expected: Any) -> None:
    """Compare weights and optimizer states relative to the largest value of each."""
    assert list(found[1]) == list(expected[1])
    groups = zip((found[0], *found[1].values()), (expected[0], *expected[1].values()), strict=True)
    for left, right in groups:
        assert list(left) == list(right)
        for name, value in right.items():
            atol = 1e-9 * np.abs(value).max()
            np.testing.assert_allclose(left[name], value, 0, atol, err_msg=name)


def compare(several: Together, one: Together) -> None:
    """Train and validate with several trainers and with one; compare all that is kept."""
    for seed, rows in enumerate((12, 7, 12, 1)):
        whole = noise_slot(one.network, ROWS, rows, seed)
        for each in (several, one):
            each.step(whole, rows, epoch=seed)
    assert_equal_states(several.state(), one.state())
    for crops in (1, CROPS):
        for rows in (12, 5):
            slots = [noise_slot(one.network, ROWS, rows, rows + crop) for crop in range(crops)]
            for slot in slots:
                slot.labels[...] = slots[0].labels
            for each in (several, one):
                each.validate(slots, rows)
    for mode in ("train", "validation"):
        found, expected = several.sums(mode), one.sums(mode)
        assert found.loss == pytest.approx(expected.loss, rel=1e-9)
        assert replace(found, loss=0.0) == replace(expected, loss=0.0)
    shape = (several.batch, one.network.classes)
    assert several.models[0].read_scores().shape == shape


@pytest.mark.parametrize(
    ("trainers", "settings"),
    [
        (2, SHARDED),
        *(
            pytest.param(trainers, settings, marks=slow)
            for trainers in (2, 3, 4)
            for settings in (SHARDED, SINGLE, {**SHARDED, "optimizer": "adam"})
            if (trainers, settings) != (2, SHARDED)
        ),
    ],
)
def test_the_number_of_trainers_does_not_change_what_is_computed(
    trainers: int, settings: dict[str, Any]
) -> None:
    """Minibatches with dropout, of which two are short: some trainers have no row of the last."""
    compare(Together(trainers, ROWS // trainers, **settings), Together(1, ROWS, **settings))


@slow
@pytest.mark.parametrize("trainers", [2, 3, 4])
@pytest.mark.parametrize(
    "settings", [GLOBAL, GLOBAL | SHARDED, GLOBAL | SINGLE, {"norm_rows": 3, **SHARDED}]
)
def test_nor_does_it_with_batch_normalisation(trainers: int, settings: dict[str, Any]) -> None:
    """Over all rows that are valid, or over groups of them, in layers that trainers divide too."""
    several = Together(trainers, ROWS // trainers, NormNetwork, **settings)
    compare(several, Together(1, ROWS, NormNetwork, **settings))


def test_all_rows_are_normalised_together() -> None:
    """The statistic of the first normalisation is the mean over all trainers' rows."""
    several = Together(2, ROWS // 2, NormNetwork, **GLOBAL)
    assert several.models[0].division == Division(2, 0)
    whole = noise_slot(several.network, ROWS, ROWS)
    filters = several.state()[0]["conv1.weight"]
    images = whole.pictures.transpose(0, 3, 1, 2) - 100.0
    expected = np.mean(
        [
            np.einsum("nchw,kchw->nk", images[..., i : i + 3, j : j + 3], filters)
            for i in (0, 2, 4)
            for j in (0, 2, 4)
        ],
        axis=(0, 1),
    )
    several.step(whole, ROWS)
    found = several.state()[0]["conv1.norm.running_mean"]
    np.testing.assert_allclose(found, 0.1 * expected, 1e-9)


@slow
def test_frozen_layers_are_divided_too() -> None:
    settings = {**SHARDED, "freeze": ["conv1", "fc1"], "init_weights": "w"}
    several, one = Together(2, 2, **settings), Together(1, 4, **settings)
    shapes = [model.weights["fc1.weight"].type.shape for model in several.models]
    assert shapes == [(36, 20), (36, 21)]
    assert all("fc1.weight" not in model.gradients for model in several.models)
    whole = noise_slot(one.network, 4, 4)
    for each in (several, one):
        each.step(whole, 4)
    assert_equal_states(several.state(), one.state())


def model_of(network: Any, rank: int, ranks: int, batch: int, **settings: Any) -> CompiledNetwork:
    """A trainer's network, of which nothing is compiled."""
    config = make_config({"batch_size": batch, "crop_size": network.crop_size, **settings})
    division = divide(network, config, ranks, rank)
    lay_out = partial(parameter_layout, network, SGD())
    layout = lay_out() if division is None else lay_out(select=division.replicated)
    slots = HostSlots.create(SlotLayout.of_pictures(batch, network.crop_size), rank)
    vectors = [np.zeros(n, np.uint8) for n in (layout.parameters_nbytes, layout.nbytes)]
    memory = HostMemory(slots, layout, vectors[:1], vectors[1:])
    if division is not None:
        memory.add_shards(lay_out(select=division.own))
    mean = np.zeros((3, network.crop_size, network.crop_size), np.float32)
    return CompiledNetwork(network, config, SGD(), mean, memory, division=division)


def conversions(model: CompiledNetwork) -> tuple[Counter[str], int]:
    """The conversions of a step by kind, and the bytes that the trainer receives by them."""
    updates = dict(model.graphs.gradients().updates)
    found = [
        node for node in applys_between([], updates.values()) if isinstance(node.op, Collective)
    ]
    if found:  # the last is a part of the function, whether its result is used or not
        last = max(found, key=lambda node: node.op.number)
        assert updates[model.variables.token] is last.outputs[1]
    received = sum(node.op.received(node.inputs[0].type.dtype) for node in found)
    return Counter(type(node.op).__name__ for node in found), received


def test_the_bytes_of_alexnet() -> None:
    """27.7 MB for each of two trainers of 128 pictures, of which the exchange receives 9.3."""
    network = AlexNet()
    model = model_of(network, 0, 2, 128, **SHARDED)
    kinds, received = conversions(model)
    assert kinds == {"AllGather": 3, "AllToAll": 2, "ReduceScatter": 3}
    assert received == 18_337_792
    exchanged = sum(np.prod(v.type.shape) for n, v in model.gradients.items() if n[0] == "c")
    assert 4 * exchanged == pytest.approx(9.336e6, rel=1e-3)  # half of it twice: sums, and back
    nbytes = [conversions(model_of(network, rank, 2, 128, **SINGLE))[1] for rank in (0, 1)]
    assert nbytes == [4_719_616, 4_718_592]


@pytest.mark.parametrize("settings", [SHARDED, SINGLE, GLOBAL])
def test_one_trainer_has_the_graph_of_ever(settings: dict[str, Any]) -> None:
    model = model_of(SmallNetwork(8, 7, 1.0, "float32"), 0, 1, 4, **settings)
    assert model.division is None
    assert conversions(model) == ({}, 0)
    plain = model_of(SmallNetwork(8, 7, 1.0, "float32"), 0, 1, 4)
    for one, other in ((model, plain), (plain, model)):
        nodes = [
            Counter(str(node.op) for node in applys_between([], [value for _, value in updates]))
            for updates in (one.graphs.gradients().updates, other.graphs.gradients().updates)
        ]
        assert nodes[0] == nodes[1]
