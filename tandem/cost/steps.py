"""The lines of a trainer's step: what it computes, in the order in which it does.

The graphs are those that a run builds, rewritten and scheduled as for its functions, which are not
made. Weights, states and gradients are zeros that nobody touches, so they take no memory.
"""

import mmap
from dataclasses import dataclass

import numpy as np

from tandem.backend.schedule import Schedule
from tandem.config.resolve import resolve_norm_rows
from tandem.config.schema import Config
from tandem.cost.machine import Speed
from tandem.distributed import ExchangeSettings
from tandem.distributed.buckets import Bucket
from tandem.errors import InputError
from tandem.layers import Network
from tandem.layers.network import COLOURS, KERAS_NETWORK, NetworkDescription, build_network
from tandem.memory import HostSlots, RowType, SlotLayout
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import HostMemory
from tandem.ops.work import Work, work_of
from tandem.optim import optimizer_of
from tandem.training.attribution import TOTALS, NodeOrigin, layers_of
from tandem.training.compiled_network import CompiledNetwork
from tandem.training.graphs import GRADIENT
from tandem.training.setup import parameter_layout, with_frozen

_BORDER = 29  # pixels that a picture has more than its crop, as 256 and 227


@dataclass(frozen=True)
class Line:
    """A line of a program: the computation of one node of its graph."""

    op: str  # class of its Op
    work: Work
    place: NodeOrigin  # the layer and the phase
    ready: tuple[str, ...] = ()  # parameters whose gradients may be sent after it

    def seconds(self, speed: Speed) -> float:
        return speed.seconds(self.work.kind, self.work.flops, self.work.nbytes)


@dataclass(frozen=True)
class TrainerStep:
    """The computation of a trainer in a step, and its exchange."""

    batch_size: int  # images
    pixel_bytes: int  # of the minibatch that a loader fills
    gradients: tuple[Line, ...]
    update: tuple[Line, ...]
    layout: FlatLayout  # of the vectors that are exchanged
    buckets: tuple[Bucket, ...] = ()  # in which gradients are sent early

    @property
    def lines(self) -> tuple[Line, ...]:
        return self.gradients + self.update

    def seconds(self, speed: Speed) -> tuple[float, float]:
        """Return the seconds of gradients and update, line after line."""
        gradients, update = (
            sum(line.seconds(speed) for line in lines) for lines in (self.gradients, self.update)
        )
        return gradients, update

    def ready(self, speed: Speed) -> list[float]:
        """Return the seconds from the step's beginning until each bucket may be sent."""
        end, known = 0.0, dict[str, float]()
        for line in self.gradients:
            end += line.seconds(speed)
            known |= dict.fromkeys(line.ready, end)
        return [max(known.get(name, end) for name in bucket.names) for bucket in self.buckets]


def trainer_step(config: Config, classes: int) -> TrainerStep:
    """Build the step of a trainer on the CPU.

    Parameters
    ----------
    config : Config
        Settings of a run; `exchange` is not ``auto``. Gradients are sent early with `bucket_mb`.
    classes : int
        Number of the network's classes.

    Raises
    ------
    InputError
        The network or a setting cannot be used, or the work of an Op cannot be counted.
    """
    # A run on the CPU crops in the loader.
    config = config.model_copy(update={"use_data_layer": False})
    network = build_network(_description(config, classes), config.dtype)
    config = with_frozen(config, network)
    if config.parameter_groups.averages(network.parameters.declared):
        config = resolve_norm_rows(config)
    optimizer = optimizer_of(dict(config))
    layout = parameter_layout(network, optimizer, config.parameter_groups)
    slots = HostSlots((), _slot_layout(network, config))
    # Never touched, so never there: an allocator that keeps freed memory would write zeros.
    parameters, gradients = (
        np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        for nbytes in (layout.parameters_nbytes, layout.nbytes)
    )
    memory = HostMemory(slots, layout, [parameters], [gradients])
    buckets = ExchangeSettings.of(dict(config)).exchange.buckets(layout)
    passes, rest = divmod(config.batch_size, config.pass_rows)
    if rest:
        raise InputError(
            f"sum_rows: found {config.sum_rows}, expected a divisor of batch_size, "
            f"{config.batch_size}: predicted are trainers of whole groups"
        )
    model = CompiledNetwork(
        network,
        config,
        optimizer,
        _mean(network, config),
        memory,
        on_gradient_ready=_nobody if buckets else None,
    )
    return TrainerStep(
        config.batch_size,
        config.batch_size * slots.layout.pictures.nbytes,
        lines_of(model.functions.schedule("gradients")) * passes + _sums(layout, passes),
        lines_of(model.functions.schedule("update")),
        layout,
        tuple(buckets),
    )


def _sums(layout: FlatLayout, passes: int) -> tuple[Line, ...]:
    """The additions of a trainer's passes, and the copies of half of them, with `sum_rows`."""
    vectors, place = 3 * (passes - 1) + passes // 2 * 2, NodeOrigin(TOTALS, "backward")
    work = Work("elementwise", layout.size * (passes - 1), layout.nbytes * vectors)
    return (Line("sum_rows", work, place),) * (passes > 1)


def lines_of(schedule: Schedule) -> tuple[Line, ...]:
    """Count the work of each node, in the order in which a program computes them.

    Raises InputError where it depends on a length that is not known before the program runs.
    """
    found, places = [], layers_of(schedule.fgraph)
    for node in schedule.order:
        cut = schedule.cuts.get(node)
        names = () if cut is None else tuple(str(v.name).removeprefix(GRADIENT) for v in cut.ready)
        op = type(node.op).__name__
        try:
            found.append(Line(op, work_of(node), places[node], names))
        except ValueError as error:
            raise InputError(f"the cost of {op} cannot be predicted: {error}") from None
    return tuple(found)


def _description(config: Config, classes: int) -> NetworkDescription:
    return NetworkDescription(
        None if config.network == KERAS_NETWORK else config.crop_size,
        classes,
        config.width,
        network=config.network,
        options=config.options,
    )


def _takes_pictures(network: Network, config: Config) -> bool:
    side = config.crop_size
    return network.shapes.get("input", (COLOURS, side, side)) == (COLOURS, side, side)


def _slot_layout(network: Network, config: Config) -> SlotLayout:
    """The layout of a minibatch: crops, or rows of arrays where the network takes no pictures."""
    if _takes_pictures(network, config):
        return SlotLayout.of_pictures(config.pass_rows, config.crop_size, config.rand_colour > 0)
    if network.takes_stored_rows:
        return SlotLayout(config.pass_rows, RowType("float32", network.shapes["input"]))
    channels, *sides = network.shapes["input"]
    return SlotLayout(config.pass_rows, RowType("float32", (*sides, channels)))


def _mean(network: Network, config: Config) -> np.ndarray | None:
    side = config.crop_size + _BORDER
    shape = (COLOURS, side, side)
    return np.zeros(shape, np.float32) if _takes_pictures(network, config) else None


def _nobody(name: str) -> None:
    """Take the report of a ready gradient, which never comes: no function runs."""
