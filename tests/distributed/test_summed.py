"""Sums of groups of rows have the bits of a tree over their numbers, however they are divided."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from tandem.data.order import trainer_shares
from tandem.distributed import (
    ExchangeSettings,
    LocalGroup,
    TreeSum,
    local_groups,
    make_exchange,
    open_host_memory,
)
from tandem.distributed.summed import most_partials
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.flat import FlatLayout
from tests.support.threads import run_threads

ROWS, SIZE = 3, 270_000  # rows of a group; elements of a vector, some blocks


class Named(NamedTuple):
    """A term whose sum shows how it was added."""

    text: str

    def __add__(self, other: Any) -> "Named":
        return Named(f"({self.text}{other.text})")


def by_recursion(terms: list[Any]) -> Any:
    """The sum of terms: that of the first largest power of two below their number, and the rest."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return by_recursion(terms[:half]) + by_recursion(terms[half:])


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 21])
def test_a_tree_is_the_same_for_all_divisions(count: int) -> None:
    terms = [Named(chr(ord("a") + n)) for n in range(count)]
    for trainers in range(1, 9):
        whole, most = TreeSum[Named](), 0
        for own in trainer_shares(count * ROWS, trainers, ROWS):
            part = TreeSum[Named]()
            for number in range(own.start // ROWS, own.stop // ROWS):
                part.push(terms[number], 0, number)
                most = max(most, len(part.nodes))
            for node, term in zip(part.nodes, part.terms, strict=True):
                whole.push(term, *node)
        assert whole.total() == by_recursion(terms)
        assert most_partials(count * ROWS, trainers, ROWS) in (most, (most > 1) * most)


def test_partial_sums_grow_with_the_logarithm() -> None:
    """Beside the gradients themselves; a single group needs none, uneven ranges up to twice."""
    assert [most_partials(n, 1, 1) for n in (1, 2, 4, 8, 16)] == [0, 1, 2, 3, 4]
    assert [most_partials(16, n, 1) for n in (2, 3, 4, 16, 20)] == [3, 3, 2, 0, 0]


def gradients(numbers: range, step: int) -> list[np.ndarray]:
    """Means of the cost over each group's rows, of several magnitudes."""
    rngs = (np.random.default_rng((number, step)) for number in numbers)
    return [(r.normal(size=SIZE) * 10.0 ** r.uniform(-3, 3, SIZE)).astype("f4") for r in rngs]


@pytest.mark.parametrize("trainers", [1, 2, 3, 7])
@pytest.mark.parametrize("are_ranks", [False, True])
def test_gradients_are_averaged_in_the_trees_order(trainers: int, are_ranks: bool) -> None:
    """A whole minibatch of six groups; one of which the last row is missing, and two groups."""
    settings: Any = {"exchange": "gradients", "sum_rows": ROWS, "global_batch": 6 * ROWS}
    layout = FlatLayout.of({"w": (SIZE,)}, "float32")
    found: dict[int, list[np.ndarray]] = {}

    def work(group: LocalGroup) -> None:
        if are_ranks:  # these send each other messages
            group.starter = "mpirun"
        chosen = ExchangeSettings.of(settings)
        slots = HostSlots((), SlotLayout.of_pictures(ROWS, 2))
        memory = open_host_memory(chosen, slots, group, layout)
        assert memory.vectors.weights["w"].ctypes.data % 4096 == 0
        exchange = make_exchange(chosen, memory, group)
        own, found[group.rank] = memory.vectors.gradients["w"], []
        share = trainer_shares(6 * ROWS, trainers, ROWS)[group.rank]
        for step, rows in enumerate((6 * ROWS, 4 * ROWS - 1)):
            exchange.before_gradients(())
            starts = range(share.start, min(share.stop, rows), ROWS)
            for start in starts:
                number = start // ROWS
                own[...] = gradients(range(number, number + 1), step)[0]
                exchange.after_gradients(number, min(ROWS, rows - start), start == starts[-1])
            exchange.before_update(())
            found[group.rank].append(own.copy())

    run_threads([partial(work, group) for group in local_groups(trainers)])
    whole, short = gradients(range(6), 0), gradients(range(4), 1)
    short[-1] *= np.float32(2 / 3)
    expected = [by_recursion(whole) / np.float32(6), by_recursion(short) / np.float32(11 / 3)]
    for results in found.values():
        for result, right in zip(results, expected, strict=True):
            assert result.tobytes() == right.tobytes()
