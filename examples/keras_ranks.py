"""The same over ranks, on one machine or several with a common file system: a trainer on each.

mpirun -n 4 python -m examples.keras_ranks
torchrun --nproc-per-node 2 -m examples.keras_ranks --synthetic

Every rank executes the script and gets the result; rank 0 writes the run folder. N ranks compute
what one computes: a batch of 64 is divided among them.
"""

import argparse
from collections.abc import Sequence

import tandem.keras
from examples.keras_cifar import make_model
from tandem import datasets
from tandem.cli import exit_status


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; rank 0 prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", help="CIFAR-10, as a folder or an archive")
    parser.add_argument("--synthetic", action="store_true", help="few random pictures, 2 epochs")
    parser.add_argument("--weights_dir", default="runs/keras_ranks", help="run folder, continued")
    chosen = parser.parse_args(arguments)

    name = "synthetic" if chosen.synthetic else "cifar10"
    train, test = datasets.load(name, chosen.source)
    model = make_model(width=0.05 if chosen.synthetic else 1.0)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    epochs = 2 if chosen.synthetic else 30
    tandem.keras.distribute(model, run=chosen.weights_dir)
    model.fit(*train, 64, epochs, validation_data=test, resume=True)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
