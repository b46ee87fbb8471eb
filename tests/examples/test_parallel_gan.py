"""Adversarial networks by data-parallel functions: losses against PyTorch's, runs, continuation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.numpy import load_file

import tandem.parallel as synk
from examples.parallel_gan import (
    LOSSES,
    critic_loss,
    generate,
    generator_loss,
    initial,
    main,
    train,
)
from tandem.backend import device_mode
from tests.support.data_set_files import random_pictures, write_cifar, write_mnist

SIDE, NOISE, FILTERS, ROWS = 8, 5, 3, 4


def torch_critic(x: torch.Tensor, net: dict[str, torch.Tensor]) -> torch.Tensor:
    for name in ("down1", "down2"):
        x = F.leaky_relu(F.conv2d(x, net[name], net[f"{name}_bias"], 2, 1), 0.2)
    return (x.flatten(1) @ net["fc"])[:, 0] + net["fc_bias"]


def torch_generator(z: torch.Tensor, net: dict[str, torch.Tensor]) -> torch.Tensor:
    x = F.relu(z @ net["fc"] + net["fc_bias"]).reshape(ROWS, 2 * FILTERS, SIDE // 4, SIDE // 4)
    for name, activation in (("up1", F.relu), ("up2", torch.tanh)):
        x = activation(F.conv_transpose2d(x, net[name], net[f"{name}_bias"], 2, 1))
    return x


def torch_losses(kind: str, real: Any, z: Any, mixed: Any, both: Any) -> list[Any]:
    generator, critic = both
    made = torch_generator(z, generator)
    of_real, of_made = torch_critic(real, critic), torch_critic(made, critic)
    if kind == "lsgan":
        return [((of_real - 1) ** 2 + of_made**2).mean() / 2, ((of_made - 1) ** 2).mean() / 2]
    loss = of_made.mean() - of_real.mean()
    if kind == "wgan-gp":
        share = mixed[:, None, None, None]
        between = share * real + (1 - share) * made
        (g,) = torch.autograd.grad(torch_critic(between, critic).sum(), between, create_graph=True)
        loss = loss + 10 * ((g.flatten(1).norm(dim=1) - 1) ** 2).mean()
    return [loss, -of_made.mean()]


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_gradients_are_those_of_pytorch(kind: str) -> None:
    """The penalty's by back-propagation through convolutions twice."""
    rng = np.random.default_rng(0)
    arrays = [
        {name: rng.normal(0, 0.3, v.shape).astype(np.float32) for name, v in network.items()}
        for network in initial(SIDE, 1, NOISE, FILTERS)
    ]
    real = rng.uniform(-1, 1, (ROWS, 1, SIDE, SIDE)).astype(np.float32)
    z, mixed = rng.normal(size=(ROWS, NOISE)).astype(np.float32), rng.random(ROWS, np.float32)
    ours = [{n: pytensor.shared(v, n, shape=v.shape) for n, v in a.items()} for a in arrays]
    x = pt.tensor(dtype="float32", shape=(None, 1, SIDE, SIDE))
    made = generate(pt.constant(z), ours[0], SIDE)
    losses = [critic_loss(kind, x, made, pt.constant(mixed), ours[1])]
    losses.append(generator_loss(kind, made, ours[1]))
    gradients = pytensor.grad(losses[0], [*ours[1].values()])
    gradients += pytensor.grad(losses[1], [*ours[0].values()])
    found = pytensor.function([x], [*losses, *gradients], mode=device_mode("cpu"))(real)
    theirs = [
        {name: torch.tensor(v, requires_grad=True) for name, v in network.items()}
        for network in arrays
    ]
    peers = torch_losses(kind, torch.tensor(real), torch.tensor(z), torch.tensor(mixed), theirs)
    both = zip(peers, (theirs[1], theirs[0]), strict=True)
    expected = [torch.autograd.grad(v, [*net.values()], retain_graph=True) for v, net in both]
    for one, other in zip(found, [*peers, *expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(one, other.detach(), rtol=2e-4, atol=2e-5)


def trained(kind: str, folder: Path, workers: int, epochs: int) -> dict[str, np.ndarray]:
    pictures = np.random.default_rng(1).integers(0, 256, (390, 1, SIDE, SIDE), np.uint8)
    synk.fork(workers, use_gpu=False, threads=1)
    try:
        train(kind, pictures, folder, epochs, FILTERS)
    finally:
        synk.close()
    assert Image.open(folder / f"samples-{epochs:04}.png").size == (8 * SIDE, 8 * SIDE)
    return load_file(folder / f"epoch-{epochs:04}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_two_workers_learn_what_one_does_and_a_run_goes_on(kind: str, tmp_path: Path) -> None:
    whole = trained(kind, tmp_path / "whole", 2, 2)
    trained(kind, tmp_path / "parts", 2, 1)
    parts = trained(kind, tmp_path / "parts", 2, 2)
    alone = trained(kind, tmp_path / "alone", 1, 2)
    for name, value in whole.items():
        np.testing.assert_array_equal(value, parts[name])
        np.testing.assert_allclose(value, alone[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("fashion_mnist", (28, 28)), ("cifar10", (32, 32, 3))])
def test_the_program_reads_both_data_sets(
    name: str, shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, rows = tmp_path / "source", random_pictures(400, 20, shape)
    source.mkdir()
    if name == "cifar10":
        source = write_cifar(source, "cifar10", rows)
    else:
        write_mnist(source, rows)
    words = ["--data", name, "--source", str(source), "--run", str(tmp_path / "run")]
    assert main([*words, "--epochs", "1", "--filters", "4", "--pictures", "384"]) == 0
    assert capsys.readouterr().out.startswith("epoch 1: critic ")
    assert Image.open(tmp_path / "run" / "samples-0001.png").size == (8 * shape[0], 8 * shape[0])
