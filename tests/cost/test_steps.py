"""The lines of a trainer's step, against the functions that a run makes, and sums by hand."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.schema import make_config
from tandem.cost.machine import Speed
from tandem.cost.steps import Line, TrainerStep, trainer_step
from tandem.errors import InputError
from tandem.layers.network import KERAS_NETWORK
from tandem.layers.parameter import layer_of
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.parameters import HostMemory
from tandem.ops.work import Work
from tandem.optim import OPTIMIZERS
from tandem.training.attribution import NodeOrigin
from tandem.training.compiled_network import CompiledNetwork
from tandem.training.setup import parameter_layout
from tests.support.keras_models import json_of, keras
from tests.support.norm_network import CROP, NETWORK, NormNetwork

SETTINGS = {"network": NETWORK, "crop_size": CROP, "batch_size": 4, "exchange": "gradients"}
PLACE = NodeOrigin("conv1", "forward")
SPEED = Speed(trainers=1, threads=1, bandwidth=1e9, call=1e-6, rates={"default": 1e9})


def small(**changes: Any) -> TrainerStep:
    return trainer_step(make_config({**SETTINGS, **changes}), classes=10)


@pytest.mark.parametrize("bucket_mb", [0, 0.001])
def test_lines_are_those_of_the_functions_of_a_run(bucket_mb: float) -> None:
    config = make_config({**SETTINGS, "bucket_mb": bucket_mb, "norm_rows": 4})
    network = NormNetwork(CROP, 10, 1.0, "float32")
    optimizer = OPTIMIZERS.chosen(dict(config))
    layout = parameter_layout(network, optimizer, config.parameter_groups)
    vectors = [np.zeros(n, np.uint8) for n in (layout.parameters_nbytes, layout.nbytes)]
    slots = HostSlots((), SlotLayout.of_pictures(4, CROP))
    memory = HostMemory(slots, layout, vectors[:1], vectors[1:])
    told: list[str] = []
    model = CompiledNetwork(
        network,
        config.model_copy(update={"use_data_layer": False}),
        optimizer,
        np.zeros((3, CROP + 29, CROP + 29), np.float32),
        memory,
        told.append if bucket_mb else None,
    )
    step = small(bucket_mb=bucket_mb)
    for name, lines in (("gradients", step.gradients), ("update", step.update)):
        function: Any = model.functions.compiled(name)[0]
        nodes = function.vm.program.nodes
        assert [line.op for line in lines] == [type(n.op).__name__ for n in nodes.values()]
    assert len(step.buckets) == (7 if bucket_mb else 0)
    early = [name for line in step.gradients for name in line.ready]
    if bucket_mb:  # All but those of the last bucket are reported before the end.
        assert {*early} == {n for bucket in step.buckets[:-1] for n in bucket.names}


def test_alex_nets_products_are_those_of_its_layers() -> None:
    """Of filters, pixels and images; each again for the gradients of weights and of inputs."""
    config = make_config({"batch_size": 2, "exchange": "gradients"})
    step = trainer_step(config, classes=1000)
    sides = {"conv1": 55, "conv2": 27, "conv3": 13, "conv4": 13, "conv5": 13}
    filters = {
        "conv1": (96, 3 * 11**2),
        "conv2": (256, 48 * 5**2),
        "conv3": (384, 256 * 3**2),
        "conv4": (384, 192 * 3**2),
        "conv5": (256, 192 * 3**2),
    }
    layers = {name: 2 * sides[name] ** 2 * n * k for name, (n, k) in filters.items()}
    dense = sum(2 * a * b for a, b in itertools.pairwise((256 * 6 * 6, 4096, 4096, 1000)))
    expected = 2 * (3 * (sum(layers.values()) + dense) - layers["conv1"])
    kinds = ("convolution", "product")
    found = sum(line.work.flops for line in step.lines if line.work.kind.startswith(kinds))
    assert found == pytest.approx(expected, rel=2e-3)  # biases beside it
    assert step.layout.size == pytest.approx(60_965_224, rel=1e-4)
    assert step.pixel_bytes == 2 * 3 * 227**2
    updated = sum(line.work.nbytes for line in step.update if line.work.kind == "update")
    assert updated == pytest.approx(5 * 4 * 60_965_224, rel=1e-4)  # three read, two written


def test_sums_of_groups_of_rows_are_passes_and_their_additions() -> None:
    """Of four gradients: three additions and two copies, each of two or three vectors."""
    one, four = small(batch_size=2), small(batch_size=8, sum_rows=2)
    assert four.gradients[:-1] == one.gradients * 4
    assert (four.batch_size, four.pixel_bytes) == (8, 4 * one.pixel_bytes)
    work, nbytes = four.gradients[-1].work, one.layout.nbytes
    assert (work.flops, work.nbytes) == (3 * one.layout.size, (3 * 3 + 2 * 2) * nbytes)
    with pytest.raises(InputError, match="sum_rows: found 3, expected a divisor of batch_size, 8"):
        small(batch_size=8, sum_rows=3)


def test_the_last_layers_buckets_are_ready_first() -> None:
    step = small(bucket_mb=0.001)
    fc2 = next(n for n, bucket in enumerate(step.buckets) if "fc2.weight" in bucket.names)
    assert fc2 < len(step.buckets) - 1
    assert "conv1.weight" in step.buckets[-1].names
    ready, (gradients, update) = step.ready(SPEED), step.seconds(SPEED)
    assert ready == sorted(ready)
    assert 0 < ready[0] < ready[-1] == pytest.approx(gradients)
    assert update > 0


def test_seconds_are_sums_over_lines() -> None:
    lines = (
        Line("A", Work("product", 2 * 10**9, 10), PLACE),
        Line("B", Work("view", 0, 0), PLACE, ("w",)),
        Line("C", Work("relu", 10, 3 * 10**9), PLACE),
    )
    step = small(bucket_mb=100)
    step = TrainerStep(1, 1, lines, lines[:1], step.layout, step.buckets)
    assert step.seconds(SPEED) == pytest.approx((5 + 2e-6, 2 + 1e-6))
    assert step.ready(SPEED) == pytest.approx([5 + 2e-6])  # with others than w in the bucket


def test_no_memory_is_touched() -> None:
    """VGG-16's weights, states and gradients are 1.7 GB."""
    before = resident()
    config = make_config({"network": "tandem.models.vgg:VGG16", "crop_size": 224, "batch_size": 8})
    step = trainer_step(config, classes=1000)
    assert step.layout.parameters_nbytes + step.layout.nbytes > 1.6e9
    # The variables of 553 MB too, if they lie where other tests have left memory.
    assert resident() - before < 800e6


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(InputError, match="norm_rows: found 3, expected a divisor of batch_size 4"):
        small(norm_rows=3)
    with pytest.raises(InputError, match="has no class 'NormNetwrk'; did you mean"):
        small(network=NETWORK.replace("Network", "Netwrk"))


@pytest.mark.parametrize("shape", [(8, 8, 1), (20,)])
def test_keras_models_over_arrays(shape: tuple[int, ...]) -> None:
    m = keras.layers
    layers = [m.Dense(4, "relu")] if len(shape) == 1 else [m.Conv2D(2, 3), m.Flatten()]
    model = keras.Sequential([keras.Input(shape), *layers, m.Dense(3)])
    options = {"model": json_of(model)}
    settings = {"network": KERAS_NETWORK, "network_options": options, "batch_size": 16}
    step = trainer_step(make_config({**settings, "exchange": "gradients"}), classes=3)
    assert step.pixel_bytes == 16 * 4 * np.prod(shape)  # float32
    named = {layer_of(name) for name in step.layout.offsets}
    assert named <= {line.place.layer for line in step.lines}
    model.layers[0].trainable = False
    settings["network_options"] = {"model": json_of(model)}
    frozen = trainer_step(make_config({**settings, "exchange": "gradients"}), classes=3)
    assert {layer_of(name) for name in frozen.layout.offsets} == named - {model.layers[0].name}
