"""How trainers agree on parameters after a step: one class per strategy, one small interface."""

from tandem.distributed.average import AverageGradients, AverageParameters, SharedParameters
from tandem.distributed.choices import ALL_REDUCES, EXCHANGES, RULES, RunFacts
from tandem.distributed.exchange import Exchange, Group
from tandem.distributed.local import LocalGroup, PeerLost, local_groups

__all__ = [
    "ALL_REDUCES",
    "EXCHANGES",
    "RULES",
    "AverageGradients",
    "AverageParameters",
    "Exchange",
    "Group",
    "LocalGroup",
    "PeerLost",
    "RunFacts",
    "SharedParameters",
    "local_groups",
]
