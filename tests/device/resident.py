"""A small AlexNet's training step with everything on the device, as a GPU runs it."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.executor import Function
from pytensor.compile.mode import Mode

from alex_net import AlexNet
from tandem.device import DeviceSharedVariable, device_shared
from tandem.layers import DropoutKeys
from tandem.ops import crop_mirror

CROP, STORED, CLASSES = 67, 72, 5


class ResidentStep:
    """The gradient and the update of a small AlexNet, without inputs and outputs."""

    def __init__(self, mode: Mode, batch: int = 4, width: float = 0.1) -> None:
        rng = np.random.default_rng(1)
        net = AlexNet(CROP, CLASSES, width)
        net.initialize(seed=1)

        def on_device(name: str, value: Any) -> DeviceSharedVariable:
            return device_shared(np.asarray(value), name)

        values = {name: variable.get_value() for name, variable in net.parameters.items()}
        self.weights = {name: on_device(name, value) for name, value in values.items()}
        self.momenta = {name: on_device(f"m/{name}", 0 * v) for name, v in values.items()}
        self.gradients = {name: on_device(f"g/{name}", 0 * v) for name, v in values.items()}
        self.loss = on_device("loss", np.float64(0))
        self.rate = on_device("rate", np.float32(0.01))
        self.slot = {
            "pictures": on_device(
                "pictures", rng.integers(0, 256, (batch, STORED, STORED, 3), np.uint8)
            ),
            "labels": on_device("labels", rng.integers(0, CLASSES, batch)),
            "indices": on_device("indices", rng.integers(0, 1000, batch)),
            "origins": on_device("origins", rng.integers(0, STORED - CROP, (batch, 2))),
            "mirrored": on_device("mirrored", rng.integers(0, 2, batch, np.uint8)),
            "valid": on_device("valid", np.int64(batch - 1)),
        }
        self.mean = on_device("mean", rng.uniform(90, 130, (3, STORED, STORED)).astype("float32"))
        self.epoch = on_device("epoch", np.int64(2))
        self._net = net
        self.functions = self.compile(mode)

    def compile(self, mode: Mode) -> list[Function]:
        """The functions of a step in another mode, over the same variables."""
        net, slot = self._net, self.slot
        images = crop_mirror(
            slot["pictures"], self.mean, slot["origins"], slot["mirrored"], crop_size=CROP
        )
        keys = DropoutKeys(pt.constant(np.int64(3)), self.epoch, slot["indices"])
        logits = net.logits(images, keys)
        cost = net.cost(logits, slot["labels"], slot["valid"])
        gradients = pytensor.grad(cost, list(net.parameters.values()))
        placed = {variable: self.weights[name] for name, variable in net.parameters.items()}
        stores: list[Any] = list(zip(self.gradients.values(), gradients, strict=True))
        stores.append((self.loss, self.loss + cost.astype("float64") * slot["valid"]))
        steps: list[Any] = []
        for name, weight in self.weights.items():
            momentum = np.float32(0.9) * self.momenta[name] - self.rate * self.gradients[name]
            steps += [(self.momenta[name], momentum), (weight, weight + momentum)]
        return [
            pytensor.function([], [], updates=stores, givens=placed, mode=mode, name="gradient"),
            pytensor.function([], [], updates=steps, mode=mode, name="update"),
        ]

    def run(self) -> None:
        for function in self.functions:
            function()

    def state(self) -> dict[str, np.ndarray]:
        """Everything that a step changes."""
        variables = [self.loss, *(v for d in (self.weights, self.momenta, self.gradients)
                                  for v in d.values())]  # fmt: skip
        return {variable.name: variable.get_value() for variable in variables}
