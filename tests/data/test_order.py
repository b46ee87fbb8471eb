"""The order of an epoch and its division over trainers."""

import numpy as np
import pytest

from tandem.data.order import epoch_order, global_minibatch, minibatch_count, trainer_shares
from tandem.philox import Purpose, words

COUNTS = (4, 4, 4, 1)
SHUFFLES = ["none", "files", "images"]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_each_picture_comes_exactly_once_an_epoch(shuffle, trainers: int) -> None:
    batch = 2
    size = batch * trainers
    order = epoch_order(COUNTS, shuffle, seed=5, epoch=2)
    seen: list[int] = []
    for k in range(minibatch_count(13, size)):
        minibatch = global_minibatch(order, k, size)
        rows = [minibatch[own] for own in trainer_shares(size, trainers, batch)]
        assert all(len(part) <= batch for part in rows)
        assert np.concatenate(rows).tolist() == minibatch.tolist()
        seen += minibatch.tolist()
    assert sorted(seen) == list(range(13))
    assert seen == order.tolist()


@pytest.mark.parametrize(
    ("pictures", "batch", "count"),
    [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (1281167, 256, 5005)],
)
def test_a_short_last_minibatch_is_counted(pictures: int, batch: int, count: int) -> None:
    assert minibatch_count(pictures, batch) == count


@pytest.mark.parametrize("k", [-1, 4])
def test_a_minibatch_that_is_not_there_is_refused(k: int) -> None:
    with pytest.raises(IndexError, match=f"minibatch {k} of an epoch of 4"):
        global_minibatch(np.arange(13), k, 4)


def test_none_keeps_the_order() -> None:
    assert epoch_order(COUNTS, "none", 1, 1).tolist() == list(range(13))


def test_files_sorts_the_files_by_their_keys_and_keeps_what_is_in_them() -> None:
    counts = [3, 1, 5, 2, 4, 3, 3]
    keys = [tuple(pair) for pair in words(9, 2, np.arange(7), Purpose.ORDER, 2).tolist()]
    expected: list[int] = []
    for file in sorted(range(7), key=keys.__getitem__):
        first = sum(counts[:file])
        expected += range(first, first + counts[file])
    assert expected != sorted(expected)
    assert epoch_order(counts, "files", 9, 2).tolist() == expected


@pytest.mark.parametrize("shuffle", ["files", "images"])
def test_order_depends_on_seed_and_epoch_alone(shuffle) -> None:
    counts = (1,) * 100
    first = epoch_order(counts, shuffle, 1, 0).tolist()
    assert epoch_order(counts, shuffle, 1, 0).tolist() == first
    assert epoch_order(counts, shuffle, 1, 1).tolist() != first
    assert epoch_order(counts, shuffle, 2, 0).tolist() != first


@pytest.mark.parametrize("chunk", [1, 7, 40, 1 << 14])
def test_images_sorts_by_counted_keys(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.philox._CHUNK", chunk)
    keys = [tuple(pair) for pair in words(3, 4, np.arange(40), Purpose.ORDER, 2).tolist()]
    expected = sorted(range(40), key=keys.__getitem__)
    assert epoch_order((25, 15), "images", 3, 4).tolist() == expected


def test_equal_keys_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(seed: int, epoch: int, indices: np.ndarray, purpose: int, count: int) -> np.ndarray:
        return np.stack([indices % 2, np.zeros_like(indices)], axis=1)

    monkeypatch.setattr("tandem.philox.words", coarse)
    expected = [*range(0, 1000, 2), *range(1, 1000, 2)]
    assert epoch_order((1000,), "images", 0, 0).tolist() == expected


def test_images_puts_every_picture_anywhere() -> None:
    places = np.zeros((8, 8))
    for epoch in range(1000):
        places[np.arange(8), epoch_order((5, 3), "images", 1, epoch)] += 1
    assert np.abs(places - 125).max() < 5 * np.sqrt(125)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="'sometimes'; it can be one of none, files, images"):
        epoch_order(COUNTS, "sometimes", 1, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "trainers", "group", "counts"),
    [
        (128, 3, 32, [64, 32, 32]),
        (100, 3, 1, [34, 33, 33]),
        (100, 2, 25, [50, 50]),
        (20, 3, 20, [20, 0, 0]),
    ],
)
def test_trainers_own_whole_groups(
    batch: int, trainers: int, group: int, counts: list[int]
) -> None:
    shares = trainer_shares(batch, trainers, group)
    assert [own.stop - own.start for own in shares] == counts
    assert [own.start for own in shares] == [0, *(own.stop for own in shares[:-1])]
