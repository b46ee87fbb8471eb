"""The network on its device: parameters in flat buffers, and the functions compiled over them.

Importing this module imports PyTensor and PyTorch: only a trainer process does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.executor import Function
from pytensor.tensor.variable import TensorVariable

from tandem.data.augment import Mode
from tandem.device import DeviceSharedVariable, device_mode, device_shared
from tandem.layers import DropoutKeys, label_rank
from tandem.memory.flat import FlatLayout
from tandem.memory.slot import Slot
from tandem.ops import crop_mirror
from tandem.run.config import Config

Tensors = dict[str, TensorVariable]


@dataclass(frozen=True)
class Sums:
    """Sums over pictures since they were last taken. They add up over trainers.

    Attributes
    ----------
    loss : float
        Sum of the cross-entropies, in nats.
    top1_errors, top5_errors, images : int
        Pictures whose label is not the first, not among the first five; and all.
    """

    loss: float = 0.0
    top1_errors: int = 0
    top5_errors: int = 0
    images: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.loss + other.loss,
            self.top1_errors + other.top1_errors,
            self.top5_errors + other.top5_errors,
            self.images + other.images,
        )


class Model:
    """A network whose parameters, momenta and gradients lie in flat vectors.

    Parameters
    ----------
    network : AlexNet, or any object with its ``parameters``, ``kinds``, ``logits`` and ``cost``
        The graph.
    config : Config
        Rates, precision, seed, and what else the functions depend on.
    mean : float32 (3, S, S)
        The mean image.
    parameters, gradients : dtype (2 * n,), dtype (n,)
        Flat vectors to live in, n the size of ``layout_of(network)``: all weights, then all
        momenta; and all gradients. In memory that other trainers may see.
    device : str
        "cpu" or "cuda:0" and so on.
    compile : bool
        Whether the functions go through ``torch.compile``.
    device_crops : bool
        Whether a slot holds whole pictures, to be cropped here, or crops.
    """

    def __init__(
        self,
        network: Any,
        config: Config,
        mean: np.ndarray,
        parameters: np.ndarray,
        gradients: np.ndarray,
        device: str = "cpu",
        compile: bool = False,
        device_crops: bool = True,
    ) -> None:
        layout = layout_of(network)
        self._network, self._config = network, config
        self._mode = device_mode(device, compile=compile)
        self._crop = (config.crop_size, not device_crops)

        def place(vector: np.ndarray, prefix: str) -> dict[str, DeviceSharedVariable]:
            return {
                name: device_shared(None, name=prefix + name, device=device, memory=view)
                for name, view in layout.views(vector).items()
            }

        def scalar(dtype: str, name: str) -> DeviceSharedVariable:
            return device_shared(np.zeros((), dtype), name=name, device=device)

        self.weights = place(parameters[: layout.size], "")
        self.momenta = place(parameters[layout.size :], "momentum/")
        self.gradients = place(gradients, "gradient/")
        self._mean = device_shared(mean.astype(config.precision), name="mean", device=device)
        self._sums = {
            mode: {
                name: scalar("float64" if name == "loss" else "int64", f"{mode} {name}")
                for name in ("loss", "top1_errors", "top5_errors", "images")
            }
            for mode in ("train", "validation")
        }

    def load(self, weights: Mapping[str, np.ndarray], momenta: Mapping[str, np.ndarray]) -> None:
        """Set weights and momenta, in their logical layouts, in place; names left out stay."""
        for variables, values in ((self.weights, weights), (self.momenta, momenta)):
            for name, value in values.items():
                variables[name].set_value(value.astype(self._config.precision, copy=False))

    def compute_gradients(self, slot: Slot, epoch: int) -> None:
        """Write the gradients of the mean cost over the slot's valid pictures to their vector.

        Loss and errors of the same forward pass, with dropout, before the update, are added up.
        """
        self._gradient_function(*_arrays(slot), slot.indices, np.int64(epoch))

    def update(self, learning_rate: float) -> None:
        """Step momenta and weights, in place, from the gradients in their vector."""
        self._update_function(np.asarray(learning_rate, self._config.precision))

    def validate(self, slot: Slot) -> None:
        """Add up loss and errors of the slot's valid pictures, without dropout."""
        self._validation_function(*_arrays(slot))

    def take_sums(self, mode: Mode) -> Sums:
        """Give the sums of training or of validation since the last call, and start from zero."""
        variables = self._sums[mode]
        sums = Sums(**{name: v.get_value().item() for name, v in variables.items()})
        for variable in variables.values():
            variable.set_value(np.zeros((), variable.dtype))
        return sums

    def _inputs(self) -> list[TensorVariable]:
        """The slot as symbolic variables, in the order of `_arrays`."""
        batch, crop = self._config.batch_size, self._crop
        side = crop[0] if crop[1] else self._mean.type.shape[1]
        return [
            pt.tensor("pictures", dtype="uint8", shape=(batch, side, side, 3)),
            pt.tensor("labels", dtype="int64", shape=(batch,)),
            pt.tensor("origins", dtype="int64", shape=(batch, 2)),
            pt.tensor("mirrored", dtype="uint8", shape=(batch,)),
            pt.tensor("valid", dtype="int64", shape=()),
        ]

    def _images(
        self, pictures: TensorVariable, origins: TensorVariable, mirrored: TensorVariable
    ) -> TensorVariable:
        size, cropped = self._crop
        return crop_mirror(
            pictures,
            self._mean,
            origins,
            mirrored,
            crop_size=size,
            cropped=cropped,
            dtype=self._config.precision,
        )

    def _accumulate(
        self,
        mode: Mode,
        cost: TensorVariable,
        logits: TensorVariable,
        labels: TensorVariable,
        valid: TensorVariable,
    ) -> list[tuple[DeviceSharedVariable, TensorVariable]]:
        found = {"loss": cost.astype("float64") * valid, "images": valid}
        if mode == "validation" or self._config.print_train_error:
            counted = pt.arange(self._config.batch_size) < valid
            rank = label_rank(logits, labels)
            found["top1_errors"] = pt.sum(counted & (rank >= 1), dtype="int64")
            found["top5_errors"] = pt.sum(counted & (rank >= 5), dtype="int64")
        variables = self._sums[mode]
        return [(variables[name], variables[name] + value) for name, value in found.items()]

    def _function(self, inputs: list[TensorVariable], updates: list[Any], name: str) -> Function:
        placed = {self._network.parameters[name]: self.weights[name] for name in self.weights}
        return pytensor.function(
            inputs,
            [],
            updates=updates,
            givens=placed,
            mode=self._mode,
            name=name,
            trust_input=True,
        )

    @cached_property
    def _gradient_function(self) -> Function:
        network = self._network
        pictures, labels, origins, mirrored, valid = inputs = self._inputs()
        indices = pt.tensor("indices", dtype="int64", shape=labels.type.shape)
        epoch = pt.tensor("epoch", dtype="int64", shape=())
        seed = pt.constant(np.int64(self._config.seed))
        logits = network.logits(
            self._images(pictures, origins, mirrored), DropoutKeys(seed, epoch, indices)
        )
        cost = network.cost(logits, labels, valid)
        gradients = cast(list[TensorVariable], pt.grad(cost, [*network.parameters.values()]))
        updates = list(zip(self.gradients.values(), gradients, strict=True))
        updates += self._accumulate("train", cost, logits, labels, valid)
        return self._function([*inputs, indices, epoch], updates, "gradients")

    @cached_property
    def _update_function(self) -> Function:
        rate = pt.tensor("learning_rate", dtype=self._config.precision, shape=())
        updates = []
        for name, kind in self._network.kinds.items():
            weight, momentum = momentum_step(
                self.weights[name],
                self.momenta[name],
                self.gradients[name],
                rate * 2 if kind == "bias" else rate,
                self._config.momentum if self._config.use_momentum else 0.0,
                self._config.weight_decay if kind == "weight" else 0.0,
                self._config.use_nesterov_momentum,
            )
            updates += [(self.weights[name], weight), (self.momenta[name], momentum)]
        return self._function([rate], updates, "update")

    @cached_property
    def _validation_function(self) -> Function:
        pictures, labels, origins, mirrored, valid = inputs = self._inputs()
        logits = self._network.logits(self._images(pictures, origins, mirrored), None)
        cost = self._network.cost(logits, labels, valid)
        return self._function(
            inputs, self._accumulate("validation", cost, logits, labels, valid), "validation"
        )


