"""The order of an epoch and its division over trainers."""

import numpy as np
import pytest

from tandem.data.order import epoch_order, global_minibatch, minibatch_count, trainer_rows
from tandem.philox import Purpose, words

COUNTS = (4, 4, 4, 1)
SHUFFLES = ["none", "files", "images"]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_each_picture_comes_exactly_once_an_epoch(shuffle: str, trainers: int) -> None:
    batch = 2
    size = batch * trainers
    order = epoch_order(COUNTS, shuffle, seed=5, epoch=2)
    seen: list[int] = []
    for k in range(minibatch_count(13, size)):
        minibatch = global_minibatch(order, k, size)
        rows = [trainer_rows(minibatch, r, batch) for r in range(trainers)]
        assert all(len(part) <= batch for part in rows)
        assert np.concatenate(rows).tolist() == minibatch.tolist()
        seen += minibatch.tolist()
    assert sorted(seen) == list(range(13))


def test_none_keeps_the_order() -> None:
    assert epoch_order(COUNTS, "none", 1, 1).tolist() == list(range(13))


def test_files_keeps_pictures_of_a_file_together_and_in_order() -> None:
    order = epoch_order((3,) * 50, "files", 1, 0).reshape(50, 3)
    assert (np.diff(order, axis=1) == 1).all()
    assert (order[:, 0] % 3 == 0).all()
    assert (np.diff(order[:, 0]) < 0).any()


@pytest.mark.parametrize("shuffle", ["files", "images"])
def test_order_depends_on_seed_and_epoch_alone(shuffle: str) -> None:
    counts = (1,) * 100
    first = epoch_order(counts, shuffle, 1, 0).tolist()
    assert epoch_order(counts, shuffle, 1, 0).tolist() == first
    assert epoch_order(counts, shuffle, 1, 1).tolist() != first
    assert epoch_order(counts, shuffle, 2, 0).tolist() != first


def test_images_sorts_by_counted_keys() -> None:
    keys = [tuple(pair) for pair in words(3, 4, np.arange(40), Purpose.ORDER, 2).tolist()]
    expected = sorted(range(40), key=keys.__getitem__)
    assert epoch_order((40,), "images", 3, 4).tolist() == expected


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        epoch_order(COUNTS, "sometimes", 1, 1)
