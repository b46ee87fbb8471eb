"""A script of `benchmarks.front` that fits AlexNet for CIFAR-10 with `tandem.keras` until it ends.

Its arguments are a folder, and numbers of processes, pictures and pictures of a batch, and a width.
"""

import sys

import tandem.keras
from benchmarks.front import noise
from examples.keras_cifar import make_model

# isort: split
import keras

folder, processes, pictures, batch, width = sys.argv[1:]
model = make_model(float(width))
model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
tandem.keras.distribute(
    model,
    ["cpu"] * int(processes),
    folder,
    # What the others do not do: signs of life while all stands still.
    snapshot_minutes=0,
    keep_snapshots=1,
    print_freq=1_000_000,
    peer_timeout_seconds=86400,
)
model.fit(*noise(int(pictures)), int(batch), 1_000_000, verbose=0)
