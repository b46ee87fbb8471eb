"""AlexNet's training step on one device, by hand: no processes, no files, two PyTensor functions.

    python -m examples.resident_step          ten small steps on the CPU

Graph, update and memory are those of a run; the minibatch is noise that stays on the device. The
benchmarks time this step at full size.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.executor import Function
from pytensor.compile.mode import Mode

from alex_net import AlexNet
from tandem.backend import DeviceSharedVariable, device_mode, device_shared
from tandem.cli import count
from tandem.layers import Training
from tandem.memory import Buffer, HostBuffer
from tandem.memory.flat import FlatLayout
from tandem.ops import crop_mirror, momentum_step
from tandem.training.graphs import are_finite


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step: pictures, their stored and cropped side, classes, and network width."""

    batch: int = 4
    crop: int = 67
    stored: int = 72
    classes: int = 5
    width: float = 0.1

    def network(self) -> AlexNet:
        """Make the network, its parameters zero."""
        return AlexNet(self.crop, self.classes, self.width)


PAPER = Sizes(batch=256, crop=227, stored=256, classes=1000, width=1.0)
ON_CPU = replace(PAPER, batch=64)
DEMO = Sizes(batch=64, crop=67, stored=76, classes=10, width=1.0)


class ResidentStep:
    """Gradient and update as functions without inputs or outputs.

    Parameters
    ----------
    mode : Mode
        The device's.
    sizes : Sizes
    device : str
        "cpu" or "cuda:0".
    memory : callable
        Allocates a buffer of a given number of bytes on the device.
    channels_last : bool
        Layout of filters in the flat vector.

    Attributes
    ----------
    functions : list of Function
        Gradient, then update.
    weights, momenta, gradients, slot : dict of str to DeviceSharedVariable
    layout : FlatLayout
        Layout of each of the three vectors in the buffer.
    gradient_vector : float32 (layout.size,)
        All gradients.
    loss, rate, epoch : DeviceSharedVariable
        Sum of the losses so far, in nats; learning rate; epoch.
    """

    def __init__(
        self,
        mode: Mode,
        sizes: Sizes = Sizes(),
        device: str = "cpu",
        memory: Callable[[int], Buffer] = HostBuffer.create,
        channels_last: bool = False,
    ) -> None:
        self._device, self._sizes, self._net = device, sizes, sizes.network()
        shapes = {name: v.type.shape for name, v in self._net.parameters.items()}
        layout = FlatLayout.of(shapes, "float32", channels_last)
        self._buffer = memory(3 * layout.nbytes)
        self.layout = layout
        self.gradient_vector = self._buffer.array((layout.size,), "float32", 2 * layout.nbytes)
        self.weights, self.momenta, self.gradients = (
            {
                name: device_shared(None, prefix + name, device, memory=view)
                for name, view in layout.on(self._buffer, number * layout.nbytes).items()
            }
            for number, prefix in enumerate(("", "momentum/", "gradient/"))
        )
        for name, value in self._net.initial_values(seed=1):
            self.weights[name].set_value(value)
        self.loss = self._shared("loss", np.float64(0))
        self.rate = self._shared("rate", np.float32(0.01))
        self.epoch = self._shared("epoch", np.int64(2))
        self.slot = self._minibatch()
        self.mean = self._mean()
        self.functions = self.compile(mode)

    def _shared(self, name: str, value: Any) -> DeviceSharedVariable:
        return device_shared(np.asarray(value), name, self._device)

    def _minibatch(self) -> dict[str, DeviceSharedVariable]:
        """Noise: on zeros a GPU draws less power and runs faster than on pictures."""
        rng, sizes = np.random.default_rng(1), self._sizes
        batch, side = sizes.batch, sizes.stored
        values: dict[str, Any] = {
            "pictures": rng.integers(0, 256, (batch, side, side, 3), np.uint8),
            "labels": rng.integers(0, sizes.classes, batch),
            "indices": rng.integers(0, 100_000, batch),
            "origins": rng.integers(0, side - sizes.crop + 1, (batch, 2)),
            "mirrored": rng.integers(0, 2, batch, np.uint8),
            "valid": np.int64(batch),
        }
        return {name: self._shared(name, value) for name, value in values.items()}

    def _mean(self) -> DeviceSharedVariable:
        side = self._sizes.stored
        mean = np.random.default_rng(2).uniform(90, 130, (3, side, side))
        return self._shared("mean", mean.astype("float32"))

    def compile(self, mode: Mode, fused: bool = False) -> list[Function]:
        """Compile the step in another mode, over the same variables.

        With `fused`, one function that does not store gradients, which is possible where nothing is
        exchanged between gradient and update. As in a run, it updates nothing where the loss or a
        gradient is not finite.
        """
        net, slot = self._net, self.slot
        keys = Training(pt.constant(np.int64(3)), self.epoch, slot["indices"])
        logits = net.logits(self._images(), keys)
        cost = net.cost(logits, slot["labels"], slot["valid"])
        gradients: Any = pytensor.grad(cost, list(net.parameters.values()))
        sums: list[Any] = [(self.loss, self.loss + cost.astype("float64") * slot["valid"])]

        def function(name: str, updates: list[Any]) -> Function:
            return pytensor.function(
                [], [], updates=updates, givens=self._givens(), mode=mode, name=name
            )

        if fused:
            found = dict(zip(self.gradients, gradients, strict=True))
            finite = are_finite([cost, *gradients])
            updates = sums + self._updates(found)
            return [function("step", [(v, pt.switch(finite, new, v)) for v, new in updates])]
        stores = list(zip(self.gradients.values(), gradients, strict=True))
        return [
            function("gradient", sums + stores),
            function("update", self._updates(self.gradients)),
        ]

    def inference(self, mode: Mode, fixed: bool = False) -> Function:
        """Compile the logits of the minibatch, without dropout; `fixed`: by weights as of now."""
        logits, givens = self._net.logits(self._images(), None), self._givens()
        if fixed:
            givens = {variable: pt.constant(v.get_value()) for variable, v in givens.items()}
        return pytensor.function([], logits, givens=givens, mode=mode, name="inference")

    def _images(self) -> Any:
        slot = self.slot
        inputs = (slot["pictures"], self.mean, slot["origins"], slot["mirrored"])
        return crop_mirror(*inputs, crop_size=self._sizes.crop)

    def _givens(self) -> dict[Any, Any]:
        return {variable: self.weights[name] for name, variable in self._net.parameters.items()}

    def _updates(self, gradients: Mapping[str, Any]) -> list[Any]:
        updates: list[Any] = []
        for name, parameter in self._net.parameters.declared.items():
            weight, momentum = momentum_step(
                self.weights[name],
                self.momenta[name],
                gradients[name],
                self.rate * np.float32(2) if parameter.kind == "bias" else self.rate,
                momentum=0.9,
                decay=0.0005 if parameter.kind == "weight" else 0.0,
                nesterov=False,
            )
            updates += [(self.weights[name], weight), (self.momenta[name], momentum)]
        return updates

    def run(self) -> None:
        """Make one step."""
        for function in self.functions:
            function()

    def state(self) -> dict[str, np.ndarray]:
        """Copy everything that a step changes to the host."""
        groups = (self.weights, self.momenta, self.gradients, {"loss": self.loss})
        return {str(v.name): v.get_value() for group in groups for v in group.values()}


def main(arguments: list[str] | None = None) -> int:
    """Make small steps on the CPU and print the mean loss of each; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=count, default=10, help="how many (default 10)")
    steps = parser.parse_args(arguments).steps
    step, before = ResidentStep(device_mode("cpu")), 0.0
    for number in range(steps):
        step.run()
        total = float(step.loss.get_value())
        print(f"step {number + 1}: loss {(total - before) / Sizes().batch:.4f} nats")
        before = total
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
