"""Trainers that divide the graph of a network, in threads of one process."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tandem import layers
from tandem.artifacts.metrics import Sums
from tandem.config.schema import make_config
from tandem.data.augment import Mode
from tandem.distributed import local_groups, make_channel
from tandem.distributed.kernels import average_into_all
from tandem.layers import Network, Training
from tandem.memory import HostSlots, Slot, SlotLayout
from tandem.memory.parameters import HostMemory
from tandem.optim import OPTIMIZERS
from tandem.training.compiled_network import CompiledNetwork
from tandem.training.division import divide
from tandem.training.setup import parameter_layout
from tandem.training.shards import Gathering, State
from tests.support.threads import run_threads
from tests.support.trainer_memory import noise_slot

CROP, CLASSES = 8, 7
MEAN = np.full((3, CROP, CROP), 100, np.float32)


class SmallNetwork(Network):
    """A convolution and two fully connected layers, with dropout between them."""

    def __init__(
        self, crop_size: int, classes: int, width: float, dtype: str, units: int = 41
    ) -> None:
        super().__init__(crop_size, classes, dtype)
        self._inputs = 4 * ((crop_size - 3) // 2 + 1) ** 2
        self.parameters.add(
            layers.weight("conv1", (4, 3, 3, 3), std=0.02),
            layers.bias("conv1", 4, mean=0.1),
            layers.weight("fc1", (self._inputs, units), std=0.1),
            layers.bias("fc1", units, mean=0.1),
            layers.weight("fc2", (units, classes), std=0.3),
            layers.bias("fc2", classes),
        )

    def logits(self, images: Any, training: Training | None) -> Any:
        conv1, fc1, fc2 = (self.parameters.of(name) for name in ("conv1", "fc1", "fc2"))
        x = layers.relu(layers.convolution(images, *conv1, stride=2))
        x = layers.relu(layers.fully_connected(layers.flatten(x, self._inputs), *fc1))
        return layers.fully_connected(layers.dropout(x, 0.5, 0, training), *fc2)


class Together:
    """Trainers of a global minibatch, whose methods do what all of them do side by side."""

    def __init__(
        self,
        trainers: int,
        batch: int,
        network: Callable[..., Network] = SmallNetwork,
        **settings: Any,
    ) -> None:
        self.batch, self.groups = batch, local_groups(trainers)
        self.build = network
        self.network = network(CROP, CLASSES, width=1.0, dtype="float64")
        self.config = make_config(
            {
                "crop_size": CROP,
                "batch_size": batch,
                "precision": "float64",
                "threads": 1,
                "metrics": ["accuracy", "f1"],
                **settings,
            }
        )
        self.models: list[CompiledNetwork] = [None] * trainers  # type: ignore[list-item]
        self.memories: list[HostMemory] = [None] * trainers  # type: ignore[list-item]
        self.channels: list[Any] = [None] * trainers
        self.all(self._make)

    def all(self, do: Callable[[int], Any]) -> list[Any]:
        """Call a function with each rank, each in a thread; return the results by rank."""
        found: list[Any] = [None] * len(self.groups)

        def call(rank: int) -> None:
            found[rank] = do(rank)

        run_threads([partial(call, rank) for rank in range(len(found))], seconds=120)
        return found

    def _make(self, rank: int) -> None:
        config, ranks = self.config, len(self.groups)
        network = self.build(CROP, CLASSES, width=1.0, dtype="float64")
        division = divide(network, config, ranks, rank)
        optimizer, groups = OPTIMIZERS.chosen(dict(config)), config.parameter_groups
        select = dict if division is None else division.replicated
        layout = parameter_layout(network, optimizer, groups, select=select)
        parameters, gradients = (
            [np.zeros(n, np.uint8)] for n in (layout.parameters_nbytes, layout.nbytes)
        )
        slots = HostSlots.create(SlotLayout.of_pictures(self.batch, CROP), rank)
        memory = self.memories[rank] = HostMemory(slots, layout, parameters, gradients)
        if division is not None:
            memory.add_shards(parameter_layout(network, optimizer, groups, select=division.own))
            self.channels[rank] = make_channel(memory, self.groups[rank])
        self.models[rank] = CompiledNetwork(
            network,
            config,
            optimizer,
            MEAN,
            memory,
            division=division,
            channel=self.channels[rank],
        )
        self.models[rank].load(dict(network.initial_values(1)))

    def slots(self, whole: Slot, rows: int) -> list[Slot]:
        """Each trainer's rows of a global minibatch, of which `rows` are valid."""
        found = []
        for first in range(0, len(self.groups) * self.batch, self.batch):
            count = min(max(rows - first, 0), self.batch)
            slot = noise_slot(self.network, self.batch, count, seed=99 + first)
            for name in ("pictures", "labels", "indices"):
                getattr(slot, name)[:count] = getattr(whole, name)[first : first + count]
            found.append(slot)
        return found

    def step(self, whole: Slot, rows: int, epoch: int = 0, rate: float = 1e-3) -> None:
        """Compute gradients, add them up, update."""
        slots = self.slots(whole, rows)
        global_rows = whole.indices[:rows] if len(slots) > 1 else None
        self.all(
            lambda r: self.models[r].compute_gradients(
                slots[r], epoch, int(slots[r].valid), global_rows
            )
        )
        assert all(model.is_finite() for model in self.models)
        if len(slots) > 1:
            average_into_all([m.flat["gradients"][0] for m in self.memories], [1.0] * len(slots))
        self.all(lambda r: self.models[r].update(rate))

    def validate(self, whole: Sequence[Slot], rows: int) -> None:
        """Validate a minibatch, by one crop of each picture or by several."""
        global_rows = rows if len(self.groups) > 1 else None
        for number, each in enumerate(whole):
            slots = self.slots(each, rows)

            def call(rank: int, slots: list[Slot] = slots, number: int = number) -> None:
                if len(whole) == 1:
                    self.models[rank].validate(slots[rank], global_rows)
                else:
                    self.models[rank].validate_crop(slots[rank], number, global_rows)

            self.all(call)

    def sums(self, mode: Mode) -> Sums:
        """All trainers' sums."""
        return sum((model.take_sums(mode) for model in self.models), Sums())

    def state(self) -> State:
        """Whole weights and optimizer states, as trainer 0 has them for a checkpoint."""
        division = self.models[0].division
        if division is None:
            return self.models[0].state()

        def gather(rank: int) -> State | None:
            model = self.models[rank]
            assert model.division is not None
            declared, dtype = self.network.parameters.declared, np.dtype("float64")
            gathering = Gathering(model.division, declared, dtype, self.groups[rank])
            if rank:
                gathering.send(model.state())
                return None
            weights, states = gathering.whole(model.state())
            return (
                {name: np.asarray(value) for name, value in weights.items()},
                {
                    state: {name: np.asarray(value) for name, value in values.items()}
                    for state, values in states.items()
                },
            )

        found: State = self.all(gather)[0]
        return found
