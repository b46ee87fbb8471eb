"""A network by `add`, as in PyDTNN: AlexNet for CIFAR-10, on one process for each device.

python -m examples.keras_cifar --devices cpu cpu
python -m examples.keras_cifar --source data/cifar-10-binary.tar.gz --epochs 30
python -m examples.keras_cifar --synthetic                                       a short trial

Its layers are those of PyDTNN's ``alexnet_cifar10`` (Barrachina, Castelló, Catalán, Dolz, Mestre
2021, "PyDTNN: a user-friendly and extensible framework for distributed deep learning").
"""

import argparse
from collections.abc import Sequence
from typing import Any

import tandem.keras
from tandem import datasets
from tandem.cli import count, exit_status

# isort: split
import keras


def make_model(width: float = 1.0) -> keras.Model:
    """AlexNet for pictures of 32 x 32 pixels; `width` is a factor on filters and units."""
    layers = keras.layers

    def scaled(count: int) -> int:
        return max(1, round(width * count))

    conv: dict[str, Any] = {"padding": "same", "activation": "relu"}
    model = keras.Sequential(name="alexnet_cifar10")
    model.add(keras.Input((32, 32, 3)))
    model.add(layers.Rescaling(1 / 128, offset=-1))
    model.add(layers.ZeroPadding2D(((1, 1), (1, 1))))
    model.add(layers.Conv2D(scaled(64), (3, 3), strides=(2, 2), activation="relu"))
    model.add(layers.MaxPooling2D((2, 2)))
    model.add(layers.Conv2D(scaled(192), (3, 3), **conv))
    model.add(layers.MaxPooling2D((2, 2)))
    model.add(layers.Conv2D(scaled(384), (3, 3), **conv))
    model.add(layers.Conv2D(scaled(256), (3, 3), **conv))
    model.add(layers.Conv2D(scaled(256), (3, 3), **conv))
    model.add(layers.MaxPooling2D((2, 2)))
    model.add(layers.Flatten())
    for _ in range(2):
        model.add(layers.Dense(scaled(4096), activation="relu"))
        model.add(layers.Dropout(0.5))
    model.add(layers.Dense(10, activation="softmax"))
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", help="CIFAR-10, as a folder or an archive")
    parser.add_argument("--synthetic", action="store_true", help="few random pictures, 2 epochs")
    parser.add_argument("--epochs", type=count, default=30)
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="one for each process")
    parser.add_argument("--weights_dir", default="runs/keras_cifar", help="run folder, continued")
    chosen = parser.parse_args(arguments)

    name, epochs, width = "cifar10", chosen.epochs, 1.0
    if chosen.synthetic:
        name, epochs, width = "synthetic", 2, 0.05
    (x, y), (x_test, y_test) = datasets.load(name, chosen.source)
    model = make_model(width)
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=0.01, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    tandem.keras.distribute(model, chosen.devices, chosen.weights_dir)
    model.fit(x, y, 64, epochs, validation_data=(x_test, y_test), resume=True)
    loss, accuracy = model.evaluate(x_test, y_test, batch_size=64, verbose=0)
    print(f"loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
