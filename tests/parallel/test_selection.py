"""What `batch` and `batch_s` select, against NumPy's indexing."""

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.parallel.selection import Selection, select, select_local, select_many
from tandem.split import edges

WORKERS = st.integers(1, 4)


def rows(length: int) -> np.ndarray:
    """Numbered rows: int64 (length, 2)."""
    return np.stack([np.arange(length), 100 + np.arange(length)], axis=1)


def picked(selection: Selection, array: np.ndarray) -> np.ndarray:
    return selection.take(array, 0, selection.count)


@st.composite
def batches(draw: st.DrawFn, length: int) -> Any:
    """A batch of any kind that fits the length."""
    kind = draw(st.sampled_from(["all", "first", "slice", "list", "array", "bools"]))
    if kind == "all":
        return None
    if kind == "first":
        return draw(st.sampled_from([int, np.int32, np.uint8]))(draw(st.integers(0, length)))
    if kind == "slice":
        step = draw(st.sampled_from([None, 1, 2, 3, -1, -2, -5]))
        is_down = step is not None and step < 0
        highest = max(length - 1, 0) if is_down else length
        ends = st.none() | st.integers(-length, length)
        return slice(draw(st.none() | st.integers(-length, highest)), draw(ends), step)
    if kind == "bools":
        bools = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        return draw(st.sampled_from([list, np.array]))(bools) if length else np.zeros(0, bool)
    indices = st.lists(st.integers(-length, length - 1), max_size=12) if length else st.just([])
    if kind == "list":
        return draw(st.sampled_from([list, tuple]))(draw(indices))
    dtype = draw(st.sampled_from(["int64", "int8", "int32", ">i8", "uint8"]))
    return np.array(
        [
            abs(i) if dtype == "uint8" and i != -length else i if dtype != "uint8" else 0
            for i in draw(indices)
        ],
        dtype,
    )


def expected_of(array: np.ndarray, batch: Any) -> np.ndarray:
    if batch is None:
        return array
    if isinstance(batch, int | np.integer):
        return array[:batch]
    if isinstance(batch, list | tuple) and not batch:
        return array[:0]
    return array[batch if isinstance(batch, slice) else np.asarray(batch)]


@given(st.data(), WORKERS)
def test_parts_are_the_rows_that_numpy_selects(data: st.DataObject, workers: int) -> None:
    length = data.draw(st.integers(0, 3 * workers + 1))
    batch, array = data.draw(batches(length)), rows(length)
    selection, expected = select(length, batch), expected_of(array, batch)
    assert selection.count == len(expected)
    cut = edges(selection.count, workers)
    for lo, hi in pairwise(cut):
        np.testing.assert_array_equal(array[selection.part(lo, hi)], expected[lo:hi])
        np.testing.assert_array_equal(selection.take(array, lo, hi), expected[lo:hi])
        for source in (array, np.asfortranarray(array)):
            out = np.full((hi - lo, 2), -1)
            assert selection.take(source, lo, hi, out) is out
            np.testing.assert_array_equal(out, expected[lo:hi])


def test_a_slice_down_to_the_first_row_has_no_stop() -> None:
    selection = select(5, slice(None, None, -2))
    assert (selection.part(0, 3), selection.part(0, 2)) == (slice(4, None, -2), slice(4, 1, -2))
    assert picked(selection, np.arange(5)).tolist() == [4, 2, 0]


def test_rows_of_slices_are_views_and_indices_are_not_copied() -> None:
    array, indices = rows(9), np.array([3, 1, 8])
    assert np.shares_memory(select(9, slice(1, 8, 3)).take(array, 1, 3), array)
    assert select(9, indices).indices is indices
    part = select(9, indices).part(1, 3)
    assert isinstance(part, np.ndarray)
    assert np.shares_memory(part, indices)


def test_a_few_rows_of_a_large_array_of_any_order_take_little_memory() -> None:
    array, indices, out = np.zeros((1000, 1000)).T, np.array([5, 3]), np.ones((2, 1000))
    tracemalloc.start()
    try:
        select(1000, indices).take(array, 0, 2, out)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert not out.any()


