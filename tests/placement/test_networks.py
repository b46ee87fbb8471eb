"""Every network's graphs have rules for all Ops, and only the conversions that are expected."""

import importlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from pytensor.compile.mode import Mode

from tandem.config.schema import Config
from tandem.layers import Network
from tandem.layers.choices import LOSSES
from tandem.placement import Shard, simulate
from tests.support.network_graphs import METRICS, PlacedGraph, training_graph, validation_graph
from tests.support.op_checks import plain_python

BATCH = 8  # of all ranks


@dataclass(frozen=True)
class Case:
    """A small network, how many layers are sharded, and how many are normalised."""

    name: str  # module:class
    crop_size: int
    sharded: int
    norms: int = 0
    width: float = 0.05
    heads: int = 1  # outputs, auxiliary ones included
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.partition(":")[2]

    def build(self) -> Network:
        module, _, kind = self.name.partition(":")
        network = getattr(importlib.import_module(module), kind)
        return network(self.crop_size, 7, self.width, "float64", **self.options)

    def config(self, **settings: Any) -> Config:
        """Settings of one of two trainers."""
        return Config(
            crop_size=self.crop_size,
            width=self.width,
            batch_size=BATCH // 2,
            precision="float64",
            threads=1,
            rand_colour=0.1,
            **{"metrics": [*METRICS], **settings},
        )


NORMALISED = Case("tests.support.norm_network:NormNetwork", 12, sharded=2, norms=1, width=1)
QUICK = [
    Case("alex_net:AlexNet", 67, sharded=3),
    NORMALISED,
]
SLOW = [
    Case("tandem.models.vgg:VGG16", 32, sharded=3),
    Case("tandem.models.resnet:ResNet18", 32, sharded=1, norms=20),
    Case("tandem.models.googlenet:GoogLeNet", 96, sharded=5, heads=3),
    Case("tandem.models.vgg:VGG19", 32, sharded=3),
    Case("tandem.models.resnet:ResNet50", 32, sharded=1, norms=53),
    Case("tandem.models.resnet:ResNet20", 16, sharded=1, norms=19),
    Case("tandem.models.wide_resnet:WideResNet", 16, sharded=1, norms=25),
    Case("tandem.models.mobilenet:MobileNetV2", 64, sharded=1, norms=52),
    Case("tandem.models.densenet:DenseNet121", 64, sharded=1, norms=121),
    Case("tandem.models.googlenet:GoogLeNetBN", 64, sharded=5, norms=59, heads=3),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


def kinds(graph: PlacedGraph) -> Counter[str]:
    """How many conversions of each kind there are; NotImplementedError names Ops without a rule."""
    return Counter(c.kind for c in graph.partition(2, strict=True).conversions)


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_of_layers_are_gathered_and_their_gradients_scattered(
    case: Case, is_short: bool
) -> None:
    network = case.build()
    config = case.config(norm_rows="global" if case.norms and is_short else "auto")
    found = kinds(training_graph(network, config, BATCH, "sharded", is_short))
    assert found["all-gather"] == found["reduce-scatter"] == case.sharded
    assert found["all-to-all"] == 2 * case.heads  # of the logits and back
    assert found["all-reduce"] == (2 * case.norms if is_short else 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_validation_gathers_the_inputs_of_layers(case: Case) -> None:
    found = kinds(validation_graph(case.build(), case.config(), BATCH, "sharded"))
    layers = case.sharded if case.heads == 1 else 1  # auxiliary heads are for training
    assert found == {"all-gather": layers, "all-to-all": 1}


@pytest.mark.parametrize("loss", [*LOSSES])
def test_losses_move_no_more_than_the_logits(loss: str) -> None:
    case = Case("tests.support.norm_network:Plain", 6, sharded=1)
    network, config = case.build(), case.config(metrics=[])
    network.loss = LOSSES.make(loss, dict(config))
    graph = training_graph(network, config, BATCH, "sharded")
    images, *others = graph.partition(2, strict=True).conversions
    assert images.shape == (BATCH, 3, 6, 6)
    assert sum(c.received for c in others) <= 2 * BATCH * network.classes * 8
    assert not kinds(training_graph(network, config, BATCH, "replicated"))


@pytest.mark.parametrize(
    ("ranks", "kind", "rows"),
    [
        (2, "sharded", 2),
        (3, "sharded", "global"),
        (2, "single", 4),
        pytest.param(4, "sharded", "global", marks=pytest.mark.slow),
        pytest.param(4, "replicated", "global", marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_does(ranks: int, kind: str, rows: Any) -> None:
    network = replace(NORMALISED, options={"auxiliary": 0.3}).build()
    network.initialize(3)
    graph = training_graph(network, NORMALISED.config(norm_rows=rows), BATCH, kind, is_short=True)
    values = graph.values(network, valid=5)
    outputs = [*graph.outputs.values()]
    mode = Mode("py", None)
    with plain_python():
        whole, *_ = simulate(outputs, {}, {}, 1, values, mode=mode)
        parts = simulate(outputs, graph.given, graph.wanted, ranks, values, strict=True, mode=mode)
    for name, expected, *own in zip(graph.outputs, whole, *parts, strict=True):
        placement = graph.wanted[graph.outputs[name]]
        terms = [part for part in own if part is not None]
        found = (
            np.concatenate(terms, placement.axis) if isinstance(placement, Shard) else sum(terms)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12, err_msg=name)
