"""How trainers agree on parameters after a step: one class per strategy, one small interface."""

from tandem.exchange.average import AverageGradients, AverageParameters, SharedParameters
from tandem.exchange.base import Exchange, Gathering
from tandem.exchange.meeting import Meeting, PeerLost, meetings

__all__ = [
    "AverageGradients",
    "AverageParameters",
    "Exchange",
    "Gathering",
    "Meeting",
    "PeerLost",
    "SharedParameters",
    "meetings",
]
