"""A border of the rounded mean colour: its bytes, and that stopping anywhere changes none."""

import itertools
from fractions import Fraction
from pathlib import Path

import make_hkl
import make_labels
import numpy as np
import pytest

from tandem.data.colour import colour_moments, covariance_of
from tandem.data.manifest import read_manifest
from tandem.data.mean_image import read_mean
from tandem.look import LookOptions, displayed, read_pictures
from tandem.preprocessing import batches, border, prepare
from tests.support.picture_files import PER_FILE, SIDE, Pictures, Refusal, contents, stored
from tests.support.stopped_preprocessing import stop

PAD = 3
PADDED = ("--pad", str(PAD))


def inner(pixels: np.ndarray) -> np.ndarray:
    return pixels[..., PAD : PAD + SIDE, PAD : PAD + SIDE, :]


def mean_colour_by_loops(pictures: list[np.ndarray]) -> list[int]:
    """The mean of each colour as a fraction, rounded half up."""
    found = []
    for channel in range(3):
        values = [int(value) for pixels in pictures for value in pixels[..., channel].ravel()]
        found.append(int(Fraction(sum(values), len(values)) + Fraction(1, 2)))
    return found


@pytest.mark.parametrize(("layout", "workers"), [("b01c", "1"), ("c01b", "1"), ("b01c", "2")])
def test_a_border_is_the_rounded_mean_colour_of_training(
    pictures: Pictures, out: Path, tmp_path: Path, layout: str, workers: str
) -> None:
    pictures.spoil(("train", "n03", 1))
    assert make_hkl.main(pictures.options(tmp_path / "plain")) == 0
    options = (*PADDED, "--layout", layout, "--workers", workers)
    assert make_hkl.main(pictures.options(out, *options)) == 0
    plain = {split: stored(tmp_path / "plain", split) for split in ("train", "val")}
    colour = mean_colour_by_loops(plain["train"])
    for split, expected in plain.items():
        found = stored(out, split, layout)
        assert len(found) == len(expected)
        for pixels, own in zip(found, expected, strict=True):
            whole = np.empty((SIDE + 2 * PAD, SIDE + 2 * PAD, 3), np.uint8)
            whole[...] = colour
            inner(whole)[...] = own
            np.testing.assert_array_equal(pixels, whole)
    mean = read_mean(out / "misc" / "img_mean.npy", SIDE + 2 * PAD).transpose(1, 2, 0)
    own = read_mean(tmp_path / "plain" / "misc" / "img_mean.npy", SIDE).transpose(1, 2, 0)
    np.testing.assert_array_equal(inner(mean), own)
    inner(mean)[...] = colour
    assert (mean == colour).all()


def test_the_border_has_no_part_in_the_covariance(pictures: Pictures, out: Path) -> None:
    assert make_hkl.main(pictures.options(out, *PADDED)) == 0
    path = out / "misc" / "colour_covariance.npy"
    written = path.read_bytes()
    own = np.stack([inner(pixels) for pixels in stored(out, "train")])
    np.testing.assert_array_equal(np.load(path), covariance_of(colour_moments(own)))
    path.unlink()  # as after an older version, which wrote none
    assert make_hkl.main(pictures.options(out, *PADDED)) == 0
    assert path.read_bytes() == written


def test_the_manifest_has_the_border(pictures: Pictures, out: Path, tmp_path: Path) -> None:
    assert make_hkl.main(pictures.options(out, *PADDED)) == 0
    manifest = read_manifest(out)
    assert (manifest.image_size, manifest.pad) == (SIDE + 2 * PAD, PAD)
    assert make_hkl.main(pictures.options(tmp_path / "plain", "--pad", "0")) == 0
    assert '"pad"' not in (tmp_path / "plain" / "manifest.json").read_text()


def test_rounding_is_half_up_and_exact() -> None:
    sums = np.array([[[1, 3, 509]], [[2, 2, 510]]], np.int64)  # means 0.75, 1.25, 254.75
    assert border.mean_colour(sums, 2).tolist() == [1, 1, 255]
    count = 1_281_167
    sums = np.full((2, 2, 3), 127 * count, np.int64)
    sums[0, 0] += [2 * count, 2 * count - 1, 4 * count]  # means 127.5, just below it, 128
    assert border.mean_colour(sums, count).tolist() == [128, 127, 128]


