"""AlexNet's conversions and their bytes, as numbers: 128 pictures per trainer, float32."""

from functools import cache
from typing import Any

import pytest

from tandem.placement import Conversion, Partial, Placement, Replicate, Shard, Single
from tandem.placement.explanation import received_by_rank
from tandem.placement_program import DividedNetwork, PlacementOptions

SHARDED: list[tuple[str, str, int, Placement, Placement]] = [
    ("all-gather", "MaxPool2d of conv5", 4_718_592, Shard(0), Replicate()),
    ("all-gather", "Mul of fc6", 2_097_152, Shard(1), Replicate()),
    ("all-gather", "Mul of fc7", 2_097_152, Shard(1), Replicate()),
    ("all-to-all", "Add of fc8", 256_000, Shard(1), Shard(0)),
    ("all-to-all", "Sub of fc8", 256_000, Shard(0), Shard(1)),
    ("reduce-scatter", "Dot of fc8", 2_097_152, Partial(), Shard(1)),
    ("reduce-scatter", "Dot of fc7", 2_097_152, Partial(), Shard(1)),
    ("reduce-scatter", "Dot of fc6", 4_718_592, Partial(), Shard(0)),
]


slow = pytest.mark.slow


@cache
def divided(ranks: int, kind: str, **changes: Any) -> DividedNetwork:
    return DividedNetwork.of(PlacementOptions(ranks=ranks, fully_connected=kind, **changes))


def told(conversion: Conversion) -> tuple[str, str, int, Placement, Placement]:
    return (
        conversion.kind,
        conversion.name,
        conversion.received,
        conversion.source,
        conversion.target,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_two_sharded_trainers_make_eight_conversions(rank: int) -> None:
    network = divided(2, "sharded")
    found = network.partitioned(rank)
    assert [told(conversion) for conversion in found.conversions] == SHARDED
    assert [conversion.number for conversion in found.conversions] == [*range(8)]
    assert found.received == 18_337_792
    assert found.without_rule == []
    assert round(network.exchanged() / 1e6, 1) == 9.3


@pytest.mark.parametrize("rows", [4, *(pytest.param(rows, marks=slow) for rows in (16, 128))])
def test_rows_as_many_as_classes_or_units_change_no_conversion(rows: int) -> None:
    """A square product's result has the size of its factors, whose elements lie elsewhere."""
    options = {"crop_size": 67, "width": rows / 2048, "classes": 2 * rows, "batch_size": rows}
    found = divided(2, "sharded", **options).partitioned(0)
    assert [c.kind for c in found.conversions] == [kind for kind, *_ in SHARDED]


def test_of_a_single_trainers_layers_what_goes_in_and_comes_back_passes() -> None:
    found = divided(2, "single")
    root, other = (found.partitioned(rank) for rank in range(2))
    assert [(c.kind, c.received) for c in root.conversions] == [
        ("gather", 4_718_592),  # pool5
        ("gather", 1_024),  # labels
        ("scatter", 0),
    ]
    assert [c.received for c in other.conversions] == [0, 0, 4_718_592]
    assert root.conversions[2].target == Shard(0)
    assert {c.source for c in root.conversions[2:]} == {Single(0)}


@pytest.mark.parametrize(
    ("ranks", "average", "gradients", "sharded", "root", "other"),
    [
        (2, 487.7, 243.9, 27.7, 14.1, 14.1),
        pytest.param(4, 731.6, 365.8, 68.2, 28.2, 18.7, marks=slow),
        (8, 853.5, 426.8, 142.0, 49.4, 21.1),
    ],
)
def test_megabytes_of_the_page(
    ranks: int, average: float, gradients: float, sharded: float, root: float, other: float
) -> None:
    """The table of docs/placement.md."""
    found = divided(ranks, "sharded")
    together = [nbytes + found.exchanged() for nbytes in found.received(found.partitioned())]
    assert {round(nbytes / 1e6, 1) for nbytes in together} == {sharded}
    assert round(found.exchanged_if_replicated("average") / 1e6, 1) == average
    assert round(found.exchanged_if_replicated("gradients") / 1e6, 1) == gradients
    single = divided(ranks, "single")
    first, *others = single.received(single.partitioned())
    assert round((first + single.exchanged()) / 1e6, 1) == root
    assert {round((nbytes + single.exchanged()) / 1e6, 1) for nbytes in others} == {other}


@pytest.mark.parametrize(("ranks", "kept"), [(2, 380), (4, 204), (8, 116)])
def test_megabytes_of_weights_momenta_and_gradients(ranks: int, kept: int) -> None:
    found = divided(ranks, "sharded")
    assert {round(nbytes / 1e6) for nbytes in found.memory()} == {kept}
    assert round(found.memory_if_replicated() / 1e6) == 732
    first, *others = divided(ranks, "single").memory()
    assert first == found.memory_if_replicated()
    assert {round(nbytes / 1e6) for nbytes in others} == {28}


@pytest.mark.parametrize("kind", ["sharded", "single"])
def test_bytes_of_each_rank_are_those_of_its_own_graph(kind: str) -> None:
    """3 ranks divide none of the lengths of the fully connected layers."""
    found = divided(3, kind, width=0.1, classes=20, batch_size=5)
    first = found.partitioned()
    for rank in range(3):
        own = found.partitioned(rank).conversions
        expected = [received_by_rank(c, 3)[rank] for c in first.conversions]
        assert [c.received for c in own] == expected
