"""PyDTNN's AlexNet, VGG-11 and ResNet-32 reach 70 % on CIFAR-10: an hour or two on two cores.

CIFAR10 names the data set, in a form that `tandem.datasets.load` takes.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tandem import datasets, nn
from tandem.datasets import published
from tests.support.cifar_networks import resnet32, vgg11

SOURCE = os.environ.get("CIFAR10") or published.locate("cifar10")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif(SOURCE is None, reason="CIFAR-10 is not here: let CIFAR10 name its folder"),
]


def alexnet() -> nn.Sequential:
    from examples.nn_add import make_model

    return make_model()


@pytest.mark.parametrize(
    ("make_model", "epochs", "settings"),
    [
        (alexnet, 30, {"learning_rate": 0.01, "batch_size": 64}),
        (vgg11, 6, {"learning_rate": 0.05, "batch_size": 128, "lr_policy": "onecycle"}),
        (resnet32, 8, {"learning_rate": 0.2, "batch_size": 128, "lr_policy": "onecycle"}),
    ],
    ids=["alexnet", "vgg11", "resnet32"],
)
def test_a_network_reaches_70_percent(
    make_model: Any, epochs: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    (x, y), validation = datasets.load("cifar10", SOURCE)
    model = make_model()
    optimizer = nn.optimizers.SGD(settings["learning_rate"], momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        x,
        y,
        epochs=epochs,
        validation_data=validation,
        devices=["cpu", "cpu"],
        run=tmp_path / "run",
        rand_mirror=True,
        stop_monitor="accuracy",
        stop_at=0.7,
        **settings,
    )
    assert max(history.history["val_accuracy"]) >= 0.7
    assert len(history.epoch) <= epochs