def test_negative_indices_leave_the_callers_array_as_it_was() -> None:
    indices = np.array([-1, 0, -4])
    assert picked(select(4, indices), np.arange(4)).tolist() == [3, 0, 0]
    assert indices.tolist() == [-1, 0, -4]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (5, "the first 5 rows are selected, of 4"),
        (np.int64(-1), "the first -1 rows are selected, of 4"),
        ([0, 4], "index 4 is selected, of 4 rows"),
        ((0, -5), "index -5 is selected, of 4 rows"),
        (np.array([0, 200], "uint8"), "index 200 is selected, of 4 rows"),
        (np.array([0, 2**64 - 1], "uint64"), f"index {2**64 - 1} is selected, of 4 rows"),
        ([True, False], "there are 2 booleans, for 4 rows"),
        (np.ones(5, bool), "there are 5 booleans, for 4 rows"),
        (slice(5, None), "the slice 5: reaches beyond the 4 rows"),
        (slice(0, 5, 2), "the slice 0:5:2 reaches beyond the 4 rows; end it at 4"),
        (slice(-5, 2), "the slice -5:2 reaches beyond the 4 rows"),
        (slice(None, -5), "the slice :-5 reaches beyond the 4 rows"),
        (slice(-1, -6, -2), "the slice -1:-6:-2 reaches beyond the 4 rows"),
        (slice(4, None, -1), "the slice 4::-1 reaches beyond the 4 rows"),
    ],
)
def test_rows_that_do_not_exist_are_refused(batch: Any, message: str) -> None:
    for refused in (
        lambda: select(4, batch),
        lambda: select_many([4], batch),
        lambda: select_local([4], batch),
    ):
        with pytest.raises(IndexError, match=message + "$"):
            refused()


def test_the_end_of_the_rows_may_be_named() -> None:
    assert select(4, slice(4, None)).count == select(0, slice(0, 0)).count == 0
    assert select(4, slice(-4, 4)).count == 4
    assert select(0, slice(0, None, -1)).count == 0
    assert select(4, slice(-1, -5, -1)).count == 4  # before the first row


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        (True, TypeError, "not by bool True"),
        (np.True_, TypeError, "not by bool"),
        (2.0, TypeError, "not by float 2.0"),
        (np.float32(2), TypeError, "not by float32"),
        ("all", TypeError, "not by str 'all'"),
        ({1, 2}, TypeError, "not by set"),
        ([1.0, 2.0], TypeError, "integers or booleans, not by float64"),
        (np.zeros(0), TypeError, "integers or booleans, not by float64"),
        (np.array(["a"]), TypeError, "integers or booleans"),
        (np.ones((2, 2), int), ValueError, "of 1 dimension, not of 2"),
        (np.array(3), ValueError, "of 1 dimension, not of 0"),
        (slice(None, None, 0), ValueError, "step cannot be zero"),
        (slice("a"), TypeError, "slice indices must be integers"),
    ],
)
def test_what_selects_no_rows_is_refused(batch: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        select(4, batch)


def test_ragged_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="one list of integers, not by nested lists"):
        select(4, [[1], [2, 3]])


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (0, 4), (3, 2)])
def test_a_part_lies_within_the_selection(lo: int, hi: int) -> None:
    with pytest.raises(IndexError, match=f"3 rows has no part {lo}:{hi}"):
        select(9, [1, 2, 3]).part(lo, hi)


