"""Division of the graph of a global minibatch, and its parameters, among the trainers of a run.

Importing this module imports PyTensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.layers.network import Network
from tandem.placement.placements import (
    Placement,
    Replicate,
    Shape,
    Shard,
    Single,
    check_placement,
    local_index,
    local_shape,
)
from tandem.validation import suggestion


@dataclass(frozen=True)
class Division:
    """The part of one graph, and of its parameters, that each trainer has.

    `placements` are by parameter; all trainers have a copy of those that are left out. Without any,
    trainers divide the rows of a minibatch alone.
    """

    ranks: int
    rank: int
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def index(self, name: str, shape: Shape, rank: int | None = None) -> tuple[slice, ...] | None:
        """Find the elements of a parameter that this trainer has, or another; None: it has none."""
        here = self.rank if rank is None else rank
        return local_index(shape, self._placement(name), self.ranks, here)

    def shape(self, name: str, shape: Shape, rank: int | None = None) -> Shape | None:
        """The shape of this trainer's part of a parameter, or another's; None: there is none."""
        here = self.rank if rank is None else rank
        return local_shape(shape, self._placement(name), self.ranks, here)

    def is_elsewhere(self, name: str) -> bool:
        """Return whether other trainers than 0 have something of a parameter that 0 has not."""
        return self._placement(name) not in (Replicate(), Single(0))

    def replicated(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Those parameters of which all trainers have a copy."""
        return {name: shape for name, shape in shapes.items() if name not in self.placements}

    def own(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """This trainer's parts of the others, by name, with the shapes that they have here."""
        parts = {name: self.shape(name, shapes[name]) for name in shapes if name in self.placements}
        return {name: shape for name, shape in parts.items() if shape is not None}

    def _placement(self, name: str) -> Placement:
        return self.placements.get(name, Replicate())


def divide(
    network: Network,
    config: Config,
    ranks: int,
    rank: int,
    job: Literal["train", "validate"] = "train",
) -> Division | None:
    """Divide the graph of a network among trainers; None where each has a graph of its own rows.

    Raises
    ------
    InputError
        `Network.placements` cannot be those of its parameters, or there are more trainers than
        there is of one of them to divide.
    """
    if ranks == 1:
        return None
    declared = network.parameters.declared
    kind = f"network: {type(network).__name__}"
    found: Any = network.placements(config.fully_connected)
    if not isinstance(found, Mapping):
        raise InputError(
            f"{kind}: `placements` returns {found!r}, expected a dictionary from names of "
            "parameters to placements"
        )
    placements = {name: p for name, p in found.items() if p != Replicate()}
    shapes = {name: parameter.shape for name, parameter in declared.items()}
    for name, placement in placements.items():
        if name not in shapes:
            raise InputError(
                f"{kind} has a placement of {name}, which it does not declare"
                f"{suggestion(name, shapes)}"
            )
        if not isinstance(placement, Shard | Single):
            raise InputError(
                f"{kind} places {name} as {placement!r}, expected Replicate(), Shard(axis) or "
                "Single(rank)"
            )
        try:
            check_placement(placement, len(shapes[name]), ranks)
        except ValueError as error:
            raise InputError(f"{kind}: {name}: {error}") from error
    for name, placement in placements.items():
        if isinstance(placement, Shard) and (length := shapes[name][placement.axis]) < ranks:
            raise InputError(
                f"fully_connected: {config.fully_connected} divides axis {placement.axis} of {name}"
                f", of length {length}, among {ranks} trainers, of which some would have nothing: "
                f"use at most {length} of them, or another fully_connected"
            )
    has_averages = any(not parameter.trainable for parameter in declared.values())
    is_global = config.norm_rows == "global" and has_averages and job == "train"
    if not (placements or is_global):
        return None
    if network.undivided:
        setting = "norm_rows: found global"
        if placements:
            setting = f"fully_connected: found {config.fully_connected}"
        raise InputError(
            f"{setting} with {network.undivided[0]}, a loop over steps, which trainers cannot "
            "divide; expected another setting"
        )
    return Division(ranks, rank, placements)
