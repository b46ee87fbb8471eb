"""An LSTM of Keras on several processes: a task of long memory, or the sentiment of reviews.

python -m examples.keras_lstm                           add two numbers of a sequence of 200
python -m examples.keras_lstm --layer SimpleRNN         the same without gates, which fails
python -m examples.keras_lstm --reviews FOLDER          reviews: FOLDER/train/pos/*.txt and so on

The task is the adding problem of Hochreiter and Schmidhuber 1997, "Long short-term memory": in each
step comes a number from 0 to 1 and a mark, and the result is the sum of the two marked numbers. The
answer 1 has a mean squared error of 1/6, and the task counts as solved below 0.01. The network for
reviews is that of Theano's tutorial and of Theano-MPI: embedded words, an LSTM, the mean over all
words, and a class; the folders are those of the Large Movie Review Dataset (Maas et al. 2011).
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tandem.keras
from tandem.cli import count, exit_status
from tandem.errors import InputError

# isort: split
import keras

SOLVED = 0.01  # mean squared error
WORDS = re.compile(r"[a-z']+")
PAD, UNKNOWN = 0, 1


def sequences(count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw sequences, float32 (sequence, step, number and mark), and sums (sequence, 1).

    One mark is in the first half of a sequence, the other in the second.
    """
    rng = np.random.default_rng(seed)
    numbers, marks = rng.random((count, length)), np.zeros((count, length))
    half = length // 2
    for begin, end in ((0, half), (half, length)):
        marks[np.arange(count), rng.integers(begin, end, count)] = 1
    rows = np.stack([numbers, marks], axis=2).astype(np.float32)
    return rows, (numbers * marks).sum(axis=1, keepdims=True).astype(np.float32)


def adder(layer: str, length: int, units: int) -> Any:
    """A layer of Keras, by name, that reads a sequence, and the sum from its last step."""
    kind = getattr(keras.layers, layer)
    model = keras.Sequential([keras.Input((length, 2)), kind(units), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.005, global_clipnorm=1.0), "mse")
    return model


def read_reviews(folder: Path, split: str) -> tuple[list[list[str]], np.ndarray]:
    """Read the words of reviews, and whether each is positive; InputError if there are none."""
    texts, labels = [], []
    for label, name in enumerate(("neg", "pos")):
        for path in sorted((folder / split / name).glob("*.txt")):
            texts.append(WORDS.findall(path.read_text(encoding="utf-8", errors="replace").lower()))
            labels.append(label)
    if not {0, 1} <= {*labels}:
        raise InputError(f"{folder / split}: found no reviews, expected neg/*.txt and pos/*.txt")
    return texts, np.array(labels)


def numbered(texts: list[list[str]], vocabulary: list[str], length: int) -> np.ndarray:
    """Words as numbers, int (review, word): the last `length` of each, after zeros."""
    numbers = {word: n for n, word in enumerate(vocabulary, UNKNOWN + 1)}
    found = np.full((len(texts), length), PAD)
    for row, words in zip(found, texts, strict=True):
        kept = [numbers.get(word, UNKNOWN) for word in words[-length:]]
        row[length - len(kept) :] = kept
    return found


def frequent(texts: list[list[str]], count: int) -> list[str]:
    """The most frequent words."""
    counts = Counter(word for words in texts for word in words)
    return [word for word, _ in counts.most_common(count)]


def reader(words: int, length: int, units: int) -> Any:
    """The network for reviews."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            layers.Embedding(words, units, mask_zero=True),
            layers.LSTM(units, return_sequences=True),
            layers.GlobalAveragePooling1D(),
            layers.Dropout(0.5),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def problem(chosen: argparse.Namespace) -> Iterator[Any]:
    """The model, then rows and targets of training and of validation."""
    if chosen.reviews is None:
        yield adder(chosen.layer, chosen.length, chosen.units)
        yield sequences(chosen.sequences, chosen.length, 1)
        yield sequences(1000, chosen.length, 2)
        return
    (texts, labels), (others, of_others) = (
        read_reviews(chosen.reviews, split) for split in ("train", "test")
    )
    vocabulary = frequent(texts, 10_000)
    yield reader(len(vocabulary) + UNKNOWN + 1, chosen.length, chosen.units)
    yield numbered(texts, vocabulary, chosen.length), labels
    yield numbered(others, vocabulary, chosen.length), of_others


def main(arguments: list[str] | None = None) -> int:
    """Train, or continue, and print the last figure; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", default="LSTM", choices=["LSTM", "GRU", "SimpleRNN"])
    parser.add_argument("--reviews", type=Path, help="folder of reviews, instead of the task")
    parser.add_argument("--length", type=count, default=200, help="steps, or words of a review")
    parser.add_argument("--units", type=count, default=64)
    parser.add_argument("--sequences", type=count, default=20_000, help="of the task")
    parser.add_argument("--epochs", type=count, default=20)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="one for each process")
    parser.add_argument("--run", type=Path, default=Path("runs/lstm"), help="run folder")
    chosen = parser.parse_args(arguments)
    if chosen.length < 2:
        parser.error("--length: found 1, expected a step for each of two numbers")
    keras.utils.set_random_seed(1)
    model, (x, y), validation = problem(chosen)
    tandem.keras.distribute(model, chosen.devices, chosen.run)
    history = model.fit(
        x, y, 64, chosen.epochs, verbose=2, validation_data=validation, resume=True
    ).history
    if chosen.reviews is not None:
        print(f"{100 * history['val_accuracy'][-1]:.2f} % of the test reviews are right")
    else:
        error = history["val_loss"][-1]
        print(f"squared error {error:.4f}: {'' if error < SOLVED else 'not '}solved")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
