"""A small convolutional network on Fashion-MNIST: accuracy, and a confusion matrix as a picture.

python -m examples.fashion_mnist
python -m examples.fashion_mnist --source data/fashion --epochs 3 --devices cpu

Two processes train it; the same command continues a stopped run. `make demo-keras` obtains the
pictures first. Pictures are mirrored at random; the learning rate falls, from 0.002 by a cosine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tandem.keras
from tandem import datasets
from tandem.cli import configure_logging, count, exit_status

# isort: split
import keras

BATCH = 128  # images of a step, of all processes
CLASSES = datasets.class_names("fashion_mnist")


def make_model() -> keras.Model:
    """Chollet's "Simple MNIST convnet" (2015), a further convolution, and less dropout."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(len(CLASSES), activation="softmax"),
        ]
    )


def count_confusions(labels: np.ndarray, guesses: np.ndarray, classes: int) -> np.ndarray:
    """Count the pictures of each class, the row, by what they were taken for, the column."""
    pairs = np.asarray(labels) * classes + guesses
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def draw(counts: np.ndarray, names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix, each row as a part of its class."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    part = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure, axes = plt.subplots(figsize=(7.5, 7), layout="constrained")
    axes.imshow(part, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("taken for")
    axes.set_ylabel("class")
    for row, column in np.argwhere(counts):
        colour = "white" if part[row, column] > 0.5 else "black"
        axes.text(column, row, counts[row, column], ha="center", va="center", color=colour)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or continue; predict and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", help="folder of the four IDX files (default: it is looked for)")
    parser.add_argument(
        "--weights_dir", type=Path, default=Path("runs/demo-keras"), help="run folder"
    )
    parser.add_argument("--epochs", type=count, default=12)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="one for each process")
    chosen = parser.parse_args(arguments)

    (x, y), (x_test, y_test) = datasets.load("fashion_mnist", chosen.source)
    model, steps = make_model(), -(-len(x) // BATCH)
    model.summary()
    model.compile(
        optimizer=keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(0.002, chosen.epochs * steps)
        ),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    tandem.keras.distribute(model, chosen.devices, chosen.weights_dir, rand_mirror=True)
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=chosen.epochs,
        validation_data=(x_test, y_test),
        resume=True,
        verbose=2,
    )
    counts = count_confusions(y_test, model.predict(x_test, 250, verbose=0).argmax(1), len(CLASSES))
    accuracy = counts.trace() / counts.sum()
    picture = chosen.weights_dir / "confusion.png"
    draw(counts, CLASSES, picture)
    print(f"{100 * accuracy:.2f} % of {counts.sum():,} test pictures are right; see {picture}")


if __name__ == "__main__":
    configure_logging()
    raise SystemExit(exit_status(main))