# Three training and two validation files, each written twice.
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        *((border, "write_batch", call) for call in range(6)),
        (batches, "write_batch", 2),
        (prepare, "write_array", 0),
        (prepare, "write_manifest", 0),
    ],
)
def test_a_run_with_a_border_stopped_anywhere_goes_on(
    pictures: Pictures, out: Path, tmp_path: Path, monkeypatch, module, name, call: int, after: bool
) -> None:
    undisturbed = pictures.options(tmp_path / "undisturbed", *PADDED)
    assert make_hkl.main(undisturbed) == 0
    options = pictures.options(out, *PADDED)
    stop(monkeypatch, options, module, name, call, after)
    done = (name, after) == ("write_manifest", True)
    assert (out / "manifest.json").exists() == done
    assert make_hkl.main(options) == 0
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_borders_that_are_filled_are_not_filled_again(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = pictures.options(out, *PADDED)
    stop(monkeypatch, options, border, "write_batch", 2, False)
    files = sorted((out / "train_hkl").iterdir())
    before = [path.stat().st_ino for path in files]
    assert make_hkl.main(options) == 0
    kept = [path.stat().st_ino == inode for path, inode in zip(files, before, strict=True)]
    assert kept == [True, True, False, False]


def test_a_full_disk_while_borders_are_filled(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    def write(path: Path, *rest: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(border, "write_batch", write)
        error = refusal(*PADDED)
    assert f"{out / 'train_hkl' / '0000.hkl'}: cannot be written: No space left" in error
    assert make_hkl.main(pictures.options(out, *PADDED)) == 0


@pytest.mark.parametrize(("per_file", "twice"), [(PER_FILE, PER_FILE), (1000, 13)])
def test_room_is_needed_for_the_border_and_a_file_twice(
    pictures: Pictures,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
    per_file: int,
    twice: int,
) -> None:
    options = (*PADDED, "--batch-size", str(per_file))
    needed = (13 + 6 + twice) * (SIDE + 2 * PAD) ** 2 * 3
    monkeypatch.setattr("tandem.preprocessing.output.free_bytes", lambda folder: needed - 1)
    assert f"{out} (tar_root_dir): found 0.0 MB free" in refusal(*options)
    assert not out.exists()
    monkeypatch.setattr("tandem.preprocessing.output.free_bytes", lambda folder: needed)
    assert make_hkl.main(pictures.options(out, *options)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pad", "-1"), "--pad is -1; it must be a whole number from 0 to 32750"),
        (("--pad", "1.5"), "--pad is 1.5; it must be a whole number"),
        (("--pad", "32750"), "--pad: found 32750, expected at most 32746 with image_size 8"),
        (("--padding", "4"), "unknown option --padding; did you mean --pad?"),
    ],
)
def test_a_border_that_cannot_be_is_refused(
    out: Path, refusal: Refusal, options: tuple[str, ...], message: str
) -> None:
    assert message in refusal(*options)
    assert not out.exists()


@pytest.mark.parametrize("first", [(), PADDED])
def test_another_border_is_another_data_set(
    pictures: Pictures, out: Path, monkeypatch, refusal: Refusal, first: tuple[str, ...]
) -> None:
    options = pictures.options(out, *first)
    stop(monkeypatch, options, batches, "write_batch", 1, False)
    was, now = (PAD, 5) if first else (0, 5)
    assert f"a stopped run with pad {was}, expected {now}" in refusal("--pad", "5")
    assert make_hkl.main(options) == 0
    assert f"a finished run with pad {was}, expected {now}" in refusal("--pad", "5")
    # The same stored size is not the same data set.
    size = str(SIDE + 2 * PAD)
    assert "a finished run with image_size 8, expected 14" in refusal("--image-size", size)


def test_a_finished_run_with_a_border_is_left_alone(pictures: Pictures, out: Path) -> None:
    assert make_hkl.main(pictures.options(out, *PADDED)) == 0
    before = contents(out)
    assert make_hkl.main(pictures.options(out, *PADDED)) == 0
    assert contents(out) == before
    assert make_labels.main(pictures.options(out, *PADDED)) == 0


def test_crops_of_the_own_size_are_pad_and_crop_and_the_centre_is_the_picture(
    pictures: Pictures, out: Path
) -> None:
    assert make_hkl.main(pictures.options(out, *PADDED)) == 0
    assert make_labels.main(pictures.options(out, *PADDED)) == 0
    values = {"data_folder": str(out), "crop_size": SIDE, "rand_mirror": False, "count": 13}
    mean = read_mean(out / "misc" / "img_mean.npy")
    seen = {}
    for split, name in (("train", "train"), ("validation", "val")):
        options = LookOptions.model_validate({**values, "split": split})
        found = read_pictures(options, read_manifest(out))
        whole = np.stack(stored(out, name))[found.indices] - mean.transpose(1, 2, 0)
        seen[split] = set()
        for shown, images in zip(found.crops, whole, strict=True):
            for row, column in itertools.product(range(2 * PAD + 1), repeat=2):
                window = images[row : row + SIDE, column : column + SIDE]
                if np.abs(displayed(window, mean) - shown.astype(int)).max() <= 1:
                    seen[split].add((row, column))
                    break
            else:
                raise AssertionError(f"no window of {split} is shown")
    assert seen["validation"] == {(PAD, PAD)}
    assert len(seen["train"]) > 4
