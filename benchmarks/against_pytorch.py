"""Do training steps compute the same as plain PyTorch?

Train with the loss of every step recorded, then repeat the steps in plain PyTorch with autograd,
from the same initial weights, minibatches, crops and dropout masks:

    python train.py --weights_dir runs/compare --devices cpu cpu --batch_size 32 \
        --print_freq 1 --n_epochs 1 --data_folder data/imagenet
    python -m benchmarks.against_pytorch runs/compare --steps 40

AlexNet and the ResNets for CIFAR can be compared. With ``--epochs 10`` whole epochs are repeated,
with the running averages of batch normalisation, and the top-1 errors of validation compared:

    python -m benchmarks.against_pytorch runs/cifar --epochs 10

Run both from the project's top folder. Prints one JSON line per step, or per epoch, then one with
the largest difference. The exit status is 0; 1 if that is above the tolerance; 2 if the run cannot
be compared.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.grouped_norm import normalise_groups
from benchmarks.measure import parser_of
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records
from tandem.config.schema import Config, make_config
from tandem.data.mean_image import read_mean
from tandem.data.minibatch import MinibatchRequest
from tandem.data.order import epoch_order, global_minibatch, minibatch_count
from tandem.errors import InputError
from tandem.launch.prepare import prepare_run
from tandem.layers.network import ALEXNET, build_network
from tandem.memory import HostBuffer, Slot, SlotLayout
from tandem.philox import Purpose, words
from tandem.training.learning_rate import learning_rate
from tandem.validation import read_yaml
from tests.support.torch_networks import PlainCifarResNet

MODELLED = {
    "use_momentum": True,
    "use_nesterov_momentum": False,
    "init_weights": None,
    "freeze": (),
    "norm_before_pool": False,
    "network_options": {},
    "optimizer": "sgd",
    "loss": "cross_entropy",
    "label_smoothing": 0.0,
    "rand_colour": 0.0,
    "clip_norm": None,
    "clip_global_norm": None,
    "clip_value": None,
    "decoupled_decay": False,
    "average_overwrites": 0,
    "rule": "bsp",
    "global_batch": None,
    "sum_rows": "auto",
}
"""Settings for which the plain PyTorch side supports a single value."""

RESNET = "tandem.models.resnet:ResNet"
DEPTHS = {f"{RESNET}{depth}": depth for depth in (20, 32, 44, 56, 110)}


class PlainAlexNet:
    """AlexNet as a PyTorch user writes it, over a dictionary of parameters."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.parameters = {n: torch.from_numpy(v).requires_grad_() for n, v in values.items()}

    def _conv(self, x: torch.Tensor, name: str, **options: int) -> torch.Tensor:
        return F.relu(
            F.conv2d(
                x, self.parameters[name + ".weight"], self.parameters[name + ".bias"], **options
            )
        )

    def _dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.parameters[name + ".weight"].T, self.parameters[name + ".bias"])

    def logits(
        self, images: torch.Tensor, seed: int, epoch: int, indices: np.ndarray | None
    ) -> torch.Tensor:
        """Return the logits; in validation, `indices` being None, no unit is dropped."""
        # PyTorch divides alpha by the window size; the paper does not.
        x = F.max_pool2d(self._conv(images, "conv1", stride=4), 3, 2)
        x = F.local_response_norm(x, 5, alpha=5e-4, beta=0.75, k=2.0)
        x = F.max_pool2d(self._conv(x, "conv2", padding=2, groups=2), 3, 2)
        x = F.local_response_norm(x, 5, alpha=5e-4, beta=0.75, k=2.0)
        x = self._conv(x, "conv3", padding=1)
        x = self._conv(x, "conv4", padding=1, groups=2)
        x = F.max_pool2d(self._conv(x, "conv5", padding=1, groups=2), 3, 2).flatten(1)
        for layer, name in enumerate(("fc6", "fc7")):
            x = F.relu(self._dense(x, name))
            if indices is None:
                x = x * 0.5
            else:
                x = x * dropout_mask(x.shape[1], seed, epoch, indices, layer)
        return self._dense(x, "fc8")


