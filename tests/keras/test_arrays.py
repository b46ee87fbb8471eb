"""What `fit` takes as rows: every kind, and every refusal."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.keras.arrays import (
    Form,
    Given,
    Layout,
    checked_rows,
    class_table,
    divided,
    gathered,
    in_order,
    weighted,
)
from tests.support.keras_models import keras

X, Y = np.arange(24, dtype=np.float32).reshape(6, 4), np.array([0, 1, 2, 0, 1, 2])


def layout(
    inputs: Any = ((4,),), outputs: Any = ((3,),), labels: Any = (True,), functions: Any = ()
) -> Layout:
    names = [
        tuple(f"{kind}{n}" for n in range(len(s))) for kind, s in (("x", inputs), ("y", outputs))
    ]
    found = frozenset(functions or {"sparse_categorical_crossentropy"})
    return Layout(names[0], inputs, names[1], outputs, labels, found)


class Pairs(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        rows = slice(2 * number, 2 * number + 2)
        return X[rows], Y[rows], np.ones(2)


def test_one_pass_of_batches_gives_the_rows() -> None:
    import torch

    tensors = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for data in (
        Pairs(),
        torch.utils.data.DataLoader(tensors, batch_size=2),
        ((X[n : n + 2], Y[n : n + 2]) for n in (0, 2, 4)),
    ):
        given, batch = gathered(data, None, None, 3)
        assert batch == 2
        np.testing.assert_array_equal(given.x, X)
        np.testing.assert_array_equal(given.y, Y)
    for reads_all, rows in ((False, 4), (True, 6)):  # of validation and of training
        given, _ = gathered(Pairs(), None, None, 2, reads_all=reads_all)
        assert (given.count, len(given.weights)) == (rows, rows)


def test_weights_may_have_an_axis_of_length_1_more() -> None:
    for of, y in ((layout(), Y), (layout(outputs=((1,),), labels=(False,)), X[:, :1])):
        (weights,) = checked_rows(Given(X, y, np.ones((6, 1))), of).weights
        assert weights.shape == (6,)


def test_tensors_lists_and_structures_are_arrays() -> None:
    import torch

    given, batch = gathered([torch.from_numpy(X), X], {"a": Y.tolist()}, None, None)
    assert batch == 0
    np.testing.assert_array_equal(given.x[0], X)
    np.testing.assert_array_equal(in_order(given.y, ["a"], "y")[0], Y)
    assert [len(part.x[1]) for part in divided(given, 0.5)] == [3, 3]
    assert in_order({"b": X, "a": Y}, ["u", "v"], "x")[0] is Y  # by Keras's order of keys


def test_none_in_weights_stands_for_ones_and_elsewhere_is_refused() -> None:
    of = layout(outputs=((3,), (4,)), labels=(True, False))
    w, y = np.arange(6) / 2, {"y0": Y, "y1": X}
    for weights in ([w, None], {"y0": w, "y1": None}):
        for batches in (False, True):
            given = (iter([(X, y, weights)]),) if batches else (X, y, weights)
            found, _ = gathered(*given, *[None] * (3 - len(given)), 1)
            rows = checked_rows(found, of)
            assert [each.tolist() for each in rows.weights] == [w.tolist(), [1.0] * 6]
    for x, y, name in (([X, None], Y, "x"), (X, {"a": Y, "b": None}, "y")):
        with pytest.raises(InputError, match=f"{name}: found None among arrays, expected an arr"):
            gathered(x, y, None, None)


def test_class_weights_become_those_of_rows() -> None:
    for y in (Y, np.eye(3)[Y], Y[:, np.newaxis], Y * 0.9):  # which Keras rounds
        found = weighted(Given(X, y), {0: 2.0, 2: 0.5})
        assert found.weights.tolist() == [2.0, 1.0, 0.5] * 2
    with pytest.raises(InputError, match="found it with sample_weight"):
        weighted(Given(X, Y, Y), {0: 2.0})
    assert class_table({"0": 2, 2: 0.5}, 3) == (2.0, 1.0, 0.5)  # keys may come from JSON
    for wrong in ([1, 2], {"a": 2}, {0: None}):
        with pytest.raises(InputError, match=r"class_weight: found .*, expected weights by class"):
            class_table(wrong, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (None, Y, "x: found None, expected arrays or batches"),
        (X, Y[:5], r"y: found shape \(5,\), expected 6 rows, as x has"),
        ([[1], [1, 2]], Y, "x: found no array"),
        (np.array(["a"]), Y, "expected numbers"),
        (X[:0], Y, r"x: found shape \(0, 4\), expected at least one row"),
        (iter([]), None, "found list_iterator, which may never end, expected steps_per_epoch"),
        (Pairs(), Y, "found Pairs and y, expected its batches alone"),
        (iter([(None, Y)]), None, "x: found None among arrays"),
        (iter([(X, Y), (X[:, 1:], Y)]), None, "found batches whose rows differ .*: pad them"),
    ],
)
def test_what_holds_no_rows_is_refused(x: Any, y: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gathered(x, y, None, None if y is not None or message.startswith("found list") else 2)


@pytest.mark.parametrize(
    ("given", "of", "message"),
    [
        (Given(X[:, :3], Y), layout(), r"x: found shape \(6, 3\), expected \(n, 4\)"),
        (Given([X, X], Y), layout(), "x: found 2 arrays, expected 1: x0"),
        (
            Given(np.full_like(X, np.inf), Y),
            layout(),
            "found inf in row 0, expected finite",
        ),
        (Given(X.astype(int) * 10**8, Y), layout(), "expected whole numbers up to 16777216"),
        (Given(X.astype(int) - 10**8, Y), layout(), "x: found -10000000., expected whole numbers"),
        (Given(X), layout(), "y: found None, expected targets"),
        (Given(X, Y + 1), layout(), "y: found labels from 1 to 3, expected 0 to 2"),
        (Given(X, Y - 1), replace(layout(), ignored=(2,)), "found labels from -1 to 1, expected 0"),
        (Given(X, Y + 0.5), layout(), "found numbers with fractions, expected whole labels"),
        (Given(X, np.eye(3)[Y]), layout(), "for one-hot rows take categorical_crossentropy"),
        (Given(X, Y), layout(labels=(False,)), r"found shape \(6,\), expected \(n, 3\)"),
        (Given(X, Y, X), layout(), r"sample_weight: found shape \(6, 4\), expected a weight"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(given: Given, of: Layout, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked_rows(given, of)


def test_labels_that_a_loss_ignores_are_kept() -> None:
    of = replace(layout(), ignored=(-1,))
    rows = checked_rows(Given(X, Y - 1), replace(of, output_shapes=((2,),)))
    form = Form.of([rows], of)
    assert not form.has_classes
    assert form.packed(rows)[1].ravel().tolist() == (Y - 1).tolist()


def test_rows_are_packed_behind_each_other() -> None:
    of = layout(((4,), (2, 1)), ((3,), (2, 2)), (True, False))
    rows = checked_rows(Given([X, X[:, :2]], [Y * 1.0, X.reshape(6, 2, 2)], Y), of)
    form = Form.of([rows, rows], of)
    assert (form.has_classes, form.weights, form.classes) == (False, ((),), 6)
    x, y = form.packed(rows)
    np.testing.assert_array_equal(x, np.hstack([X, X[:, :2]]))
    np.testing.assert_array_equal(y, np.hstack([Y[:, np.newaxis], X, Y[:, np.newaxis]]))


def test_classes_and_pictures_are_stored_as_such() -> None:
    pictures = np.zeros((6, 8, 8, 1), np.uint8)
    of = layout(((8, 8, 1),), functions=["categorical_crossentropy"], labels=(False,))
    for images in (pictures, pictures[..., 0]):
        rows = checked_rows(Given(images, np.eye(3)[Y]), of)
        form = Form.of([rows], of)
        assert form.are_pictures
        assert form.packed(rows)[1].tolist() == Y.tolist()
    soft = checked_rows(Given(pictures, np.full((6, 3), 1 / 3)), of)
    form = Form.of([rows, soft], of)  # as soon as one split is not of classes
    assert not form.are_pictures
    assert form.packed(rows)[0].dtype == np.uint8
    weighed = checked_rows(Given(images, np.eye(3)[Y], Y), of)
    assert Form.of([weighed], of).packed(weighed)[0].dtype == np.uint8
    other = checked_rows(Given(np.zeros((6, 9, 9, 1), np.uint8), Y), layout(((None, None, 1),)))
    with pytest.raises(InputError, match="validation_data: found rows of shape"):
        Form.of([rows, other], of)
