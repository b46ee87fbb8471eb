"""Synthetic pictures: of counted randomness, with classes that can be learned."""

import numpy as np
import pytest

from tandem import datasets
from tandem.errors import InputError
from tandem.philox import Purpose
from tests.support import slow_philox


def test_a_picture_does_not_depend_on_how_many_there_are() -> None:
    (x, y), (x_test, _) = datasets.load("synthetic", train=700, test=3, size=5, seed=4)
    (few, labels), _ = datasets.load("synthetic", train=3, test=0, size=5, seed=4)
    assert (x.shape, x.dtype, y.dtype) == ((700, 5, 5, 3), np.uint8, np.int64)
    assert (x[:3] == few).all()
    assert (y[:3] == labels).all()
    assert not (x_test == few).all()
    (other, _), _ = datasets.load("synthetic", train=3, size=5, seed=5)
    assert not (other == few).all()


def test_every_byte_is_that_of_its_counter() -> None:
    (x, y), (x_test, y_test) = datasets.load(
        "synthetic", train=2, test=2, size=3, channels=3, classes=7, seed=2**40 + 1
    )

    def byte(epoch: int, index: int, place: int) -> int:
        word = slow_philox.word(2**40 + 1, epoch, index, Purpose.SYNTHETIC, 1 + place // 4)
        return word >> 8 * (place % 4) & 255

    for epoch, (pictures, labels) in enumerate(((x, y), (x_test, y_test))):
        for index, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
            assert label == slow_philox.word(2**40 + 1, epoch, index, Purpose.SYNTHETIC, 0) % 7
            expected = [byte(2, label, i) // 2 + byte(epoch, index, i) // 2 for i in range(27)]
            assert picture.reshape(-1).tolist() == expected


def test_the_nearest_mean_tells_the_classes() -> None:
    (x, y), (x_test, y_test) = datasets.load("synthetic", size=8, channels=1, classes=4)
    assert x.shape == (1024, 8, 8)
    assert set(y) == set(range(4))
    means = np.stack([x[y == label].mean(axis=0) for label in range(4)])
    distances = ((x_test[:, None] - means) ** 2).sum(axis=(2, 3))
    assert (distances.argmin(axis=1) == y_test).mean() > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 0}, "found train 0, expected a whole number from 1"),
        ({"size": 2.0}, "found size 2.0, expected a whole number"),
        ({"channels": 2}, "found 2 channels, expected 1 or 3"),
        ({"seed": -1}, "found the seed -1"),
        ({"labels": "fine"}, "found the option labels, which cifar100 has, expected train, test"),
        ({"sizes": 3}, "found the option sizes, expected train"),
    ],
)
def test_numbers_that_make_no_pictures_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        datasets.load("synthetic", **options)
