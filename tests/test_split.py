"""The one formula by which rows are split."""

from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.split import edges, part_of, part_shape


@given(st.integers(0, 200), st.integers(1, 40))
def test_edges_are_the_floors_of_equal_parts(count: int, parts: int) -> None:
    assert edges(count, parts) == [floor(Fraction(count * i, parts)) for i in range(parts + 1)]


@given(st.integers(0, 1 << 62), st.integers(1, 40))
def test_parts_cover_all_rows_and_differ_by_at_most_one(count: int, parts: int) -> None:
    found = edges(count, parts)
    sizes = [end - start for start, end in pairwise(found)]
    assert (found[0], sum(sizes), len(sizes)) == (0, count, parts)
    assert set(sizes) <= {count // parts, -(-count // parts)}


@given(st.integers(0, 100), st.integers(1, 6), st.integers(1, 6))
def test_parts_of_parts_have_the_edges_of_all(count: int, parts: int, pieces: int) -> None:
    """So a finer split that is a multiple has the coarse edges among its own."""
    assert edges(count, parts * pieces)[::pieces] == edges(count, parts)


@pytest.mark.parametrize(("count", "parts"), [(-1, 2), (3, 0), (3, -1)])
def test_what_cannot_be_split_is_refused(count: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"{count} rows can't be split into {parts} parts"):
        edges(count, parts)


def test_parts_of_a_tensor_are_put_together_to_the_whole() -> None:
    whole = np.arange(30).reshape(5, 2, 3)
    for axis, parts in ((0, 2), (0, 7), (1, 3), (2, 2)):
        found = [whole[part_of(whole.shape, axis, parts, n)] for n in range(parts)]
        assert [p.shape for p in found] == [
            part_shape(whole.shape, axis, parts, n) for n in range(parts)
        ]
        np.testing.assert_array_equal(np.concatenate(found, axis), whole)
