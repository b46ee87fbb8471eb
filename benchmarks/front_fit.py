"""A script that fits AlexNet for CIFAR-10 with `tandem.nn`, for `benchmarks.front`, until it ends.

Its arguments are a folder, and numbers of processes, pictures and pictures of a batch, and a width.
"""

import sys

from benchmarks.front import noise
from examples.nn_add import make_model
from tandem import nn

folder, processes, pictures, batch, width = sys.argv[1:]
model = make_model(float(width))
model.compile(nn.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
model.fit(
    *noise(int(pictures)),
    batch_size=int(batch),
    epochs=1_000_000,
    verbose=0,
    devices=["cpu"] * int(processes),
    run=folder,
    # What the others do not do: checkpoints, event files, signs of life while all stands still.
    snapshot_freq=1_000_000,
    snapshot_minutes=0,
    tensorboard=False,
    print_freq=1_000_000,
    peer_timeout_seconds=86400,
)
