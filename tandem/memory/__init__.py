"""Memory that several processes see: the only way in which pixels and parameters cross.

A `Buffer` is a run of bytes. A layout (`tandem.memory.slot.SlotLayout`,
`tandem.memory.flat.FlatLayout`), which every process computes alike, defines the arrays in it, so
no addresses travel.
"""

from tandem.memory.buffer import Buffer
from tandem.memory.host import HostBuffer
from tandem.memory.slot import CLASS_LABEL, PICTURE_DTYPE, HostSlots, RowType, Slot, SlotLayout

__all__ = [
    "CLASS_LABEL",
    "PICTURE_DTYPE",
    "Buffer",
    "HostBuffer",
    "HostSlots",
    "RowType",
    "Slot",
    "SlotLayout",
]
