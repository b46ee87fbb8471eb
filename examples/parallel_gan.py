"""Generative adversarial networks by data-parallel functions: two networks, two optimizers.

python -m examples.parallel_gan                                  WGAN on Fashion-MNIST, two workers
python -m examples.parallel_gan --loss wgan-gp --data cifar10 --source FOLDER
python -m examples.parallel_gan --loss lsgan --workers 1 --epochs 5

After each epoch the run folder has a sheet of samples of the same noise, `samples-EPOCH.png`, and a
checkpoint, with which the same command goes on to the same bits. The critic is trained on five
minibatches for each of the generator with WGAN (Arjovsky, Chintala, Bottou 2017, arXiv 1701.07875),
whose weights are clipped, and with its gradient penalty (Gulrajani et al. 2017, arXiv 1704.00028);
on one with LSGAN (Mao et al. 2017, arXiv 1611.04076). The networks are small ones of Radford, Metz,
Chintala 2015 (arXiv 1511.06434), without batch normalisation.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from PIL import Image
from pytensor.tensor.variable import TensorVariable
from safetensors.numpy import load_file, save_file

import tandem.parallel as synk
from tandem import datasets
from tandem.cli import count, exit_status
from tandem.files import replacing
from tandem.ops import Conv2dInputGrad, conv2d
from tandem.parallel.extensions import updates

LOSSES = {"wgan": 5, "wgan-gp": 5, "lsgan": 1}  # minibatches of the critic for one of the generator
BATCH, SHEET, CLIP, PENALTY = 64, 8, 0.01, 10.0
Network = dict[str, Any]  # parameters by name


def initial(side: int, channels: int, noise: int, filters: int) -> tuple[Network, Network]:
    """Draw float32 arrays of a generator and a critic of square images."""
    rng = np.random.default_rng(1)
    deep, quarter = 2 * filters, (side // 4) ** 2

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.02, shape).astype(np.float32)

    def zeros(count: int) -> np.ndarray:
        return np.zeros(count, np.float32)

    generator = {
        "fc": drawn(noise, deep * quarter),
        "fc_bias": zeros(deep * quarter),
        "up1": drawn(deep, filters, 4, 4),
        "up1_bias": zeros(filters),
        "up2": drawn(filters, channels, 4, 4),
        "up2_bias": zeros(channels),
    }
    critic = {
        "down1": drawn(filters, channels, 4, 4),
        "down1_bias": zeros(filters),
        "down2": drawn(deep, filters, 4, 4),
        "down2_bias": zeros(deep),
        "fc": drawn(deep * quarter, 1),
        "fc_bias": zeros(1),
    }
    return generator, critic


def generate(z: TensorVariable, net: Network, side: int) -> TensorVariable:
    """Build images (row, channel, side, side) of -1 to 1 for noise (row, number)."""

    def up(x: TensorVariable, name: str, side: int) -> TensorVariable:
        weight = net[name]
        shape = (x.shape[0], weight.type.shape[1], side, side)
        like = pt.specify_shape(pt.zeros(shape, x.dtype), (None, *shape[1:]))
        return Conv2dInputGrad(2, 1)(like, weight, x) + net[f"{name}_bias"][:, None, None]

    deep = net["up1"].type.shape[0]
    x = pt.maximum(z @ net["fc"] + net["fc_bias"], 0)
    x = pt.specify_shape(
        x.reshape((-1, deep, side // 4, side // 4)), (None, deep, side // 4, side // 4)
    )
    return pt.tanh(up(pt.maximum(up(x, "up1", side // 2), 0), "up2", side))


def judge(images: TensorVariable, net: Network) -> TensorVariable:
    """Build the critic's number for each image, (row,)."""
    x = images
    for name in ("down1", "down2"):
        x = conv2d(x, net[name], net[f"{name}_bias"], 2, 1)
        x = pt.maximum(x, np.float32(0.2) * x)
    return (x.flatten(2) @ net["fc"])[:, 0] + net["fc_bias"][0]


def critic_loss(kind: str, real: Any, made: Any, mixed: TensorVariable, net: Network) -> Any:
    """Build the critic's loss, a mean over rows; `mixed` are the places of the penalty, (row,)."""
    of_real, of_made = judge(real, net), judge(made, net)
    if kind == "lsgan":
        return (pt.sqr(of_real - 1) + pt.sqr(of_made)).mean() / 2
    loss = (of_made - of_real).mean()
    if kind == "wgan":
        return loss
    share = mixed[:, None, None, None]
    between = share * real + (np.float32(1) - share) * made
    gradient: Any = pytensor.grad(judge(between, net).sum(), between)
    norms = pt.sqrt(pt.sqr(gradient).sum(axis=(1, 2, 3)) + np.float32(1e-12))
    return loss + np.float32(PENALTY) * pt.sqr(norms - 1).mean()


def generator_loss(kind: str, made: Any, net: Network) -> Any:
    """Build the generator's loss, a mean over rows."""
    found = judge(made, net)
    return pt.sqr(found - 1).mean() / 2 if kind == "lsgan" else -found.mean()