def layout_of(network: Any) -> FlatLayout:
    """How the parameters of `network` lie in a flat vector."""
    parameters = network.parameters
    (dtype,) = {variable.dtype for variable in parameters.values()}
    return FlatLayout.of({name: v.type.shape for name, v in parameters.items()}, dtype)


def momentum_step(
    weight: TensorVariable,
    velocity: TensorVariable,
    gradient: TensorVariable,
    rate: TensorVariable,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> tuple[TensorVariable, TensorVariable]:
    """One step of stochastic gradient descent with momentum.

    ``v <- m v - lr (g + wd w)``, then ``w <- w + v``, or with Nesterov's momentum
    ``w <- w + m v - lr (g + wd w)``, both with the new v: the velocity that is kept is never the
    look-ahead. (Krizhevsky et al. 2012, section 5; Sutskever et al. 2013, section 2, in the
    form in which the weights are those of the look-ahead.)

    Returns
    -------
    weight, velocity
        The new values, of the types of the old.
    """
    dtype = np.dtype(weight.dtype).type
    step = rate * (gradient + dtype(decay) * weight if decay else gradient)
    velocity = dtype(momentum) * velocity - step
    if nesterov:
        return weight + dtype(momentum) * velocity - step, velocity
    return weight + velocity, velocity


def _arrays(slot: Slot) -> tuple[np.ndarray, ...]:
    return slot.pictures, slot.labels, slot.origins, slot.mirrored, slot.valid
