"""PCA colour noise: the covariance of the training pictures' colours, and what follows from it.

Krizhevsky, Sutskever, Hinton 2012, section 4.1: to every pixel of a training picture is added
``p1 (a1 l1) + p2 (a2 l2) + p3 (a3 l3)``, where ``p_i`` and ``l_i`` are eigenvectors and eigenvalues
of the 3 x 3 covariance matrix of RGB, and the ``a_i`` are normal numbers, drawn anew for a picture
each time that it is used.

The eigenvalues are variances, so the noise depends on the unit of a pixel, which the paper does not
name. Here it is the whole range: pixels from 0 to 1. So read it fb.resnet.torch and what followed
it, whose published eigenvalues for ImageNet, 0.2175, 0.0188 and 0.0045, add up to the variances of
the three colours in that unit. With the paper's 0.1, most of the noise is then a change of
brightness with a standard deviation of 0.022 of the range, 5.5 of 255 along the first eigenvector.
With pixels from 0 to 255 it would be 255 times as much in that unit, and leave no picture.
"""

from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tandem.data.safe_io import read_npy
from tandem.errors import InputError

COVARIANCE_NAME = "colour_covariance.npy"
_EVERY = 4  # rows and columns: neighbours say nearly the same
# Pixels at a time: they stay in the cache, and OpenBLAS computes a product of vectors of up to
# 10,000 numbers in one thread; more would wait, and take the time of processes that decode.
_BLOCK = 1 << 13
_RANGE = 255.0

Basis = tuple[tuple[float, float, float], ...]
"""For each principal component, the RGB that a normal number of standard deviation 1 adds."""


def colour_moments(pictures: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Sum the products of every two of (R, G, B, 1) over pixels: int64 (4, 4).

    `pictures` are (picture, row, column, RGB). Every fourth row and column counts. The sums are
    exact: in float64, a block's are integers far below 2**53.
    """
    sampled = pictures[:, ::_EVERY, ::_EVERY]
    count, rows, columns, _ = sampled.shape
    some, high = max(1, _BLOCK // (rows * columns)), max(1, _BLOCK // columns)
    moments = np.zeros((4, 4), np.int64)
    for first in range(0, count, some):
        for top in range(0, rows, high):
            block = sampled[first : first + some, top : top + high]
            colours = [block[..., c].astype(np.float64).ravel() for c in range(3)]
            colours.append(np.ones(len(colours[0])))
            for i, j in combinations_with_replacement(range(4), 2):
                # Twice as fast as a product of matrices.
                moments[i, j] += int(colours[i] @ colours[j])
    return np.triu(moments) + np.triu(moments, 1).T


def covariance_of(moments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Covariance of RGB, float64 (3, 3), in squared units of a pixel's 0 to 255.

    `moments` are sums of `colour_moments`, of at least one pixel.
    """
    exact = moments.tolist()  # ints of any size
    count, sums = exact[3][3], exact[3][:3]
    return np.array(
        [[(count * exact[i][j] - sums[i] * sums[j]) / count**2 for j in range(3)] for i in range(3)]
    )


def read_covariance(path: Path) -> npt.NDArray[np.float64]:
    """Read the covariance of colours, float64 (3, 3).

    Raises InputError if it is missing, or not the covariance of numbers from 0 to 255.
    """

    def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
        if shape != (3, 3) or dtype != np.float64:
            raise InputError(f"{path}: found {dtype} {shape}, expected float64 (3, 3)")

    try:
        covariance = read_npy(path, check)
    except FileNotFoundError:
        raise InputError(
            f"{path} (rand_colour): found no covariance of colours, expected that of the training"
            " pictures; preprocessing/make_hkl.py, started again with the settings of this data"
            " set, computes it from the batch files"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: this is no covariance of colours: {error}") from error
    fits = (np.abs(covariance) <= _RANGE**2).all() and (covariance == covariance.T).all()
    # By rounding, an eigenvalue that is 0 may be slightly negative.
    if not fits or np.linalg.eigvalsh(covariance)[0] < -1e-6:
        raise InputError(
            f"{path}: found {covariance.tolist()}, expected the covariance of colours from 0 to 255"
        )
    return covariance


def read_basis(path: Path, std: float) -> Basis:
    """The `colour_basis` of a covariance that is read from a file; empty where `std` is 0."""
    return colour_basis(read_covariance(path), std) if std > 0 else ()


def colour_basis(covariance: npt.NDArray[np.float64], std: float) -> Basis:
    """Scale the principal components of colours for normal numbers of standard deviation 1.

    Component i is ``std * l_i * p_i`` for pixels from 0 to 1, with the eigenvalue ``l_i`` and the
    eigenvector ``p_i``, the largest first, in units of a pixel's 0 to 255. The sign of an
    eigenvector is such that its sum is not negative.
    """
    values, vectors = np.linalg.eigh(covariance / _RANGE**2)
    vectors = vectors * np.where(vectors.sum(axis=0) < 0, -1.0, 1.0)
    scaled = std * np.maximum(values, 0) * vectors * _RANGE
    return tuple((float(r), float(g), float(b)) for r, g, b in scaled.T[::-1])
