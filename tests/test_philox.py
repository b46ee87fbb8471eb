import itertools
import math

import numpy as np
import pytest
import torch

from tandem.philox import Purpose, normals, permutation, philox4x32, words
from tests.support import slow_philox

# Random123's known answers for philox4x32 with ten rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, 2**32, 2**63 - 1, -1, -(2**63)]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_on_arrays_on_tensors_and_of_the_oracle(counter, key, expected):
    seed = int(np.uint64(key[0] | key[1] << 32).astype(np.int64))
    found = philox4x32(tuple(np.array([c], np.int64) for c in counter), seed)
    assert tuple(int(f[0]) for f in found) == expected
    tensors = tuple(torch.tensor([c], dtype=torch.int64) for c in counter)
    found = philox4x32(tensors, torch.tensor(seed, dtype=torch.int64))
    assert tuple(int(f[0]) for f in found) == expected
    assert tuple(slow_philox.philox_block(list(counter), list(key))) == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 13])
def test_words_are_what_the_oracle_gives_one_by_one(seed, count):
    indices = np.array([0, 1, 7, 1_281_166, 2**32 - 1])
    for epoch, purpose in [(0, Purpose.ORDER), (2**32 - 1, Purpose.DROPOUT + 1)]:
        found = words(seed, epoch, indices, purpose, count)
        assert found.shape == (len(indices), count)
        assert found.dtype == np.int64
        for (i, j), value in np.ndenumerate(found):
            assert value == slow_philox.word(seed, epoch, int(indices[i]), purpose, j)


@pytest.mark.parametrize("seed", SEEDS)
def test_arrays_and_tensors_give_the_same_bits(seed):
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (4, 1000), dtype=np.int64)
    of_arrays = philox4x32(tuple(counter), seed)
    of_tensors = philox4x32(tuple(torch.from_numpy(counter)), torch.tensor(seed, dtype=torch.int64))
    np.testing.assert_array_equal(np.stack(of_arrays), torch.stack(of_tensors).numpy())


@pytest.mark.parametrize("purpose", [Purpose.ORDER, Purpose.LISTING])
@pytest.mark.parametrize(("count", "seed"), [(0, 1), (1, 1), (2, 5), (100, 1), (100, 2**40)])
def test_a_permutation_sorts_by_counted_keys(count, seed, purpose):
    keys = [[slow_philox.word(seed, 3, i, purpose, j) for j in (0, 1)] for i in range(count)]
    found = permutation(count, seed, 3, purpose)
    assert found.tolist() == sorted(range(count), key=keys.__getitem__)
    assert found.dtype == np.int64
    assert found.shape == (count,)


def test_no_two_keys_give_the_same_word():
    """Of 64-bit values, for among so many 32-bit words some are equal by chance."""
    indices = np.array([0, 1, 2, 255, 256, 65536, 2**32 - 1])
    purposes = [*Purpose, Purpose.DROPOUT + 1]
    values = []
    for seed, epoch, purpose in itertools.product([0, 1, 2**32], [0, 1, 2, 256], purposes):
        four = words(seed, epoch, indices, purpose, 8)
        values.append(four[:, 0::2] << 32 | four[:, 1::2])
    values = np.concatenate(values)
    assert len(np.unique(values)) == values.size


def test_words_are_uniform():
    """Mean, bits and a histogram of 400,000 words, each within five standard deviations."""
    found = words(11, 2, np.arange(4000), Purpose.DROPOUT, 100).ravel()
    n = found.size
    assert found.min() >= 0
    assert found.max() < 2**32
    assert abs(found.mean() / 2**32 - 0.5) < 5 * np.sqrt(1 / 12 / n)
    for bit in range(32):
        assert abs((found >> bit & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(n)
    counts = np.bincount(found >> 24, minlength=256)
    expected = n / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("axis", ["unit", "index", "epoch", "seed"])
def test_neighbouring_keys_are_not_correlated(axis):
    n = 20_000
    if axis == "unit":
        a, b = words(1, 0, np.arange(n), Purpose.CROP, 2).T
    elif axis == "index":
        a, b = words(1, 0, np.arange(2 * n), Purpose.CROP, 1).reshape(n, 2).T
    else:
        other = {"epoch": (1, 1), "seed": (2, 0)}[axis]
        a = words(1, 0, np.arange(n), Purpose.CROP, 1)[:, 0]
        b = words(*other, np.arange(n), Purpose.CROP, 1)[:, 0]
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_normal_numbers_by_hand(count):
    indices = np.array([0, 5, 2**32 - 1])
    found = normals(9, 3, indices, Purpose.COLOUR, count)
    assert found.shape == (3, count)
    for i, index in enumerate(indices.tolist()):
        u, v, w, x = (slow_philox.word(9, 3, index, Purpose.COLOUR, j) for j in range(4))
        first = math.sqrt(-2 * math.log((u + 1) / 2**32)), 2 * math.pi * v / 2**32
        second = math.sqrt(-2 * math.log((w + 1) / 2**32)), 2 * math.pi * x / 2**32
        expected = [
            first[0] * math.cos(first[1]),
            first[0] * math.sin(first[1]),
            second[0] * math.cos(second[1]),
        ]
        np.testing.assert_allclose(found[i], expected[:count], rtol=1e-12, atol=1e-12)


def test_normal_numbers_are_normal():
    assert normals(1, 0, np.arange(0), Purpose.COLOUR, 3).shape == (0, 3)
    drawn = normals(1, 0, np.arange(40_000), Purpose.COLOUR, 3)
    assert np.abs(drawn.mean(axis=0)).max() < 0.02
    np.testing.assert_allclose(np.cov(drawn.T), np.eye(3), atol=0.03)
    shares = [(np.abs(drawn) < limit).mean() for limit in (0.5, 1, 2, 3)]
    np.testing.assert_allclose(shares, [0.3829, 0.6827, 0.9545, 0.9973], atol=0.005)
