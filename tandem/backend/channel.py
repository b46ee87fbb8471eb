"""The channel by which a function reaches those of other ranks while it runs."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tandem.distributed.channel import Label, Shape


class Channel(Protocol):
    """A passage of tensors between the ranks of a run. `tandem.distributed.make_channel` makes one.

    All ranks call its methods in the same order, with labels that are equal. What it returns may be
    memory of its own, which is valid until the next call and is not to be written to. Tensors lie
    on the device of those that are passed.

    Each method raises `PeerLost` where another rank is known to have ended, and RuntimeError at
    every rank where they have made different calls.
    """

    rank: int
    size: int
    received: int  # bytes that have come from other ranks so far

    def all_gather(self, label: Label, block: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Pass a block to every rank; return those of all, whose shapes are given, by rank."""

    def all_to_all(
        self, label: Label, blocks: Sequence[Tensor], shapes: Sequence[Shape]
    ) -> list[Tensor]:
        """Pass each rank a block of its own; return those for this rank, by their senders.

        Blocks are by their receivers; `shapes` are of what each rank sends here. Any may be empty.
        """