class TestSeveralInputs:
    def test_without_a_batch_lengths_are_equal(self) -> None:
        assert select_many([7, 7, 7]).count == 7
        assert select_many([7, 7], minibatch=[True, False]).count == 7
        for minibatch in ((), [False, True]):
            with pytest.raises(ValueError, match="length: x has 7, input 1 has 8"):
                select_many([7, 8], minibatch=minibatch, names=["x", "input 1"])

    @pytest.mark.parametrize(
        "batch", [5, slice(2, 6), slice(6, 2, -1), [4, 0, 4], np.array([6, 0]), range(3)]
    )
    def test_a_batch_selects_the_same_rows_of_longer_inputs(self, batch: Any) -> None:
        selection = select_many([9, 7], batch)
        assert picked(selection, np.arange(9)).tolist() == (
            picked(select(7, batch), np.arange(7)).tolist()
        )

    @pytest.mark.parametrize("batch", [slice(2, None), slice(-3, -1), [0, -1], slice(None)])
    def test_rows_counted_from_the_end_need_equal_lengths(self, batch: Any) -> None:
        assert select_many([7, 7], batch).count == select(7, batch).count
        with pytest.raises(ValueError, match="different rows of them: input 0 has 9, input 1 has"):
            select_many([9, 7], batch)

    @pytest.mark.parametrize("batch", [8, slice(2, 8), [7]])
    def test_a_batch_fits_the_shortest_input(self, batch: Any) -> None:
        for lengths in ([9, 7], [7, 9]):
            with pytest.raises(IndexError, match=r"^batch: .* 7"):
                select_many(lengths, batch)

    @pytest.mark.parametrize("batch", [3, slice(20, 23), [40, 1, 7], np.arange(99) < 3])
    def test_a_minibatch_holds_the_selected_rows(self, batch: Any) -> None:
        for length in (3, 50):
            assert select_many([99, length], batch, [False, True]).count == 3
        with pytest.raises(ValueError, match=r"batch has 3 rows.* fewer: x has 99, y has 2"):
            select_many([99, 2], batch, [False, True], ["x", "y"])

    @pytest.mark.parametrize("batch", [3, np.int8(3), [40, 1, 7], np.arange(99) < 3])
    def test_of_minibatches_alone_a_batch_gives_the_number_of_rows(self, batch: Any) -> None:
        selection = select_many([3, 5], batch, [True, True])
        assert selection.part(0, 3) == slice(0, 3, 1)
        with pytest.raises(ValueError, match="batch has 3 rows, and a minibatch has fewer"):
            select_many([3, 2], batch, [True, True])

    def test_of_minibatches_alone_a_batch_without_a_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match="pass their number"):
            select_many([3, 3], slice(20, 23), [True, True])
        with pytest.raises(IndexError, match="the first -1 rows"):
            select_many([3], -1, [True])
        with pytest.raises(TypeError, match="not by bool True"):
            select_many([3], True, [True])


class TestEachWorker:
    @given(st.data(), WORKERS)
    def test_one_batch_for_each_worker(self, data: st.DataObject, workers: int) -> None:
        lengths = data.draw(st.lists(st.integers(0, 7), min_size=workers, max_size=workers))
        per_worker = [
            data.draw(batches(n).filter(lambda b: isinstance(b, slice | list | tuple | np.ndarray)))
            for n in lengths
        ]
        for kind in (list, tuple):
            for n, batch, found in zip(
                lengths, per_worker, select_local(lengths, kind(per_worker)), strict=True
            ):
                np.testing.assert_array_equal(picked(found, rows(n)), expected_of(rows(n), batch))

    @pytest.mark.parametrize("batch", [None, 3, slice(1, 3), slice(-2, 3), [2, 0], np.array([1])])
    def test_one_batch_for_all_workers(self, batch: Any) -> None:
        for n, found in zip([4, 3], select_local([4, 3], batch), strict=True):
            np.testing.assert_array_equal(picked(found, rows(n)), expected_of(rows(n), batch))

    def test_as_many_integers_as_workers_are_one_list(self) -> None:
        for found in select_local([4, 3], [2, 0]):
            assert found.part(0, 2).tolist() == [2, 0]  # type: ignore[union-attr]

    @pytest.mark.parametrize("batch", [[slice(1)], [[1], [2], [0]], (np.arange(2),)])
    def test_each_worker_needs_one(self, batch: Any) -> None:
        with pytest.raises(ValueError, match=rf"batch_s has {len(batch)} members, for 2 workers"):
            select_local([4, 3], batch)

    @pytest.mark.parametrize("batch", [4, slice(0, 4), [3], [[3], [3]], (slice(4), slice(4))])
    def test_rows_that_a_worker_does_not_have_are_refused(self, batch: Any) -> None:
        with pytest.raises(IndexError, match=r"^batch_s of worker 1: .* 3"):
            select_local([4, 3], batch)

    def test_a_member_of_another_kind_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"batch_s of worker 1: .* not by str"):
            select_local([4, 3], [[1], "x"])  # type: ignore[list-item]
