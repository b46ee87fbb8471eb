"""Colour noise: covariance against loops, its principal components, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from tandem.data import colour
from tandem.data.colour import colour_basis, colour_moments, covariance_of, read_covariance
from tandem.errors import InputError

# The eigenvalues that are published with fb.resnet.torch, for pixels from 0 to 1.
IMAGENET = (0.2175, 0.0188, 0.0045)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
@pytest.mark.parametrize("shape", [(3, 9, 9), (2, 8, 8), (1, 1, 1), (5, 2, 14)])
def test_moments_by_loops(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colour, "_BLOCK", block)
    pictures = noise(*shape)
    expected = np.zeros((4, 4), object)
    for n, row, column in np.ndindex(*shape):
        if row % 4 == column % 4 == 0:
            pixel = [*map(int, pictures[n, row, column]), 1]
            expected += np.outer(pixel, pixel)
    assert colour_moments(pictures).tolist() == expected.tolist()


def test_sums_that_floats_do_not_hold_are_exact() -> None:
    """Pixels of nearly one colour: in float64 the variance would be lost."""
    count = 10**12
    sums = [250 * count + 1, 250 * count, 0]
    moments = np.zeros((4, 4), np.int64)
    moments[3, 3], moments[3, :3], moments[:3, 3] = count, sums, sums
    moments[0, 0] = 250**2 * count + 501
    moments[1, 1] = moments[0, 1] = moments[1, 0] = 250**2 * count
    moments[0, 1] = moments[1, 0] = 250**2 * count + 250
    found = covariance_of(moments)
    # One pixel in 10**12 is redder by 1.
    assert found[0, 0] == pytest.approx(1e-12, rel=1e-9)
    assert (found[1:] == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_paper_s_formula_for_pixels_from_0_to_1(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    covariance = vectors @ np.diag(IMAGENET) @ vectors.T * 255**2
    covariance = (covariance + covariance.T) / 2
    basis = colour_basis(covariance, 0.1)
    for value, vector, component in zip(IMAGENET, vectors.T, basis, strict=True):
        sign = 1 if vector.sum() > 0 else -1
        np.testing.assert_allclose(component, sign * 0.1 * value * vector * 255, rtol=1e-9)
    assert np.linalg.norm(basis[0]) == pytest.approx(5.546, abs=1e-3)  # of 255


def test_the_covariance_of_the_noise() -> None:
    """Along each principal component it has the standard deviation that the formula says."""
    covariance = covariance_of(colour_moments(noise(2, 40, 40) // np.uint8([1, 2, 3])))
    rows = np.array(colour_basis(covariance, 2.0)) / 255
    values, vectors = np.linalg.eigh(covariance / 255**2)
    expected = vectors @ np.diag((2 * values) ** 2) @ vectors.T
    np.testing.assert_allclose(rows.T @ rows, expected, rtol=1e-9)


def test_an_eigenvalue_below_zero_adds_nothing() -> None:
    """Rounding makes it of one that is zero, in pictures without colour."""
    assert colour_basis(np.diag([2.0, 1.0, -1e-9]), 1.0)[2] == (0, 0, 0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    covariance = covariance_of(colour_moments(noise(1, 9, 9)))
    np.save(tmp_path / "c.npy", covariance)
    np.testing.assert_array_equal(read_covariance(tmp_path / "c.npy"), covariance)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((3, 4)), r"found float64 \(3, 4\), expected float64 \(3, 3\)"),
        (np.zeros((3, 3), np.float32), "found float32"),
        (np.full((3, 3), np.nan), "expected the covariance of colours"),
        (np.diag([1.0, 1.0, -1.0]), "expected the covariance of colours"),
        (np.diag([1e9, 1.0, 1.0]), "expected the covariance of colours"),
        (np.array([[1.0, 2, 0], [0, 1, 0], [0, 0, 1]]), "expected the covariance of colours"),
        (None, "found no covariance of colours.*make_hkl.py, started again.*computes it"),
        (b"text", "this is no covariance of colours"),
    ],
)
def test_what_is_no_covariance_is_refused(tmp_path: Path, value: object, message: str) -> None:
    path = tmp_path / "c.npy"
    if isinstance(value, bytes):
        path.write_bytes(value)
    elif value is not None:
        np.save(path, value)
    with pytest.raises(InputError, match=f"c.npy.*{message}"):
        read_covariance(path)
