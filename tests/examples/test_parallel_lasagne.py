"""Synkhronos's demos by ours: what the layers compute, and that two workers learn what one does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import examples.lasagne_layers as lasagne
import tandem.parallel as synk
from examples import parallel_mnist, parallel_resnet
from tandem import datasets
from tandem.backend import device_mode


def test_the_network_is_resnet_50() -> None:
    network = parallel_resnet.build_resnet()
    # 64 more than torchvision's: the first convolution has a bias.
    assert sum(p.get_value().size for p in lasagne.get_all_params(network)) == 25_557_032 + 64
    assert len(lasagne.get_all_averages(network)) == 2 * 53
    shapes = [layer.output_shape for layer in lasagne.get_all_layers(network)]
    assert (None, 64, 56, 56) in shapes  # of pooling over the border
    assert shapes[-2:] == [(None, 2048, 1, 1), (None, 1000)]


def test_a_perceptron_is_products() -> None:
    x = pt.tensor4("x", dtype="float32")
    network = parallel_mnist.build_network("custom_mlp:1,5,0.2,0.5", x)
    rows = np.random.default_rng(1).random((3, 1, 28, 28), np.float32)
    w1, b1, w2, b2 = (p.get_value() for p in lasagne.get_all_params(network))
    logits = np.maximum(rows.reshape(3, -1) @ w1 + b1, 0) @ w2 + b2
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    guess, y = lasagne.get_output(network, deterministic=True), pt.lvector("y")
    outputs = [guess, lasagne.categorical_crossentropy(guess, y)]
    found = pytensor.function([x, y], outputs, mode=device_mode("cpu"))(rows, np.array([1, 0, 9]))
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    np.testing.assert_allclose(found[1], -np.log(expected[[0, 1, 2], [1, 0, 9]]), rtol=1e-5)


@pytest.mark.parametrize("model", ["cmn", "custom_mlp:3,50", "custom_mlp:a,5,.2,.5", "mlp:3"])
def test_an_unknown_model_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parallel_mnist.main([model])
    assert f"found model {model}, expected mlp, cnn or custom_mlp:" in capsys.readouterr().err


def trained(workers: int, train: Callable[[], Any]) -> tuple[list[float], list[np.ndarray]]:
    synk.fork(workers, use_gpu=False, threads=1)
    try:
        losses, params = train()
        return losses, [p.get_value() for p in params]
    finally:
        synk.close()


def assert_equal_training(train: Callable[[], Any]) -> list[float]:
    one, two = trained(1, train), trained(2, train)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-3)
    for own, other in zip(one[1], two[1], strict=True):
        np.testing.assert_allclose(other, own, rtol=0, atol=1e-3 * np.abs(own).max())
    return two[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "custom_mlp:3,50,.2,.5", "cnn"])
def test_two_workers_learn_mnist_as_one_does(model: str) -> None:
    data = datasets.load("synthetic", train=240, test=24, size=28, channels=1)
    losses = assert_equal_training(lambda: parallel_mnist.train(model, data, 20, 2))
    assert len(losses) == 20
    if model == "mlp":
        assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1


@pytest.mark.slow
def test_rows_that_lie_with_the_workers_are_learnt() -> None:
    data = datasets.load("synthetic", train=240, test=24, size=28, channels=1)
    losses, _ = trained(2, lambda: parallel_mnist.train("mlp", data, 20, 3, scattered=True))
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1


@pytest.mark.slow
def test_two_workers_learn_the_resnet_as_one_does() -> None:
    """Its gradients and averages: fifty layers of few rows amplify roundings in further steps."""

    def train() -> tuple[list[float], list[Any]]:
        functions = parallel_resnet.Functions(parallel_resnet.build_resnet(33, 2, 3, 4), 0.001)
        data = [synk.data(a) for a in parallel_resnet.noise(8, 33, 3)]
        losses = [loss for loss, _ in parallel_resnet.train(functions, data, 8, 1)]
        synk.all_reduce(functions.averages)
        return losses, [functions.gradient, *functions.averages]

    assert_equal_training(train)


@pytest.mark.slow
def test_the_resnet_program_reports_images_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch", "2", "--steps", "3", "--side", "33", "--filters", "2", "--classes", "3"]
    assert parallel_resnet.main(words) == 0
    assert "2 workers: " in capsys.readouterr().out
