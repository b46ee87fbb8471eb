"""Groups of trainers, how they average vectors, and when."""

from tandem.distributed import asynchronous as asynchronous  # registers its rules
from tandem.distributed import collectives as collectives  # registers them
from tandem.distributed.choices import ALL_REDUCES, EXCHANGES, RULES, RunFacts
from tandem.distributed.exchange import Exchange
from tandem.distributed.factory import (
    ExchangeSettings,
    make_channel,
    make_exchange,
    open_host_memory,
)
from tandem.distributed.group import Group, PeerLost
from tandem.distributed.local import LocalGroup, local_groups
from tandem.distributed.tree import TreeSum

__all__ = [
    "ALL_REDUCES",
    "EXCHANGES",
    "RULES",
    "Exchange",
    "ExchangeSettings",
    "Group",
    "LocalGroup",
    "PeerLost",
    "RunFacts",
    "TreeSum",
    "local_groups",
    "make_channel",
    "make_exchange",
    "open_host_memory",
]
