"""Arrays that a model is given: what is refused, and what becomes of the rest."""

from typing import Any

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.nn.arrays import Rows, as_rows, checked_inputs, checked_rows, divided
from tandem.nn.losses import find_loss

SPARSE = find_loss("sparse_categorical_crossentropy")
CATEGORICAL = find_loss("categorical_crossentropy")
BINARY = find_loss("binary_crossentropy")
MSE = find_loss("mse")


def test_pictures_stay_bytes_and_numbers_become_float32() -> None:
    pictures = np.zeros((4, 8, 8), np.uint8)
    assert checked_inputs(pictures, (8, 8, 1)).dtype == np.uint8
    assert checked_inputs(pictures[..., np.newaxis], (8, 8, 1)).shape == (4, 8, 8)
    assert checked_inputs(np.zeros((4, 8, 8, 3), np.uint8), (8, 8, 3)).shape == (4, 8, 8, 3)
    for dtype in (np.float64, np.int32, bool):
        found = checked_inputs(np.ones((4, 8, 8, 1), dtype), (8, 8, 1))
        assert found.dtype == np.float32
        assert found.shape == (4, 8, 8, 1)


def test_bytes_that_are_no_square_pictures_are_numbers() -> None:
    assert checked_inputs(np.ones((2, 5), np.uint8), (5,)).dtype == np.float32
    assert checked_inputs(np.ones((2, 5, 4, 1), np.uint8), (5, 4, 1)).dtype == np.float32


def test_a_last_axis_of_one_may_be_left_out_or_added() -> None:
    assert checked_inputs(np.ones((2, 5, 4)), (5, 4, 1)).shape == (2, 5, 4, 1)
    assert checked_inputs(np.ones((2, 5, 1)), (5,)).shape == (2, 5)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "x: found None, expected an array of shape (n, 8, 8, 1)"),
        (np.ones((4, 9, 8, 1)), "x: found shape (4, 9, 8, 1), expected (n, 8, 8, 1)"),
        (np.ones((0, 8, 8, 1)), "x: found shape (0, 8, 8, 1), expected (n, 8, 8, 1)"),
        (np.float32(1), "x: found shape (), expected (n, 8, 8, 1)"),
        (np.zeros((4, 9, 9), np.uint8), "x: found shape (4, 9, 9), expected (n, 8, 8, 1)"),
        (np.zeros((4, 8, 8, 3), np.uint8), "x: found shape (4, 8, 8, 3), expected (n, 8, 8, 1)"),
        (np.full((4, 8, 8, 1), "a"), "x: found <U1, expected numbers"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        checked_inputs(x, (8, 8, 1))
    assert str(caught.value) == message


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (1e39, "1e+39")])
def test_inputs_that_are_not_finite_are_refused(value: float, shown: str) -> None:
    x = np.zeros((4, 3))
    x[2, 1] = value
    with pytest.raises(InputError, match="in row 2, expected finite numbers") as caught:
        checked_inputs(x, (3,))
    assert f"found {shown}" in str(caught.value)


@pytest.mark.parametrize(
    ("y", "loss", "message"),
    [
        (np.zeros(3, int), SPARSE, "y: found shape (3,), expected 4 rows, as x has"),
        (np.zeros(4), SPARSE, "y: found float64, expected whole numbers for Sparse"),
        (np.full(4, 5), SPARSE, "y: found labels from 5 to 5, expected 0 to 4"),
        (np.full(4, -1), SPARSE, "y: found labels from -1 to -1, expected 0 to 4"),
        (np.eye(5)[:4], SPARSE, "for one-hot rows take categorical_crossentropy"),
        (np.zeros(4, int), CATEGORICAL, "for labels take sparse_categorical_crossentropy"),
        (np.zeros((4, 3)), CATEGORICAL, "y: found shape (4, 3), expected (n, 5)"),
        (np.zeros((4, 3)), MSE, "y: found shape (4, 3), expected (n, 5), as the model's output"),
        (np.full((4, 5), np.nan), MSE, "y: found a number that is not finite in row 0"),
        (np.full((4, 5), 2), BINARY, "y: found numbers from 2 to 2, expected 0 to 1"),
        (np.full(4, "a"), SPARSE, "y: found <U1, expected numbers"),
    ],
)
def test_targets_that_do_not_fit_are_refused(y: Any, loss: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        checked_rows(np.ones((4, 3)), y, (3,), 5, loss)
    assert message in str(caught.value)


def test_one_hot_rows_become_labels_and_other_probabilities_stay() -> None:
    x, labels = np.ones((5, 3)), np.array([4, 0, 1, 3, 2])
    rows = checked_rows(x, np.eye(5)[labels], (3,), 5, CATEGORICAL)
    np.testing.assert_array_equal(rows.y, labels)
    assert rows.y.dtype == np.int64
    smooth = np.full((5, 5), 0.2)
    assert checked_rows(x, smooth, (3,), 5, CATEGORICAL).y.dtype == np.float32
    # Both splits have one form.
    both = as_rows([rows, checked_rows(x, smooth, (3,), 5, CATEGORICAL)], 5, (3,))
    np.testing.assert_array_equal(both[0].y, np.eye(5)[labels])


def test_numbers_for_each_row_become_rows_of_one() -> None:
    assert checked_rows(np.ones((4, 3)), np.arange(4) / 4, (3,), 1, MSE).y.shape == (4, 1)
    assert checked_rows(np.ones((4, 3)), [0, 1, 1, 0], (3,), 1, BINARY).y.shape == (4, 1)


def test_pictures_with_other_targets_than_labels_are_numbers() -> None:
    rows = checked_rows(np.ones((4, 8, 8), np.uint8), np.ones(4), (8, 8, 1), 1, MSE)
    assert rows.x.dtype == np.float32
    assert rows.x.shape == (4, 8, 8, 1)


def test_larger_pictures_are_cropped_only_as_pictures() -> None:
    larger = np.zeros((4, 9, 9), np.uint8)
    rows = checked_rows(larger, np.arange(4), (8, 8, 1), 4, SPARSE, may_crop=True)
    assert rows.are_pictures
    numbers = checked_rows(np.zeros((4, 8, 8, 1)), np.arange(4), (8, 8, 1), 4, SPARSE)
    with pytest.raises(InputError, match="pictures are cropped where all are uint8"):
        as_rows([rows, numbers], 4, (8, 8, 1))
    with pytest.raises(InputError, match="pictures are cropped where all are uint8"):
        checked_rows(larger, np.ones((4, 2)), (8, 8, 1), 2, MSE, may_crop=True)


def test_the_last_rows_are_for_validation() -> None:
    rows = Rows(np.arange(10.0)[:, np.newaxis], np.arange(10))
    train, validation = divided(rows, 0.25)
    assert train.y.tolist() == [*range(7)]  # as Keras: floor(10 * 0.75)
    assert validation.y.tolist() == [7, 8, 9]


@pytest.mark.parametrize("fraction", [1.0, -0.1, 1.5])
def test_a_split_is_a_fraction(fraction: float) -> None:
    rows = Rows(np.ones((10, 1)), np.arange(10))
    with pytest.raises(InputError, match="expected a fraction above 0 and below 1"):
        divided(rows, fraction)


def test_a_split_leaves_rows_on_either_side() -> None:
    with pytest.raises(InputError, match="expected at least one row for training"):
        divided(Rows(np.ones((2, 1)), np.arange(2)), 0.9)
