"""The network on its device: parameters in flat buffers, and the functions compiled over them.

Importing this module imports PyTensor and PyTorch: only a trainer process does.
"""

from collections.abc import Mapping
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
from tandem.run.sums import Sums

Tensors = dict[str, TensorVariable]


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

        def sums(prefix: str) -> dict[str, DeviceSharedVariable]:
            return {
                name: scalar("float64" if name == "loss" else "int64", f"{prefix} {name}")
                for name in ("loss", "top1_errors", "top5_errors", "images")
            }

        self._sums = {"train": sums("train"), "validation": sums("validation")}
        self._last = sums("last")
        self._finite = scalar("int64", "finite")

    def load(self, weights: Mapping[str, np.ndarray], momenta: Mapping[str, np.ndarray]) -> None:
        """Set weights and momenta, in their logical layouts, in place; names left out stay."""
        for variables, values in ((self.weights, weights), (self.momenta, momenta)):
            for name, value in values.items():
                variables[name].set_value(value.astype(self._config.precision, copy=False))

    def compute_gradients(self, slot: Slot, epoch: int) -> None:
        """Write the gradients of the mean cost over the slot's valid pictures to their vector.

        Loss and errors are of the same forward pass, with dropout, before the update, which counts
        them.
        """
        self._gradient_function(*_arrays(slot), slot.indices, np.int64(epoch))

    def is_finite(self) -> bool:
        """Whether the loss and all gradients that were computed last are finite."""
        return bool(self._finite.get_value())

    def update(self, learning_rate: float) -> None:
        """Step momenta and weights, in place, from the gradients in their vector.

        Loss and errors that came with the gradients are added to the sums of training.
        """
        self._update_function(np.asarray(learning_rate, self._config.precision))

    def validate(self, slot: Slot) -> None:
        """Add up loss and errors of the slot's valid pictures, without dropout."""
        self._validation_function(*_arrays(slot))

    def take_sums(self, mode: Mode) -> Sums:
        """Give the sums of training or of validation since the last call, and start from zero."""
        sums = self.read_sums(mode)
        self.put_sums(mode, Sums())
        return sums

    def read_sums(self, mode: Mode) -> Sums:
        """Give the sums without starting anew."""
        return Sums(**{name: v.get_value().item() for name, v in self._sums[mode].items()})

    def put_sums(self, mode: Mode, sums: Sums) -> None:
        """Go on from `sums`."""
        for name, variable in self._sums[mode].items():
            variable.set_value(np.asarray(getattr(sums, name), variable.dtype))

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

    def _counts(
        self,
        cost: TensorVariable,
        logits: TensorVariable,
        labels: TensorVariable,
        valid: TensorVariable,
        errors: bool,
    ) -> Tensors:
        """What one minibatch adds to the sums; `errors` says whether errors are counted."""
        found = {"loss": cost.astype("float64") * valid, "images": valid}
        if errors:
            counted = pt.arange(self._config.batch_size) < valid
            rank = label_rank(logits, labels)
            found["top1_errors"] = pt.sum(counted & (rank >= 1), dtype="int64")
            found["top5_errors"] = pt.sum(counted & (rank >= 5), dtype="int64")
        return found

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
        counts = self._counts(cost, logits, labels, valid, self._config.print_train_error)
        updates += [(self._last[name], value) for name, value in counts.items()]
        updates.append((self._finite, _are_finite([cost, *gradients]).astype("int64")))
        return self._function([*inputs, indices, epoch], updates, "gradients")

    @cached_property
    def _update_function(self) -> Function:
        rate = pt.tensor("learning_rate", dtype=self._config.precision, shape=())
        updates = _added(self._sums["train"], self._last)
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
        counts = self._counts(cost, logits, labels, valid, errors=True)
        return self._function(inputs, _added(self._sums["validation"], counts), "validation")


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


def _are_finite(values: list[TensorVariable]) -> TensorVariable:
    """Whether all elements are finite: a sum is not, if one of its terms is not.

    A sum can overflow although its terms do not, when they are of a size that is as bad.
    """
    sums = [pt.sum(value, dtype=value.dtype, acc_dtype=value.dtype) for value in values]
    return pt.all(pt.isfinite(pt.stack(sums)))


def _added(
    sums: Mapping[str, DeviceSharedVariable], counts: Mapping[str, TensorVariable]
) -> list[tuple[DeviceSharedVariable, TensorVariable]]:
    """Updates that add `counts` to `sums`."""
    return [(sums[name], sums[name] + value) for name, value in counts.items()]


def _arrays(slot: Slot) -> tuple[np.ndarray, ...]:
    return slot.pictures, slot.labels, slot.origins, slot.mirrored, slot.valid
