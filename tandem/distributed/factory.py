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
from tandem.memory import HostSlots
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import CudaMemory, HostMemory


@dataclass(frozen=True)
class ExchangeSettings:
    """The chosen exchange, average and rule of trainers."""

    exchange: ExchangeChoice
    collective: AllReduceChoice
    rule: RuleChoice
    seed: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Take the settings of the exchange from those of a run, or their defaults."""
        return cls(
            EXCHANGES.chosen(settings),
            ALL_REDUCES.chosen(settings),
            RULES.chosen(settings),
            settings.get("seed", 0),
        )


def make_exchange(
    settings: ExchangeSettings, memory: HostMemory | CudaMemory, group: Group
) -> Exchange:
    """Make a trainer's exchange. Collective, when all trainers have the same parameters.

    On the host, `open_host_memory` makes the memory, from the same settings.
    """
    if group.size == 1 or not memory.layout.size:
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
