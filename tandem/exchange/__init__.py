"""How trainers agree on parameters after a step: one class per strategy, one small interface."""

from tandem.exchange.average import AverageGradients, AverageParameters, SharedParameters
from tandem.exchange.base import Exchange
from tandem.exchange.meeting import Meeting, PeerLost, meetings

__all__ = [
    "AverageGradients",
    "AverageParameters",
    "Exchange",
    "Meeting",
    "PeerLost",
    "SharedParameters",
    "meetings",
]
