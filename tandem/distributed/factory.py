"""The exchange of a run: from its settings and a trainer's memory, wherever that lies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tandem.distributed.allreduce import shard
from tandem.distributed.channel import CheckedChannel, GroupChannel, HostChannel
from tandem.distributed.choices import (
    ALL_REDUCES,
    EXCHANGES,
    RULES,
    AllReduceChoice,
    ExchangeChoice,
    RuleChoice,
)
from tandem.distributed.exchange import Exchange
from tandem.distributed.group import Group
from tandem.distributed.summed import SummedByMessages, SummedInMemory, most_partials
from tandem.memory import HostBuffer, HostSlots
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import CudaMemory, HostMemory


@dataclass(frozen=True)
class ExchangeSettings:
    """The chosen exchange, average and rule of trainers."""

    exchange: ExchangeChoice
    collective: AllReduceChoice
    rule: RuleChoice
    seed: int = 0
    sum_rows: int | None = None  # of a global minibatch of `global_batch` rows
    global_batch: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Take the settings of the exchange from those of a run, or their defaults."""
        return cls(
            EXCHANGES.chosen(settings),
            ALL_REDUCES.chosen(settings),
            RULES.chosen(settings),
            settings.get("seed", 0),
            None if (rows := settings.get("sum_rows", "auto")) == "auto" else rows,
            settings.get("global_batch") or 0,
        )


def make_exchange(
    settings: ExchangeSettings, memory: HostMemory | CudaMemory, group: Group
) -> Exchange:
    """Make a trainer's exchange. Collective, when all trainers have the same parameters.

    On the host, `open_host_memory` makes the memory, from the same settings.
    """
    if not memory.layout.size:
        return Exchange()
    if settings.sum_rows and isinstance(memory, HostMemory):
        make = SummedInMemory if group.starter is None else SummedByMessages
        return make(group, memory, settings.sum_rows)
    if group.size == 1:
        return Exchange()
    return settings.rule.make(settings, memory, group)


def make_channel(memory: HostMemory | CudaMemory, group: Group) -> CheckedChannel:
    """Make the channel of a trainer's functions to those of the others. Collective.

    It is the `channel` of a `tandem.backend.device_mode`. Trainers of one launcher reach each
    other's memory; ranks send messages, from GPU to GPU where the MPI of all takes GPU memory.
    """
    own, on_gpu = group.split(0), isinstance(memory, CudaMemory)
    if group.starter is not None:
        return GroupChannel(own, on_gpu and all(own.all_gather_object(own.takes_gpu_memory())))
    if isinstance(memory, CudaMemory):
        from tandem.distributed.gpu_channel import make_peer_channel

        return make_peer_channel(own, memory.driver, memory.stream)
    return HostChannel(own)


def open_host_memory(
    settings: ExchangeSettings, slots: HostSlots, group: Group, layout: FlatLayout
) -> HostMemory:
    """Make a trainer's memory on the host, shared as its exchange needs it. Collective."""
    if settings.sum_rows:
        return _open_summed(settings, settings.sum_rows, slots, group, layout)
    sharing = settings.collective.sharing(group) if settings.rule.is_synchronous else None
    if sharing is None or not layout.size:
        vectors = [np.zeros(n, np.uint8) for n in (layout.parameters_nbytes, layout.nbytes)]
        return HostMemory(slots, layout, vectors[:1], vectors[1:])
    parameters = sharing.shared_memory(layout.parameters_nbytes)
    gradients = sharing.shared_memory(layout.nbytes)
    part = None
    if settings.exchange.shares_parameters:
        parameters = parameters[:1] * sharing.size
        part = shard(layout.size, sharing.size, sharing.rank)
    return HostMemory(slots, layout, parameters, gradients, sharing.rank, part)


def _open_summed(
    settings: ExchangeSettings, rows: int, slots: HostSlots, group: Group, layout: FlatLayout
) -> HostMemory:
    """Make a trainer's memory with that of its partial sums.

    Vectors begin at a page wherever they lie: a library may choose its kernels by addresses.
    """

    def make(nbytes: int) -> list[np.ndarray]:
        if group.starter is None:
            return group.shared_memory(nbytes)
        return [HostBuffer.create(nbytes, "partial sums").array(nbytes, np.uint8)]

    number = 0 if group.starter else group.rank
    memory = HostMemory(slots, layout, make(layout.parameters_nbytes), make(layout.nbytes), number)
    partials = most_partials(settings.global_batch, group.size, rows)
    received = max(1, partials) if group.starter else 0
    memory.sums_nbytes = (partials + received) * layout.nbytes
    for each in make(partials * layout.nbytes) if partials else ():
        memory.partials.append([*each.view(layout.dtype).reshape(partials, -1)])
    if not partials:
        memory.partials.extend([vector] for vector in memory.flat["gradients"])
    return memory
