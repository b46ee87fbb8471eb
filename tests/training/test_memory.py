"""Memory of trainers on the host, with the exchange and the update over it."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from alex_net import AlexNet
from tandem.config.command_line import load_config
from tandem.distributed import local_groups
from tandem.launch.prepare import prepare_run
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork
from tandem.training.memory import Memory, make_sites
from tandem.training.run_spec import RunSpec
from tests.support.tiny import settings

TRAINERS = 3
# The last has fewer pictures than the others in the second step, and none in the third.
SHARES = ([1 / 3] * 3, [0.4, 0.4, 0.2], [2 / 3, 1 / 3, 0.0])


def plan_of(data: Path, run: Path, **changes: object) -> RunSpec:
    arguments = settings(data, run, devices=["cpu"] * TRAINERS, weight_decay=0.01, **changes)
    return prepare_run(load_config(arguments))


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def open_all(spec: RunSpec) -> tuple[AlexNet, dict[int, Memory]]:
    config = spec.config
    net = AlexNet(config.crop_size, spec.classes, config.width, config.dtype)
    shapes = {name: variable.type.shape for name, variable in net.parameters.items()}
    opened: dict[int, Memory] = {}

    def open_one(rank: int) -> None:
        opened[rank] = sites[rank].open(places[rank], shapes, config.dtype)

    sites, places = make_sites(spec), local_groups(TRAINERS)
    together([lambda rank=rank: open_one(rank) for rank in range(TRAINERS)])
    return net, opened


def train(spec: RunSpec) -> list[dict[str, np.ndarray]]:
    """Weights and momenta of every trainer after three steps with gradients of noise."""
    net, memories = open_all(spec)
    strategy = spec.config.exchange
    models = [
        CompiledNetwork(
            net,
            spec.config,
            SGD(),
            np.zeros((3, 70, 70)),
            memories[rank].vectors,
            updated=memories[rank].updated(strategy),
        )
        for rank in range(TRAINERS)
    ]
    exchanges = [memories[rank].exchange(strategy) for rank in range(TRAINERS)]
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

        together([lambda rank=rank: step(rank) for rank in range(TRAINERS)])
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
        train(plan_of(data, tmp_path / "run", exchange=exchange, **changes))
        for exchange in ("gradients", "shared")
    ]
    expected = results[0][0]
    assert len(expected) == 32
    for values in (*results[0], *results[1]):
        for name, value in values.items():
            assert value.tobytes() == expected[name].tobytes(), name


def test_what_is_shared_is_there_once(data: Path, tmp_path: Path) -> None:
    for exchange, copies in (("shared", 1), ("gradients", TRAINERS)):
        sites = make_sites(plan_of(data, tmp_path / "run", exchange=exchange))
        assert len({id(buffer) for site in sites for buffer in site.parameters}) == copies
        assert len({id(buffer) for site in sites for buffer in site.gradients}) == TRAINERS


def test_each_trainer_updates_its_part_of_what_is_shared(data: Path, tmp_path: Path) -> None:
    _, memories = open_all(plan_of(data, tmp_path / "run", exchange="shared"))
    for memory in memories.values():
        part = memory.updated("shared")
        for group in (part.weights, part.states["momentum"]):
            for piece in group.values():
                piece += 1
    for memory in memories.values():
        for group in (memory.vectors.weights, memory.vectors.states["momentum"]):
            assert all((array == 1).all() for array in group.values())
