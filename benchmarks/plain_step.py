"""Training steps and inference in plain PyTorch, in the usual variants for a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Step
from tandem.compilers import cpp_compiler
from tests.support.torch_networks import PlainNetwork

EAGER, COMPILED = "PyTorch, eager", "PyTorch, compiled, channels-last"


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


def inference_step(model: nn.Module, images: Tensor, compile_mode: str | None) -> Step:
    """Make the inference of a minibatch."""
    model.eval()
    call: Any = model if compile_mode is None else torch.compile(model, mode=compile_mode)

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

    found = {EAGER: step(False, False), "PyTorch, channels-last, fused SGD": step(True, False)}
    return found | ({f"{COMPILED}, fused SGD": step(True, True)} if cpp_compiler() else {})


def inference_variants(make: Callable[[], PlainNetwork], images: Tensor) -> dict[str, Step]:
    """Make the inference of a network: eager, channels-last, and compiled."""

    def step(channels_last: bool, compile_mode: str | None) -> Step:
        return inference_step(*_placed(make, images, channels_last), compile_mode)

    found = {EAGER: step(False, None), "PyTorch, channels-last": step(True, None)}
    return found | ({COMPILED: step(True, "default")} if cpp_compiler() else {})


def _placed(
    make: Callable[[], PlainNetwork], images: Tensor, channels_last: bool
) -> tuple[PlainNetwork, Tensor]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    return make().to(memory_format=layout), images.contiguous(memory_format=layout)
