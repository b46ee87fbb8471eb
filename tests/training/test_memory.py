"""Memory of trainers on the host, with the exchange and the update over it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alex_net import AlexNet
from tandem.config.command_line import load_config
from tandem.distributed import ExchangeSettings, local_groups, make_exchange
from tandem.launch.prepare import prepare_run
from tandem.memory import SlotLayout
from tandem.memory.cuda import CudaSlots
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import HostMemory
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork
from tandem.training.memory import make_slots, open_memory
from tandem.training.run_spec import RunSpec
from tests.support.threads import run_threads
from tests.support.tiny import settings

TRAINERS = 3
# The last has fewer pictures than the others in the second step, and none in the third.
SHARES = ([1 / 3] * 3, [0.4, 0.4, 0.2], [2 / 3, 1 / 3, 0.0])


def spec_of(data: Path, run: Path, **changes: object) -> RunSpec:
    arguments = settings(data, run, devices=["cpu"] * TRAINERS, weight_decay=0.01, **changes)
    return prepare_run(load_config(arguments))


def open_all(spec: RunSpec) -> tuple[AlexNet, dict[int, HostMemory]]:
    config = spec.config
    net = AlexNet(config.crop_size, spec.classes, config.width, config.dtype)
    shapes = {name: variable.type.shape for name, variable in net.parameters.items()}
    layout = FlatLayout.of(shapes, config.dtype, states=("momentum",))
    opened: dict[int, HostMemory] = {}

    def open_one(rank: int) -> None:
        memory = open_memory(spec, make_slots(spec, rank), groups[rank], layout)
        assert isinstance(memory, HostMemory)
        opened[rank] = memory

    groups = local_groups(TRAINERS)
    run_threads([lambda rank=rank: open_one(rank) for rank in range(TRAINERS)])
    return net, opened


def train(spec: RunSpec) -> list[dict[str, np.ndarray]]:
    """Weights and momenta of every trainer after three steps with gradients of noise."""
    net, memories = open_all(spec)
    mean, memory = np.zeros((3, 70, 70)), [memories[rank] for rank in range(TRAINERS)]
    models = [CompiledNetwork(net, spec.config, SGD(), mean, own) for own in memory]
    settings = ExchangeSettings.of(vars(spec.config))
    exchanges = [
        make_exchange(settings, memories[group.rank], group) for group in local_groups(TRAINERS)
    ]
    for model in models:
        model.load(dict(net.initial_values(1)))
        model.update(0.0)  # compiles, and changes nothing
    rng = np.random.default_rng(0)
    for shares in SHARES:
        for model, share in zip(models, shares, strict=True):
            for variable in model.gradients.values():
                value = rng.normal(size=variable.type.shape) * (share > 0)
                variable.set_value(value.astype(spec.config.dtype))

        def step(rank: int, shares: Sequence[float] = shares) -> None:
            exchanges[rank].before_update(shares)
            models[rank].update(0.1)
            exchanges[rank].after_update(shares)

        run_threads([lambda rank=rank: step(rank) for rank in range(TRAINERS)])
    return [
        {
            v.name: v.get_value()
            for group in (m.weights, m.states["momentum"])
            for v in group.values()
        }
        for m in models
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "float32", "use_nesterov_momentum": True},
        pytest.param({"precision": "float64"}, marks=pytest.mark.slow),
        pytest.param({"precision": "float32", "use_momentum": False}, marks=pytest.mark.slow),
    ],
)
def test_sharing_weights_gives_the_bits_of_exchanging_gradients(
    data: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    results = [
        train(spec_of(data, tmp_path / "run", exchange=exchange, **changes))
        for exchange in ("gradients", "shared")
    ]
    expected = results[0][0]
    assert len(expected) == 32
    for values in (*results[0], *results[1]):
        for name, value in values.items():
            assert value.tobytes() == expected[name].tobytes(), name


def test_what_is_shared_is_there_once(data: Path, tmp_path: Path) -> None:
    for exchange, copies in (("shared", 1), ("gradients", TRAINERS)):
        _, memories = open_all(spec_of(data, tmp_path / "run", exchange=exchange))
        for rank, memory in memories.items():
            weights = next(iter(memory.vectors.weights.values()))
            gradients = next(iter(memory.vectors.gradients.values()))
            weights[...], gradients[...] = rank + 1, rank + 1
        for name, kinds in (("weights", copies), ("gradients", TRAINERS)):
            groups = [getattr(memory.vectors, name) for memory in memories.values()]
            assert len({float(next(iter(g.values())).max()) for g in groups}) == kinds


def test_each_trainer_updates_its_part_of_what_is_shared(data: Path, tmp_path: Path) -> None:
    _, memories = open_all(spec_of(data, tmp_path / "run", exchange="shared"))
    for memory in memories.values():
        part = memory.updated
        assert part is not None
        for group in (part.weights, part.states["momentum"]):
            for piece in group.values():
                piece += 1
    for memory in memories.values():
        for group in (memory.vectors.weights, memory.vectors.states["momentum"]):
            assert all((array == 1).all() for array in group.values())


def test_memory_of_an_earlier_trainer_is_given_back_before_the_gpu_is_used(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    done: list[str] = []

    class Slots(CudaSlots):
        torch_device = "cpu"

        def driver(self) -> Any:
            done.append("driver")

        def trainer_memory(self, *arguments: Any) -> Any:
            done.append("memory")

    monkeypatch.setattr("tandem.backend.give_back_memory", lambda: done.append("given back"))
    spec, layout = spec_of(data, tmp_path / "run"), FlatLayout.of({}, "float32")
    open_memory(spec, Slots(0, SlotLayout.of_pictures(1, 8)), local_groups(1)[0], layout)
    assert done == ["given back", "driver", "memory"]