class Training:
    """Both networks and their steps as functions, made after `synk.fork`."""

    def __init__(self, kind: str, side: int, channels: int, noise: int, filters: int) -> None:
        first = initial(side, channels, noise, filters)
        self.generator, self.critic = (
            {name: synk.shared(value, name) for name, value in network.items()} for network in first
        )
        self.kind, self.noise = kind, noise
        self.states: list[Any] = []  # of both networks and optimizers
        z = pt.matrix("z", dtype="float32")
        shape = (None, channels, side, side)
        real = pt.tensor("real", dtype="uint8", shape=shape)
        mixed = pt.vector("mixed", dtype="float32")
        images = real.astype("float32") / np.float32(127.5) - np.float32(1)
        made = generate(z, self.generator, side)
        of_critic = critic_loss(kind, images, made, mixed, self.critic)
        of_generator = generator_loss(kind, made, self.critic)
        inputs = [real, z, mixed][: 3 if kind == "wgan-gp" else 2]
        self.train_critic = self._step(inputs, of_critic, self.critic, kind == "wgan")
        self.train_generator = self._step([z], of_generator, self.generator, False)
        self.sample = synk.function([z], (made, "gather"))
        synk.distribute()

    def _step(self, inputs: list[Any], loss: Any, network: Network, clips: bool) -> Any:
        """Make a function of rows that steps one network and returns its loss."""
        params = [*network.values()]
        if self.kind == "wgan":
            found = updates.rmsprop(loss, params, 5e-5)
        else:
            beta1, rate = (0.0, 1e-4) if self.kind == "wgan-gp" else (0.5, 2e-4)
            found = updates.adam(loss, params, rate, beta1=beta1, beta2=0.9)
        of_gradients, of_params, gradients = found
        limit = np.float32(CLIP)
        of_params = [
            (old, pt.clip(new, -limit, limit) if clips and old in params else new)
            for old, new in of_params
        ]
        self.states += [old for old, _ in of_params]
        compute = synk.function(inputs, loss, updates=of_gradients)
        update = synk.function([], updates=of_params)

        def step(*rows: Any) -> float:
            value = compute(*rows)
            synk.all_reduce(gradients)
            update()
            return float(value)

        return step

    def epoch(self, number: int, pictures: Any) -> tuple[float, float]:
        """Train on all pictures once; return the mean losses of critic and generator."""
        rng = np.random.default_rng((2, number))
        of_critic, of_generator = [], []
        order, count = rng.permutation(len(pictures)), LOSSES[self.kind]
        before = (number - 1) * -(-len(order) // BATCH)  # minibatches of the critic so far
        for start in range(0, len(order), BATCH):
            rows = np.sort(order[start : start + BATCH])
            inputs = [pictures[rows], self.draw(rng, len(rows))]
            if self.kind == "wgan-gp":
                inputs.append(rng.random(len(rows), np.float32))
            of_critic.append(self.train_critic(*inputs))
            if (before + len(of_critic)) % count == 0:
                of_generator.append(self.train_generator(self.draw(rng, BATCH)))
        return float(np.mean(of_critic)), float(np.mean(of_generator or [math.nan]))

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Draw noise, float32 (row, number)."""
        return rng.normal(size=(rows, self.noise)).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write all weights and states, whole or not at all."""
        values = {f"{n}": v.get_value() for n, v in enumerate(self.states)}
        with replacing(path) as partial:
            save_file(values, partial)

    def load(self, path: Path) -> None:
        """Set all weights and states, of every worker."""
        values = load_file(path)
        for number, state in enumerate(self.states):
            synk.broadcast(state, values[f"{number}"])

    def draw_sheet(self, path: Path) -> None:
        """Draw samples of the same noise side by side."""
        images = self.sample(self.draw(np.random.default_rng(3), SHEET**2))
        _, channels, side, _ = images.shape
        rows = images.reshape(SHEET, SHEET, channels, side, side).transpose(0, 3, 1, 4, 2)
        sheet = rows.reshape(SHEET * side, SHEET * side, channels)
        pixels = np.rint((sheet + 1) * 127.5).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(path)


def read(name: str, source: str | None, count: int | None) -> np.ndarray:
    """Read pictures, uint8 (picture, channel, side, side)."""
    (pictures, _), _ = datasets.load(name, source)
    pictures = pictures[:count]
    if pictures.ndim == 3:
        pictures = pictures[..., np.newaxis]
    return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))


def train(kind: str, pictures: np.ndarray, folder: Path, epochs: int, filters: int) -> None:
    """Train, or continue in the folder, and print the losses of each epoch."""
    _, channels, side, _ = pictures.shape
    training = Training(kind, side, channels, 64, filters)
    folder.mkdir(parents=True, exist_ok=True)
    done = max((int(p.stem[6:]) for p in folder.glob("epoch-*.safetensors")), default=0)
    if done:
        training.load(folder / f"epoch-{done:04}.safetensors")
    for number in range(done + 1, epochs + 1):
        of_critic, of_generator = training.epoch(number, pictures)
        training.draw_sheet(folder / f"samples-{number:04}.png")
        training.save(folder / f"epoch-{number:04}.safetensors")
        print(f"epoch {number}: critic {of_critic:.4f}, generator {of_generator:.4f}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Train by the command line's arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", choices=LOSSES, default="wgan")
    parser.add_argument("--data", choices=["fashion_mnist", "cifar10"], default="fashion_mnist")
    parser.add_argument("--source", help="folder of the data (default: it is looked for)")
    parser.add_argument("--run", type=Path, help="run folder (default runs/LOSS-DATA)")
    parser.add_argument("--workers", type=count, default=2, help="this process and others")
    parser.add_argument("--epochs", type=count, default=20)
    parser.add_argument("--pictures", type=count, help="how many, from the first (default: all)")
    parser.add_argument("--filters", type=count, default=32, help="of the largest maps")
    chosen = parser.parse_args(arguments)
    pictures = read(chosen.data, chosen.source, chosen.pictures)
    folder = chosen.run or Path("runs") / f"{chosen.loss}-{chosen.data}"
    synk.fork(chosen.workers, use_gpu=False, threads=1)
    try:
        train(chosen.loss, pictures, folder, chosen.epochs, chosen.filters)
    finally:
        synk.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
