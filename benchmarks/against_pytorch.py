"""Do training steps compute the same as plain PyTorch?

Train with the loss of every step recorded, then repeat the steps in plain PyTorch with autograd,
from the same initial weights, minibatches, crops and dropout masks:

    python train.py --weights_dir runs/compare --devices cpu cpu --batch_size 32 \
        --print_freq 1 --n_epochs 1 --data_folder data/imagenet
    python -m benchmarks.against_pytorch runs/compare --steps 40

Run both from the project's top folder. Prints one JSON line per step, then one with the largest
difference. The exit status is 0; 1 if that is above the tolerance; 2 if the run cannot be
compared.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from alex_net import AlexNet
from tandem.artifacts.metrics_log import TrainRecord, read_records
from tandem.config.schema import Config, make_config
from tandem.data.mean_image import read_mean
from tandem.data.minibatch import MinibatchRequest
from tandem.data.order import epoch_order, global_minibatch, minibatch_count
from tandem.errors import InputError
from tandem.launch.prepare import prepare_run
from tandem.memory import HostBuffer, Slot, SlotLayout
from tandem.philox import Purpose, words
from tandem.training.learning_rate import learning_rate
from tandem.validation import read_yaml

MODELLED = {
    "precision": "float32",
    "use_momentum": True,
    "use_nesterov_momentum": False,
    "init_weights": None,
    "lr_multipliers": {},
    "norm_before_pool": False,
}
"""Settings for which the plain PyTorch side supports a single value."""


class PlainAlexNet:
    """AlexNet as a PyTorch user writes it, over a dictionary of parameters."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters

    def _conv(self, x: torch.Tensor, name: str, **options: int) -> torch.Tensor:
        return F.relu(
            F.conv2d(
                x, self.parameters[name + ".weight"], self.parameters[name + ".bias"], **options
            )
        )

    def _dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.parameters[name + ".weight"].T, self.parameters[name + ".bias"])

    def loss(
        self, images: torch.Tensor, labels: torch.Tensor, masks: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the mean cross-entropy, with the masks of fc6 and fc7."""
        # PyTorch divides alpha by the window size; the paper does not.
        x = F.max_pool2d(self._conv(images, "conv1", stride=4), 3, 2)
        x = F.local_response_norm(x, 5, alpha=5e-4, beta=0.75, k=2.0)
        x = F.max_pool2d(self._conv(x, "conv2", padding=2, groups=2), 3, 2)
        x = F.local_response_norm(x, 5, alpha=5e-4, beta=0.75, k=2.0)
        x = self._conv(x, "conv3", padding=1)
        x = self._conv(x, "conv4", padding=1, groups=2)
        x = F.max_pool2d(self._conv(x, "conv5", padding=1, groups=2), 3, 2).flatten(1)
        for name, mask in zip(("fc6", "fc7"), masks, strict=True):
            x = F.relu(self._dense(x, name)) * mask
        return F.cross_entropy(self._dense(x, "fc8"), labels)


def dropout_masks(net: AlexNet, seed: int, epoch: int, indices: np.ndarray) -> list[torch.Tensor]:
    """Draw the masks of fc6 and fc7: a unit is kept if its Philox word is in the upper half."""
    masks = []
    for layer, name in enumerate(("fc6", "fc7")):
        units = net.parameters[name + ".bias"].type.shape[0]
        drawn = words(seed, epoch, indices, Purpose.DROPOUT + layer, units)
        masks.append(torch.from_numpy((drawn >= 2**31).astype(np.float32)))
    return masks


def minibatches(config: Config, trainers: int) -> Iterator[tuple[int, int, int, Slot]]:
    """Yield (epoch, step, steps per epoch, filled slot) for each global minibatch."""
    spec = prepare_run(config)
    size = config.batch_size * trainers
    layout = SlotLayout(size, spec.picture_size)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    builder = spec.minibatch_builder()
    steps = minibatch_count(spec.train.size, size)
    for epoch in range(config.n_epochs):
        order = epoch_order(spec.train.counts, config.shuffle, config.seed, epoch)
        for k in range(steps):
            request = MinibatchRequest(0, "train", epoch, k, global_minibatch(order, k, size))
            builder.fill(slot, request)
            yield epoch, k, steps, slot


def images_of(slot: Slot, mean: np.ndarray, crop: int) -> torch.Tensor:
    """Return the valid crops minus the mean at their windows, (n, RGB, row, column)."""
    images = np.empty((int(slot.valid), 3, crop, crop), np.float32)
    for i in range(int(slot.valid)):
        row, column = slot.origins[i]
        window = mean[:, row : row + crop, column : column + crop]
        if slot.mirrored[i]:
            window = window[:, :, ::-1]
        images[i] = slot.pictures[i].transpose(2, 0, 1) - window
    return torch.from_numpy(images)


def plain_losses(config: Config, trainers: int, count: int) -> Iterator[float]:
    """Yield the losses of the first `count` steps in plain PyTorch."""
    other_folder = {"weights_dir": "runs/none", "resume_train": False}
    on_cpu = {"use_data_layer": False, "devices": ("cpu",) * trainers}
    config = config.model_copy(update=other_folder | on_cpu)
    spec = prepare_run(config)
    mean = read_mean(config.mean_path, spec.train.image_size)
    net = AlexNet(config.crop_size, spec.classes, config.width)
    parameters = {
        name: torch.from_numpy(value).requires_grad_()
        for name, value in net.initial_values(config.seed)
    }
    plain = PlainAlexNet(parameters)
    velocity = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for step, (epoch, k, steps, slot) in enumerate(minibatches(config, trainers)):
        if step == count:
            return
        valid = int(slot.valid)
        masks = dropout_masks(net, config.seed, epoch, slot.indices[:valid])
        labels = torch.from_numpy(slot.labels[:valid].copy())
        loss = plain.loss(images_of(slot, mean, config.crop_size), labels, masks)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        yield float(loss.detach())
        rate = learning_rate(config, epoch, k, steps, ())
        with torch.no_grad():
            for (name, weight), gradient in zip(parameters.items(), gradients, strict=True):
                factor = 2 if name.endswith(".bias") else 1
                decay = 0.0 if name.endswith(".bias") else config.weight_decay
                velocity[name].mul_(config.momentum).sub_(
                    factor * rate * (gradient + decay * weight)
                )
                weight.add_(velocity[name])


def read_modelled(path: Path) -> Config:
    """Read the configuration of a run that plain PyTorch can repeat."""
    config = make_config(read_yaml(path))
    for key, modelled in MODELLED.items():
        if (found := getattr(config, key)) != modelled:
            raise InputError(f"{path}: {key} is {found}; only {modelled} can be compared")
    if config.lr_policy == "auto":
        raise InputError(f"{path}: lr_policy is auto; only the others can be compared")
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


def compare(run: Path, count: int) -> float:
    """Print the recorded and plain loss of each step; return the largest difference."""
    if count < 1:
        raise InputError(f"--steps is {count}; it must be at least 1")
    config = read_modelled(run / "config.yaml")
    recorded = read_losses(run / "record.jsonl", count)
    trainers = 1 if config.devices == "auto" else len(config.devices)
    differences = []
    plain_ones = plain_losses(config, trainers, count)
    for step, (ours, plain) in enumerate(zip(recorded, plain_ones, strict=True), start=1):
        differences.append(abs(ours - plain))
        print(json.dumps({"step": step, "ours": ours, "plain": plain}), flush=True)
    # NumPy's maximum propagates NaN, which is within no tolerance.
    return float(np.max(differences))


def main(arguments: list[str] | None = None) -> int:
    """Compare a run's recorded losses with plain PyTorch's; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="folder of a run with --print_freq 1")
    parser.add_argument("--steps", type=int, default=40, help="steps to compare (default 40)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="of the loss, in nats (default 1e-3)"
    )
    options = parser.parse_args(arguments)
    try:
        largest = compare(options.run, options.steps)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(json.dumps({"steps": options.steps, "largest_difference": largest}))
    return 0 if largest <= options.tolerance else 1


if __name__ == "__main__":
    raise SystemExit(main())
