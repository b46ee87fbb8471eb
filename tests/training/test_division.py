"""How trainers divide parameters, and how a checkpoint gets them whole."""

from typing import Any

import numpy as np
import pytest

from tandem.config.schema import make_config
from tandem.distributed import local_groups
from tandem.errors import InputError
from tandem.layers import Network
from tandem.placement import Partial, Placement, Replicate, Shard, Single
from tandem.training import shards
from tandem.training.division import Division, divide
from tandem.training.shards import Gathering
from tests.support.divided import SmallNetwork, Together
from tests.support.norm_network import NormNetwork
from tests.support.threads import run_threads

SHARDED = make_config({"fully_connected": "sharded"})


def small(**options: Any) -> Network:
    return SmallNetwork(8, 7, 1.0, "float32", **options)


def placing(placements: Any) -> Network:
    """A network with placements of its own."""

    class Placing(SmallNetwork):
        def placements(self, kind: str) -> Any:
            return placements

    return Placing(8, 7, 1.0, "float32")


def test_fully_connected_layers_are_divided_by_their_units() -> None:
    units: dict[str, Placement] = {
        "fc1.weight": Shard(1),
        "fc1.bias": Shard(0),
        "fc2.weight": Shard(1),
        "fc2.bias": Shard(0),
    }
    assert divide(small(), SHARDED, 3, 1) == Division(3, 1, units)
    single = divide(small(), make_config({"fully_connected": "single"}), 2, 0)
    assert single == Division(2, 0, dict.fromkeys(units, Single(0)))
    found = divide(small(), SHARDED, 3, 1)
    assert found is not None
    shapes = {name: p.shape for name, p in small().parameters.declared.items()}
    assert list(found.replicated(shapes)) == ["conv1.weight", "conv1.bias"]
    assert found.own(shapes) == {
        "fc1.weight": (36, 14),
        "fc1.bias": (14,),
        "fc2.weight": (41, 2),
        "fc2.bias": (2,),
    }


def test_who_divides_nothing_has_graphs_of_its_own() -> None:
    assert divide(small(), SHARDED, 1, 0) is None
    assert divide(small(), make_config({}), 2, 0) is None
    everyone = make_config({"norm_rows": "global"})
    assert divide(small(), everyone, 2, 0) is None  # it has no batch normalisation
    norm = NormNetwork(12, 3, 1.0, "float32")
    assert divide(norm, everyone, 2, 0) == Division(2, 0)
    assert divide(norm, everyone, 2, 0, "validate") is None
    assert divide(placing({"fc1.weight": Replicate()}), SHARDED, 2, 0) is None


@pytest.mark.parametrize(
    ("network", "trainers", "expected"),
    [
        (small(), 8, "axis 1 of fc2.weight, of length 7, among 8 trainers, .* at most 7 of them"),
        (small(units=3), 4, "axis 1 of fc1.weight, of length 3, among 4 trainers"),
        (placing({"fc9.weight": Shard(1)}), 2, "a placement of fc9.weight, which it does not"),
        (
            placing({"fc1.weight": Partial()}),
            2,
            r"places fc1.weight as Partial\(.*, expected Replicate",
        ),
        (
            placing({"fc1.weight": "sharded"}),
            2,
            r"as 'sharded', expected Replicate\(\), Shard\(axis",
        ),
        (placing({"fc1.wieght": Shard(1)}), 2, "fc1.wieght, .* did you mean fc1.weight?"),
        (placing(None), 2, "`placements` returns None, expected a dictionary"),
        (placing({"fc1.bias": Shard(1)}), 2, "fc1.bias: .* has no axis 1"),
        (placing({"fc1.bias": Single(2)}), 2, "fc1.bias: .* there are 2 ranks"),
    ],
)
def test_what_trainers_cannot_divide_is_refused(
    network: Network, trainers: int, expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        divide(network, SHARDED, trainers, 0)


@pytest.mark.parametrize("nbytes", [1, 1000, 1 << 20])
def test_parts_of_any_placement_are_gathered_in_chunks(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Uneven shards of both axes, and arrays that are at another trainer than 0."""
    monkeypatch.setattr(shards, "CHUNK_NBYTES", nbytes)
    placements: dict[str, Placement] = {
        "conv1.weight": Shard(2),
        "conv1.bias": Single(2),
        "fc1.weight": Shard(0),
        "fc1.bias": Single(0),
        "fc2.weight": Shard(1),
    }
    declared = small().parameters.declared
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=p.shape) for name, p in declared.items()}
    found: dict[str, Any] = {}

    def gather(rank: int) -> None:
        division = Division(3, rank, placements)
        indices = {name: division.index(name, value.shape) for name, value in whole.items()}
        parts = {name: whole[name][i] for name, i in indices.items() if i is not None}
        gathering = Gathering(division, declared, np.dtype("float64"), groups[rank])
        state = parts, {"momentum": {name: 2 * part for name, part in parts.items()}}
        if rank:
            gathering.send(state)
            return
        weights, states = gathering.whole(state)
        assert weights["fc1.weight"].nbytes == whole["fc1.weight"].nbytes
        assert weights["fc1.weight"].shape == whole["fc1.weight"].shape
        assert isinstance(weights["fc1.bias"], np.ndarray)  # no message for what is here
        for values in (weights, *states.values()):
            for name, value in values.items():
                found.setdefault(name, []).append(np.asarray(value))

    groups = local_groups(3)
    run_threads([lambda rank=rank: gather(rank) for rank in range(3)])
    assert list(found) == list(whole)
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name][0], value)
        np.testing.assert_array_equal(found[name][1], 2 * value)


def test_chunks_have_so_many_bytes_as_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all trainers together: here rows of 3 and 5 numbers of 4 bytes."""
    parts = [(5, 3), (5, 5), (0,)]
    for nbytes, rows in ((1, 1), (64, 2), (159, 4), (160, 5)):
        monkeypatch.setattr(shards, "CHUNK_NBYTES", nbytes)
        chunks = [*shards._chunks(parts, itemsize=4)]
        assert [chunk.start for chunk in chunks] == [*range(0, 5, rows)]
        assert {chunk.stop - chunk.start for chunk in chunks} == {rows}


def test_a_state_passes_between_all_kinds_and_numbers_of_trainers() -> None:
    kinds = ("sharded", "single", "replicated")
    runs = [Together(n, 2, fully_connected=kind) for kind in kinds for n in (1, 2, 3)]
    rng = np.random.default_rng(1)
    shapes = {name: p.shape for name, p in runs[0].network.parameters.declared.items()}
    first = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(2)]
    weights, momenta = first
    for run in runs:
        for model in run.models:
            model.load(weights, {"momentum": momenta})
        weights, states = run.state()
        momenta = states["momentum"]
        for found, expected in zip((weights, momenta), first, strict=True):
            assert list(found) == list(expected)
            assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
