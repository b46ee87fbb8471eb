"""The network on its device: parameters in flat buffers, and functions compiled over them.

Importing this module imports PyTensor and PyTorch: only a trainer process does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tandem.artifacts.metrics import Sums
from tandem.backend.channel import Channel
from tandem.config.schema import Config
from tandem.layers import Network
from tandem.layers.checks import choose_loss
from tandem.layers.choices import LOSSES, metrics_of
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.memory.slot import Slot
from tandem.optim import Optimizer
from tandem.training.divided_graphs import ALL_INDICES, ALL_VALID
from tandem.training.division import Division
from tandem.training.functions import DeviceFunctions
from tandem.training.graphs import SHORT, TOTAL
from tandem.training.network_graphs import CROPS, NetworkGraphs
from tandem.training.variables import NetworkVariables, SumName

__all__ = ["CROPS", "CompiledNetwork"]


class CompiledNetwork:
    """A network whose parameters, optimizer states and gradients lie in flat vectors.

    Frozen parameters lie beside them, so that no exchange touches them. An array that is not
    trained has its statistic, computed with the gradients, in the vector of gradients. A network
    with such arrays has two functions of gradients: for minibatches of which every row is valid,
    and for short ones, compiled when the first of them comes.

    With a `division` trainers compute parts of one graph, that of the global minibatch. They meet
    in its conversions, so that all call the same methods, in the same order. Gradients of what each
    has a copy of, losses and errors are then terms, which have to be added.

    Parameters
    ----------
    config : Config
        With ``auto`` resolved; ``compile: auto`` is taken as false, ``precision: auto`` as float32.
    mean : float32 (3, S, S) or None
        The mean image, of the size of a whole picture; None: slots hold rows of arrays.
    on_gradient_ready : callable, optional
        Called with a parameter's name when the gradients of its bucket are ready, during the
        backward pass, see `device_mode`.
    division : Division, optional
        What this trainer has of one graph; without it, it has a graph of its own rows.
    channel : Channel, optional
        By which tensors pass between trainers that divide a graph.
    """

    def __init__(
        self,
        network: Network,
        config: Config,
        optimizer: Optimizer,
        mean: np.ndarray | None,
        memory: HostMemory | CudaMemory,
        on_gradient_ready: Callable[[str], None] | None = None,
        division: Division | None = None,
        channel: Channel | None = None,
    ) -> None:
        self._config, self._takes_total = config, network.takes_total
        choose_loss(network, LOSSES.chosen(dict(config)))
        metrics = metrics_of(config.metrics)
        self.variables = NetworkVariables(network, config, mean, memory, metrics, division)
        self.weights, self.states, self.gradients = self.variables.own
        self.graphs = NetworkGraphs(
            network, config, optimizer, self.variables, memory.slot_layout, metrics
        )
        self._rows = config.pass_rows * (1 if division is None else division.ranks)
        self.functions = DeviceFunctions(
            {
                "gradients": self.graphs.gradients,
                SHORT + "gradients": partial(self.graphs.gradients, short=True),
                "update": self.graphs.update,
                "step": self.graphs.step,
                SHORT + "step": partial(self.graphs.step, short=True),
                "validation": self.graphs.validation,
                "crop": self.graphs.crop,
            },
            config,
            memory,
            on_gradient_ready,
            channel,
        )

    @property
    def division(self) -> Division | None:
        """Return what the trainer has of one graph; None: it has a graph of its own rows."""
        return self.variables.division

    def load(
        self,
        weights: Mapping[str, np.ndarray],
        states: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """Set weights and optimizer states from whole arrays, see `NetworkVariables.load`."""
        self.variables.load(weights, states)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """The trainer's part of weights and optimizer states, see `NetworkVariables.state`."""
        return self.variables.state()

    def compute_gradients(
        self,
        slot: Slot,
        epoch: int,
        rows: int | None = None,
        global_rows: npt.NDArray[np.int64] | None = None,
        total: int | None = None,
    ) -> None:
        """Write the gradients of the mean cost over the slot's valid pictures to their vector.

        Loss and errors are of the same forward pass, with dropout; the update counts them. `rows`
        is the number of valid pictures, None where all are, `total` that of all trainers, by
        default as many. A divided graph is of the pictures of `global_rows`, by their indices in
        the dataset.
        """
        numbers = {"epoch": np.array(epoch, np.int64), **self._total(total or rows)}
        if global_rows is not None:
            rows = len(global_rows)
            numbers[ALL_VALID] = np.array(rows, np.int64)
            numbers[ALL_INDICES] = np.resize(global_rows, self._rows)
        self.functions(self._of_rows("gradients", rows), slot, **numbers)

    def compile_step(self, rows: int | None = None) -> None:
        """Compile what a step on the host takes: gradients of so many rows, and update."""
        self.functions.compiled(self._of_rows("gradients", rows))
        self.functions.compiled("update")

    def is_finite(self) -> bool:
        """Return whether the loss and all gradients that were computed last are finite."""
        return bool(self.variables.finite.get_value())

    def update(self, learning_rate: float, updates: int = 0) -> None:
        """Step weights and optimizer states, in place, from the gradients in their vector.

        `updates` is how many were made before. The loss and errors of the gradients' forward pass
        are added to the sums of training.
        """
        self.functions("update", None, **self.graphs.update_numbers(learning_rate, updates))

    def step(
        self,
        slot: Slot,
        epoch: int,
        learning_rate: float,
        rows: int | None = None,
        updates: int = 0,
    ) -> Callable[[], bool]:
        """Compute gradients and update in one function, without waiting.

        Where the loss or a gradient is not finite nothing is updated, and nothing counted. The
        result waits for the step and returns whether all were finite. For a trainer alone. `rows`
        is that of `compute_gradients`.
        """
        numbers = self.graphs.update_numbers(learning_rate, updates) | self._total(rows)
        name = self._of_rows("step", rows)
        self.functions(name, slot, epoch=np.array(epoch, np.int64), **numbers)
        finite = self.variables.finite.read_later()
        return lambda: bool(finite())

    def validate(self, slot: Slot, global_rows: int | None = None) -> None:
        """Add up loss and errors of the slot's valid pictures, without dropout.

        `global_rows` is the number of valid pictures of all trainers.
        """
        self.functions("validation", slot, **self._valid(global_rows))

    def validate_crop(self, slot: Slot, crop: int, global_rows: int | None = None) -> None:
        """Add the class probabilities of one of the `CROPS` crops of a minibatch to the others'.

        `crop` is its number, from 0. After the last one, loss and errors of the averages are added
        to the sums: the loss of a picture is the negative logarithm of its class's averaged
        probability, whatever `loss` is. `global_rows` is that of `validate`.
        """
        self.functions("crop", slot, crop=np.array(crop, np.int64), **self._valid(global_rows))

    def read_scores(self) -> np.ndarray:
        """The network's outputs of the last minibatch that was validated, (row, class)."""
        if self.variables.scores is None:
            raise RuntimeError("nothing has been validated yet")
        return self.variables.scores.get_value()

    def read_predictions(self) -> np.ndarray:
        """Probabilities that the network predicts of the last minibatch validated, float64."""
        predictions: np.ndarray = self.graphs.predict(self.read_scores().astype(np.float64))
        return predictions

    def read_probabilities(self) -> np.ndarray:
        """Probabilities averaged over the crops of the last minibatch, float64 (row, class)."""
        if self.variables.probabilities is None:
            raise RuntimeError("no crops have been validated yet")
        return self.variables.probabilities.get_value() / CROPS

    def read_sums(self, name: SumName) -> Sums:
        """The sums of training or of validation since they were last taken, or the last counts."""
        return self.variables.read_sums(name)

    def take_sums(self, name: SumName) -> Sums:
        """Return the sums, and start from zero."""
        sums = self.read_sums(name)
        self.put_sums(name, Sums())
        return sums

    def put_sums(self, name: SumName, sums: Sums) -> None:
        """Continue from `sums`, see `NetworkVariables.put_sums`."""
        self.variables.put_sums(name, sums)

    def _valid(self, global_rows: int | None) -> dict[str, np.ndarray]:
        if self.division is None:
            return self._total(global_rows)
        return {ALL_VALID: np.array(global_rows, np.int64)}

    def _total(self, rows: int | None) -> dict[str, np.ndarray]:
        """The number of rows of all trainers, for a network that takes it."""
        if self.division is not None or not self._takes_total:
            return {}
        return {TOTAL: np.array(self._rows if rows is None else rows, np.int64)}

    def _of_rows(self, name: str, rows: int | None) -> str:
        """The function for so many valid rows: only averages tell a short minibatch by it."""
        is_short = rows is not None and rows < self._rows
        return SHORT + name if is_short and self.graphs.averages else name
