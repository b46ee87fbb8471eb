"""AlexNet and its training step as PyTorch users write them, as a peer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from alex_net import AlexNet
from benchmarks.measure import Step
from benchmarks.plain_step import inference_step, sgd_step

Norm = Literal["module", "slices"]  # nn.LocalResponseNorm, or sums of slices


class SlicedNorm(nn.Module):
    """Local response normalisation as sums of slices, which ``torch.compile`` fuses."""

    def forward(self, x: Tensor) -> Tensor:
        squares = F.pad(x.float() ** 2, (0, 0, 0, 0, 2, 2))
        total = sum(squares[:, i : i + x.shape[1]] for i in range(5))
        return (x * (2 + 1e-4 * total) ** -0.75).to(x.dtype)


def _norm(kind: Norm) -> nn.Module:
    # PyTorch divides alpha by the window size; the paper does not.
    return (
        nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0) if kind == "module" else SlicedNorm()
    )


class PlainAlexNet(nn.Sequential):
    """The network from images to logits: sizes of `net`, PyTorch's own initial weights."""

    def __init__(self, net: AlexNet, norm: Norm) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for layer in net.convolutions:
            layers += [
                nn.Conv2d(
                    channels,
                    layer.filters,
                    layer.size,
                    layer.stride,
                    layer.pad,
                    groups=layer.groups,
                ),
                nn.ReLU(inplace=True),
            ]
            layers += [nn.MaxPool2d(3, 2)] if layer.pool else []
            layers += [_norm(norm)] if layer.normalize else []
            channels = layer.filters
        layers.append(nn.Flatten())
        features = channels * net.shapes["pool5"][1] ** 2
        for dense in net.fully_connected:
            layers.append(nn.Linear(features, dense.units))
            if dense.dropout is not None:
                layers += [nn.ReLU(inplace=True), nn.Dropout(dense.dropout)]
            features = dense.units
        super().__init__(*layers)


def plain_step(
    net: AlexNet,
    batch: int,
    device: str,
    norm: Norm,
    precision: str = "float32",
    compile_mode: str | None = None,
    tuned: bool = True,
) -> Callable[[], None]:
    """Make a training step in plain PyTorch.

    Its images are already cropped and converted on the device, which ours does in the step.
    "bfloat16" is `torch.autocast`; PyTorch's global settings decide between float32 and tf32.
    `tuned` is channels last, and SGD in one fused kernel, instead of PyTorch's defaults.
    """
    model, images = _on(net, batch, device, norm, tuned)
    labels = torch.randint(0, net.classes, (batch,), device=device)

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        with _autocast(device, precision):
            return F.cross_entropy(model(images), labels)

    call: Any = loss_of if compile_mode is None else torch.compile(loss_of, mode=compile_mode)
    return sgd_step(model, lambda: call(images, labels), tuned)


def ddp_step(net: AlexNet, batch: int, tuned: bool) -> Callable[[], None]:
    """Make a training step of one rank of DistributedDataParallel on the CPU, as `plain_step`.

    All ranks of the process group make it together.
    """
    model, images = _on(net, batch, "cpu", "module", tuned)
    labels = torch.randint(0, net.classes, (batch,))
    ranks = DistributedDataParallel(model)
    return sgd_step(ranks, lambda: F.cross_entropy(ranks(images), labels), tuned)


def plain_inference(
    net: AlexNet, batch: int, norm: Norm, compiled: bool = False, tuned: bool = True
) -> Step:
    """Make the inference of a minibatch on the CPU."""
    model, images = _on(net, batch, "cpu", norm, tuned)
    return inference_step(model, images, compiled)


def _on(
    net: AlexNet, batch: int, device: str, norm: Norm, channels_last: bool
) -> tuple[nn.Module, Tensor]:
    """Make the network, and images for it."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    model = PlainAlexNet(net, norm).to(device, memory_format=layout)
    images = 60 * torch.randn(batch, 3, net.crop_size, net.crop_size, device=device)
    return model, images.contiguous(memory_format=layout)


def _autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    if precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.partition(":")[0], torch.bfloat16)
