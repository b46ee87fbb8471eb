"""Conversions: those that there are, and what they cost."""

import itertools

import pytest

from tandem.placement import Part, Partial, Placement, Replicate, Shard, Single
from tandem.placement.conversions import find_kind

PLACEMENTS: list[Placement] = [
    Replicate(), Shard(0), Shard(1), Partial(), Partial("max"), Single(0), Single(1),
]  # fmt: skip
PAIRS = list(itertools.permutations(PLACEMENTS, 2))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_weight_of_a_conversion_is_what_all_ranks_receive(ranks: int) -> None:
    shape = (12 * ranks, 5 * ranks)  # which the ranks divide
    nbytes = 8 * shape[0] * shape[1]
    moving = 0
    for source, target in PAIRS:
        kind = find_kind(source, target)
        if kind is None or kind.op is None:
            assert kind is None or kind.weight(ranks) == 0
            continue
        ops = [kind.op(0, Part(ranks, rank), shape) for rank in range(ranks)]
        received = sum(op.received("float64") for op in ops)
        assert kind.weight(ranks) * nbytes == pytest.approx(received), (source, target)
        moving += 1
    assert moving == 24


def test_two_conversions_are_needed_where_there_is_no_other_way() -> None:
    by_way_of_the_whole = {pair for pair in PAIRS if find_kind(*pair) is None}
    largest = [(p, Partial("max")) for p in PLACEMENTS if p not in (Replicate(), Partial("max"))]
    others = [(Single(0), Single(1)), (Single(1), Single(0)), (Partial("max"), Partial())]
    assert by_way_of_the_whole == {*largest, *others}
