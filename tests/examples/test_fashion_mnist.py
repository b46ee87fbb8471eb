"""The parts of the demo of `tandem.keras`: its network, and its confusion matrix."""

from pathlib import Path

import numpy as np
from PIL import Image

from examples.fashion_mnist import CLASSES, count_confusions, draw, make_model


def test_the_network_has_three_convolutions() -> None:
    model = make_model()
    assert model.output_shape == (None, 10)
    assert model.count_params() == 10 * 32 + 289 * 32 + 289 * 64 + 1601 * 10


def test_confusions_are_counted_one_by_one() -> None:
    rng = np.random.default_rng(0)
    labels, guesses = rng.integers(0, 4, (2, 200))
    labels[labels == 3] = 2  # a class without pictures
    expected = np.zeros((4, 4), int)
    for label, guess in zip(labels, guesses, strict=True):
        expected[label, guess] += 1
    np.testing.assert_array_equal(count_confusions(labels, guesses, 4), expected)


def test_a_confusion_matrix_is_drawn_with_its_diagonal_dark(tmp_path: Path) -> None:
    path = tmp_path / "confusion.png"
    draw(np.diag([5] * 9 + [0]), CLASSES, path)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    dark = pixels[..., 2] - pixels[..., 0] > 50
    assert 0.05 < dark.mean() < 0.12  # nine of a hundred squares, of most of the picture
