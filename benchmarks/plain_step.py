"""Training steps and inference in plain PyTorch, in the usual variants for a CPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.measure import Step
from tandem.compilers import cpp_compiler
from tests.support.torch_networks import PlainNetwork

T = TypeVar("T")


def variants(make: Callable[[bool, bool], T], more: str = "") -> dict[str, T]:
    """Make the variants by name: eager, channels-last, and compiled where a compiler is found.

    `make` takes whether channels are last, and whether it is compiled; `more` is what the last two
    have besides, for their names.
    """
    found = {
        "PyTorch, eager": make(False, False),
        f"PyTorch, channels-last{more}": make(True, False),
    }
    if cpp_compiler():
        found[f"PyTorch, compiled, channels-last{more}"] = make(True, True)
    return found


def sgd_step(
    model: nn.Module, loss: Callable[[], Tensor], tuned: bool, weight_decay: float = 5e-4
) -> Callable[[], None]:
    """Make a step of SGD with momentum and weight decay; `tuned` is in one fused kernel."""
    fused = True if tuned else None
    sgd = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=weight_decay, fused=fused)

    def step() -> None:
        sgd.zero_grad(set_to_none=True)
        loss().backward()
        sgd.step()

    return step


def inference_step(model: nn.Module, images: Tensor, compiled: bool) -> Step:
    """Make the inference of a minibatch."""
    model.eval()
    call: Any = torch.compile(model) if compiled else model

    def infer() -> Tensor:
        with torch.inference_mode():
            return call(images)

    return infer


def training_variants(
    make: Callable[[], PlainNetwork], images: Tensor, labels: Tensor
) -> dict[str, Step]:
    """Make the training step of a network: eager, channels-last with fused SGD, and compiled."""

    def step(tuned: bool, compiled: bool) -> Step:
        model, own = _placed(make, images, tuned)
        call: Any = torch.compile(model.loss) if compiled else model.loss
        return sgd_step(model, lambda: call(own, labels), tuned)

    return variants(step, ", fused SGD")


def inference_variants(make: Callable[[], PlainNetwork], images: Tensor) -> dict[str, Step]:
    """Make the inference of a network: eager, channels-last, and compiled."""

    def step(channels_last: bool, compiled: bool) -> Step:
        return inference_step(*_placed(make, images, channels_last), compiled)

    return variants(step)


def _placed(
    make: Callable[[], PlainNetwork], images: Tensor, channels_last: bool
) -> tuple[PlainNetwork, Tensor]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    return make().to(memory_format=layout), images.contiguous(memory_format=layout)