class PlainResNet:
    """A ResNet for CIFAR that normalises the same groups of rows as a run."""

    def __init__(self, depth: int, rows: int, values: dict[str, np.ndarray]) -> None:
        self._network = PlainCifarResNet(depth, len(values["fc.bias"]))
        normalise_groups(self._network, rows)
        self._network.to(torch.from_numpy(values["fc.bias"]).dtype)
        self._network.load(values)
        self._network.to(memory_format=torch.channels_last)
        self.parameters = dict(self._network.named_parameters())

    def logits(
        self, images: torch.Tensor, seed: int, epoch: int, indices: np.ndarray | None
    ) -> torch.Tensor:
        """Return the logits; in validation, `indices` being None, running averages are used."""
        self._network.train(indices is not None)
        return self._network(images.contiguous(memory_format=torch.channels_last))


def dropout_mask(
    units: int, seed: int, epoch: int, indices: np.ndarray, layer: int
) -> torch.Tensor:
    """Draw a mask of fc6 or fc7: a unit is kept if its Philox word is in the upper half."""
    drawn = words(seed, epoch, indices, Purpose.DROPOUT + layer, units)
    return torch.from_numpy((drawn >= 2**31).astype(np.float32))


class PlainRun:
    """The steps of a run in plain PyTorch."""

    def __init__(self, config: Config, trainers: int) -> None:
        other_folder = {"weights_dir": "runs/none", "resume_train": False}
        on_cpu = {"use_data_layer": False, "devices": ("cpu",) * trainers}
        self._config = config.model_copy(update=other_folder | on_cpu)
        self._spec = spec = prepare_run(self._config)
        self._mean = read_mean(config.mean_path, spec.train.image_size).astype(config.dtype)
        network = build_network(spec.description, config.dtype)
        self._rates = config.parameter_groups.learned(
            network.parameters.declared, config.weight_decay
        )
        values = dict(network.initial_values(config.seed))
        depth = DEPTHS.get(config.network)
        self._plain = (
            PlainAlexNet(values) if depth is None else PlainResNet(depth, config.group_rows, values)
        )
        self._velocity = {n: torch.zeros_like(v) for n, v in self._plain.parameters.items()}
        size = config.batch_size * trainers
        self._global_batch = size
        layout = SlotLayout.of_pictures(size, spec.picture_size)
        self._slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
        self._builder = spec.minibatch_builder()

    def epoch(self, number: int) -> Iterator[float]:
        """Make the steps of an epoch, from 0; yield the loss of each."""
        config, data = self._config, self._spec.train
        order = epoch_order(data.counts, config.shuffle, config.seed, number)
        steps = minibatch_count(data.size, self._global_batch)
        for k in range(steps):
            images, labels = self._minibatch("train", number, k, order)
            indices = self._slot.indices[: len(labels)]
            logits = self._plain.logits(images, config.seed, number, indices)
            loss = F.cross_entropy(logits, labels)
            self._update(loss, learning_rate(config, number, k, steps, ()))
            yield float(loss.detach())

    def top1_error(self) -> float:
        """The fraction of validation pictures whose most probable class is another."""
        size, wrong = self._spec.validation.size, 0
        for k in range(minibatch_count(size, self._global_batch)):
            images, labels = self._minibatch("validation", 0, k, np.arange(size))
            with torch.inference_mode():
                logits = self._plain.logits(images, 0, 0, None)
            wrong += int((logits.argmax(1) != labels).sum())
        return wrong / size

    def _minibatch(
        self, mode: Literal["train", "validation"], epoch: int, k: int, order: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slot, rows = self._slot, global_minibatch(order, k, self._global_batch)
        self._builder.fill(slot, MinibatchRequest(0, mode, epoch, k, rows))
        images = images_of(slot, self._mean, self._config.crop_size)
        return images, torch.from_numpy(slot.labels[: len(rows)].copy())

    def _update(self, loss: torch.Tensor, rate: float) -> None:
        parameters = self._plain.parameters
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for (name, weight), gradient in zip(parameters.items(), gradients, strict=True):
                own, velocity = self._rates[name], self._velocity[name]
                velocity.mul_(self._config.momentum)
                velocity.sub_(own.factor * rate * (gradient + own.decay * weight))
                weight.add_(velocity)


def images_of(slot: Slot, mean: np.ndarray, crop: int) -> torch.Tensor:
    """Return the valid crops minus the mean at their windows, (n, RGB, row, column)."""
    images = np.empty((int(slot.valid), 3, crop, crop), mean.dtype)
    for i in range(int(slot.valid)):
        row, column = slot.origins[i]
        window = mean[:, row : row + crop, column : column + crop]
        if slot.mirrored[i]:
            window = window[:, :, ::-1]
        images[i] = slot.pictures[i].transpose(2, 0, 1) - window
    return torch.from_numpy(images)


def read_modelled(path: Path) -> Config:
    """Read the configuration of a run that plain PyTorch can repeat."""
    config = make_config(read_yaml(path))
    if config.precision not in ("float32", "float64"):
        raise InputError(
            f"{path}: precision is {config.precision}; only float32 and float64 can be compared"
        )
    for key, modelled in MODELLED.items():
        if (found := getattr(config, key)) != modelled:
            raise InputError(f"{path}: {key} is {found}; only {modelled} can be compared")
    if config.network != ALEXNET and config.network not in DEPTHS:
        known = ", ".join((ALEXNET, *DEPTHS))
        raise InputError(f"{path}: network is {config.network}; only {known} can be compared")
    if config.lr_policy in ("auto", "plateau"):  # which depend on validations
        raise InputError(f"{path}: lr_policy is {config.lr_policy}; it cannot be compared")
    return config


def read_losses(path: Path, count: int) -> list[float]:
    """Read the losses of steps 1 to `count` from a record."""
    train = [record for record in read_records(path) if isinstance(record, TrainRecord)][:count]
    if [record.step for record in train] != list(range(1, count + 1)):
        raise InputError(
            f"{path}: steps 1 to {count} are not all recorded; train with --print_freq 1, for at"
            " least as many steps"
        )
    return [record.loss for record in train]


def read_errors(path: Path, epochs: int) -> list[float]:
    """Read the top-1 errors of validation after epochs 1 to `epochs` from a record."""
    found = [record for record in read_records(path) if isinstance(record, ValidationRecord)]
    errors = {record.epoch: record.top1_error for record in found}
    if missing := [epoch for epoch in range(1, epochs + 1) if epoch not in errors]:
        raise InputError(f"{path}: found no validation of epoch {missing[0]}, expected {epochs}")
    return [errors[epoch] for epoch in range(1, epochs + 1)]


def compare_steps(run: Path, count: int) -> float:
    """Print the recorded and plain loss of each step; return the largest difference."""
    if count < 1:
        raise InputError(f"--steps is {count}; it must be at least 1")
    recorded = read_losses(run / "record.jsonl", count)
    config, plain = plain_run(run)
    losses = (loss for number in range(config.n_epochs) for loss in plain.epoch(number))
    differences = []
    for step, (ours, theirs) in enumerate(zip(recorded, losses, strict=False), start=1):
        differences.append(abs(ours - theirs))
        print(json.dumps({"step": step, "ours": ours, "plain": theirs}), flush=True)
    # NumPy's maximum propagates NaN, which is within no tolerance.
    return float(np.max(differences))


def compare_epochs(run: Path, epochs: int) -> float:
    """Print the recorded and plain top-1 error after each epoch; return the last difference."""
    if epochs < 1:
        raise InputError(f"--epochs is {epochs}; it must be at least 1")
    recorded = read_errors(run / "record.jsonl", epochs)
    _, plain = plain_run(run)
    difference = np.inf
    for epoch, ours in enumerate(recorded, start=1):
        loss = float(np.mean(list(plain.epoch(epoch - 1))))
        error = plain.top1_error()
        difference = abs(ours - error)
        row = {"epoch": epoch, "ours": ours, "plain": error, "plain_training_loss": loss}
        print(json.dumps(row), flush=True)
    return float(difference)


def plain_run(run: Path) -> tuple[Config, PlainRun]:
    """Make the plain PyTorch side of the run in a folder."""
    config = read_modelled(run / "config.yaml")
    return config, PlainRun(config, 1 if config.devices == "auto" else len(config.devices))


def main(arguments: list[str] | None = None) -> int:
    """Compare a run's recorded losses with plain PyTorch's; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, for steps with --print_freq 1")
    parser.add_argument("--steps", type=int, default=40, help="steps to compare (default 40)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="of the loss, in nats (default 1e-3)"
    )
    parser.add_argument("--epochs", type=int, help="compare errors after epochs instead")
    parser.add_argument(
        "--points", type=float, default=1.5, help="of the last error, in percent (default 1.5)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.epochs is None:
            largest = compare_steps(options.run, options.steps)
            found = {"steps": options.steps, "largest_difference": largest}
            within = largest <= options.tolerance
        else:
            last = compare_epochs(options.run, options.epochs)
            found = {"epochs": options.epochs, "last_difference": last}
            within = 100 * last <= options.points
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(json.dumps(found))
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
