"""Crop windows and mirror flags: their range, their distribution, and what they depend on."""

from dataclasses import replace

import numpy as np
import pytest

from tandem.data.augment import Augmentation
from tandem.philox import Purpose, words

PLAIN = Augmentation(
    crop_size=227, rand_crop=True, rand_mirror=True, batch_crop_mirror=False, seed=1
)
INDICES = np.arange(20_000)


def test_origins_are_uniform_over_every_position() -> None:
    origins = PLAIN.origins(256, True, 0, 0, INDICES)
    for axis in range(2):
        counts = np.bincount(origins[:, axis], minlength=30)
        assert len(counts) == 30
        assert np.abs(counts - 20_000 / 30).max() < 6 * np.sqrt(20_000 / 30)


def test_origins_scale_the_word_by_hand() -> None:
    drawn = words(1, 5, np.array([7]), Purpose.CROP, 2)[0].tolist()
    expected = [int(word * 30 / 2**32) for word in drawn]
    assert PLAIN.origins(256, True, 5, 0, np.array([7]))[0].tolist() == expected


def test_half_are_mirrored() -> None:
    assert abs(PLAIN.mirrored(True, 0, 0, INDICES).mean() - 0.5) < 0.02


@pytest.mark.parametrize(("image_size", "centre"), [(256, 14), (227, 0), (76 + 160, 4)])
def test_validation_takes_the_centre_unmirrored(image_size: int, centre: int) -> None:
    assert (PLAIN.origins(image_size, False, 3, 4, INDICES) == centre).all()
    assert not PLAIN.mirrored(False, 3, 4, INDICES).any()


def test_switches_turn_chance_off() -> None:
    off = replace(PLAIN, rand_crop=False, rand_mirror=False)
    assert (off.origins(256, True, 0, 0, INDICES) == 14).all()
    assert not off.mirrored(True, 0, 0, INDICES).any()


def test_a_picture_has_its_own_choice_whatever_the_minibatch() -> None:
    one = PLAIN.origins(256, True, 2, 0, INDICES)
    np.testing.assert_array_equal(PLAIN.origins(256, True, 2, 9, INDICES[::-1])[::-1], one)
    assert (PLAIN.origins(256, True, 3, 0, INDICES) != one).any()


def test_batch_crop_mirror_gives_a_global_minibatch_one_choice() -> None:
    whole = replace(PLAIN, batch_crop_mirror=True)
    origins = [whole.origins(256, True, 0, k, INDICES[:8]) for k in range(50)]
    assert all((batch == batch[0]).all() for batch in origins)
    assert len({tuple(batch[0]) for batch in origins}) > 30
    flags = [whole.mirrored(True, 0, k, INDICES[:8]) for k in range(50)]
    assert all((batch == batch[0]).all() for batch in flags)
    assert 10 < sum(int(batch[0]) for batch in flags) < 40
    other = whole.origins(256, True, 0, 7, INDICES[100:103])
    np.testing.assert_array_equal(other, origins[7][:3])
