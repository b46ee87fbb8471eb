"""The example of recurrent layers: its rows, and short runs of both problems."""

from pathlib import Path

import numpy as np
import pytest

from tandem.errors import InputError
from tests.support.keras_models import keras  # noqa: F401  (sets the backend first)

# isort: split
from examples import keras_lstm as example


def test_sums_are_of_the_two_marked_numbers() -> None:
    x, y = example.sequences(20, 9, 1)
    for sequence, total in zip(x, y, strict=True):
        marked = [place for place, mark in enumerate(sequence[:, 1]) if mark == 1]
        assert len(marked) == 2
        assert marked[0] < 4 <= marked[1]
        assert total == pytest.approx(sequence[marked, 0].sum())


def write_reviews(folder: Path) -> None:
    for split, count in (("train", 40), ("test", 10)):
        for label, word in (("neg", "dull"), ("pos", "fine")):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                text = f"A {word} film, and it's {word} to see it {number} times."
                (folder / split / label / f"{number}.txt").write_text(text)


def test_reviews_become_numbers_of_frequent_words(tmp_path: Path) -> None:
    write_reviews(tmp_path)
    texts, labels = example.read_reviews(tmp_path, "test")
    assert labels.tolist() == [0] * 10 + [1] * 10
    assert texts[0][:4] == ["a", "dull", "film", "and"]
    vocabulary = example.frequent(texts, 1)
    found = example.numbered([["x", "a"], ["a"] * 9], [*vocabulary, "a"], 4)
    np.testing.assert_array_equal(found, [[0, 0, 1, 3], [3, 3, 3, 3]])
    with pytest.raises(InputError, match="found no reviews"):
        example.read_reviews(tmp_path, "other")


@pytest.mark.slow
def test_both_problems_are_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Short sequences, and reviews that differ in one word."""
    write_reviews(tmp_path / "reviews")
    short = ["--length", "8", "--sequences", "4000", "--units", "24", "--epochs", "8"]
    example.main([*short, "--run", str(tmp_path / "task")])
    reviews = ["--reviews", str(tmp_path / "reviews"), "--length", "12", "--units", "8"]
    example.main([*reviews, "--run", str(tmp_path / "words"), "--devices", "cpu", "--epochs", "30"])
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("squared error 0.00") and line.endswith(": solved") for line in lines
    )
    assert lines[-1] == "100.00 % of the test reviews are right"
