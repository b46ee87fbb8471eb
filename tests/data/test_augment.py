"""Crop windows and mirror flags: their range, their distribution, and what they depend on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.data.augment import Augmentation, colour_offsets, ten_crops, windows
from tandem.philox import Purpose, normals, words

PLAIN = Augmentation(
    crop_size=227, rand_crop=True, rand_mirror=True, batch_crop_mirror=False, seed=1
)
WHOLE_BATCH = replace(PLAIN, batch_crop_mirror=True)
INDICES = np.arange(20_000)


def crop_origins(*about: Any) -> np.ndarray:
    return windows(*about)[0]


def mirror_flags(*about: Any) -> np.ndarray:
    return windows(*about)[1]


def test_origins_are_uniform_over_every_position() -> None:
    origins = crop_origins(PLAIN, 256, "train", 0, 0, INDICES)
    for axis in range(2):
        counts = np.bincount(origins[:, axis], minlength=30)
        assert len(counts) == 30
        assert np.abs(counts - 20_000 / 30).max() < 6 * np.sqrt(20_000 / 30)
    assert abs(np.corrcoef(origins.T)[0, 1]) < 0.03


@pytest.mark.parametrize("settings", [PLAIN, WHOLE_BATCH])
def test_windows_follow_from_counted_words_by_hand(settings: Augmentation) -> None:
    """The format of all runs: another word, and a run that goes on sees other pictures."""
    keys, crop, mirror = INDICES[:50] + 2**31, Purpose.CROP, Purpose.MIRROR
    if settings.batch_crop_mirror:
        keys, crop, mirror = np.full(50, 6), Purpose.BATCH_CROP, Purpose.BATCH_MIRROR
    origins, flags = windows(settings, 256, "train", 5, 6, INDICES[:50] + 2**31)
    drawn = words(1, 5, keys, crop, 2).tolist()
    assert origins.tolist() == [[word * 30 // 2**32 for word in pair] for pair in drawn]
    coin = words(1, 5, keys, mirror, 1)[:, 0].tolist()
    assert flags.tolist() == [word // 2**31 for word in coin]


def test_half_are_mirrored_whatever_their_crop() -> None:
    flags = mirror_flags(PLAIN, 256, "train", 0, 0, INDICES)
    assert flags.dtype == np.uint8
    assert set(flags.tolist()) == {0, 1}
    assert abs(flags.mean() - 0.5) < 0.02
    rows = crop_origins(PLAIN, 256, "train", 0, 0, INDICES)[:, 0]
    assert abs(np.corrcoef(rows, flags)[0, 1]) < 0.03


@pytest.mark.parametrize(("image_size", "centre"), [(256, 14), (227, 0), (236, 4)])
@pytest.mark.parametrize("settings", [PLAIN, WHOLE_BATCH])
def test_validation_takes_the_centre_unmirrored(
    settings: Augmentation, image_size: int, centre: int
) -> None:
    origins = crop_origins(settings, image_size, "validation", 3, 4, INDICES[:5])
    assert origins.tolist() == [[centre, centre]] * 5
    assert mirror_flags(settings, image_size, "validation", 3, 4, INDICES).sum() == 0


def test_switches_turn_chance_off() -> None:
    origins, flags = windows(PLAIN, 256, "train", 0, 0, INDICES)
    for crop, mirror in ((False, False), (False, True), (True, False)):
        settings = replace(PLAIN, rand_crop=crop, rand_mirror=mirror)
        found = windows(settings, 256, "train", 0, 0, INDICES)
        np.testing.assert_array_equal(found[0], origins if crop else np.full_like(origins, 14))
        np.testing.assert_array_equal(found[1], flags if mirror else np.zeros_like(flags))


def test_a_crop_as_large_as_the_picture_has_one_place() -> None:
    assert not crop_origins(PLAIN, 227, "train", 0, 0, INDICES).any()


def test_a_picture_has_its_own_choice_whatever_the_minibatch() -> None:
    one = crop_origins(PLAIN, 256, "train", 2, 0, INDICES)
    other = crop_origins(PLAIN, 256, "train", 2, 9, INDICES[::-1])
    np.testing.assert_array_equal(other[::-1], one)
    assert (crop_origins(PLAIN, 256, "train", 3, 0, INDICES) != one).any()
    assert (crop_origins(replace(PLAIN, seed=2), 256, "train", 2, 0, INDICES) != one).any()


def test_batch_crop_mirror_gives_a_global_minibatch_one_choice() -> None:
    origins = [crop_origins(WHOLE_BATCH, 256, "train", 0, k, INDICES[:8]) for k in range(50)]
    assert all((batch == batch[0]).all() for batch in origins)
    assert len({tuple(batch[0]) for batch in origins}) > 30
    flags = [mirror_flags(WHOLE_BATCH, 256, "train", 0, k, INDICES[:8]) for k in range(50)]
    assert all((batch == batch[0]).all() for batch in flags)
    assert 10 < sum(int(batch[0]) for batch in flags) < 40
    # Another trainer's rows of the same minibatch.
    other = crop_origins(WHOLE_BATCH, 256, "train", 0, 7, INDICES[100:103])
    np.testing.assert_array_equal(other, origins[7][:3])


@pytest.mark.parametrize("settings", [PLAIN, WHOLE_BATCH])
def test_no_picture_gives_no_rows(settings: Augmentation) -> None:
    assert crop_origins(settings, 256, "train", 0, 0, INDICES[:0]).shape == (0, 2)
    assert mirror_flags(settings, 256, "train", 0, 0, INDICES[:0]).shape == (0,)


COLOURED = replace(PLAIN, colour_basis=((3.0, 2.0, 1.0), (0.5, 0.0, -0.5), (0.0, 0.25, 0.0)))


def test_colour_noise_is_a_sum_of_principal_components_by_hand() -> None:
    indices = INDICES[:20] + 2**31
    found = colour_offsets(COLOURED, 5, indices)
    drawn = normals(1, 5, indices, Purpose.COLOUR, 3)
    assert found.dtype == np.float32
    for n, colour in np.ndindex(20, 3):
        terms = [drawn[n, i] * COLOURED.colour_basis[i][colour] for i in range(3)]
        assert found[n, colour] == np.float32(terms[0] + terms[1] + terms[2])


def test_colour_noise_depends_on_picture_and_epoch_alone() -> None:
    """Not on who else is in the minibatch, nor on whether that shares its crop."""
    whole = colour_offsets(COLOURED, 2, INDICES[:150])
    for first, count in ((0, 1), (3, 2), (17, 5), (100, 50)):
        part = colour_offsets(COLOURED, 2, INDICES[first : first + count])
        assert part.tobytes() == whole[first : first + count].tobytes()
    shared = replace(COLOURED, batch_crop_mirror=True)
    assert colour_offsets(shared, 2, INDICES[:150]).tobytes() == whole.tobytes()
    assert (colour_offsets(COLOURED, 3, INDICES[:150]) != whole).all(axis=1).mean() > 0.99
    assert len(np.unique(whole, axis=0)) == 150


@pytest.mark.parametrize(
    ("image_size", "last", "centre"), [(256, 29, 14), (227, 0, 0), (236, 9, 4)]
)
def test_ten_crops_are_four_corners_and_the_centre_and_their_mirrors(
    image_size: int, last: int, centre: int
) -> None:
    five = [(0, 0), (0, last), (last, 0), (last, last), (centre, centre)]
    expected = [(*place, mirrored) for mirrored in (False, True) for place in five]
    assert list(ten_crops(image_size, 227)) == expected
