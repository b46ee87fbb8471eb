"""The registry of rules: for each Op, the placements by which its parts can be computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from tandem.placement.placements import Partial, Placement, Replicate, check_placement


@dataclass(frozen=True)
class Part:
    """A rank of a group."""

    ranks: int
    rank: int


Locals = Sequence[Any]
"""A rank's variables of a node's inputs, None for one that is not used."""


def same_op(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
    """Apply the node's Op to a rank's inputs."""
    return node.op.make_node(*inputs).outputs


@dataclass(frozen=True)
class OpStrategy:
    """One way to compute a node by parts.

    `inputs` are the placements that it needs, None for an input of which no value is needed;
    `outputs` are those that it gives. `local` builds a rank's outputs from the node of the whole
    graph and the rank's inputs. Each output is of the shape that its placement gives the rank.
    """

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]
    local: Callable[[Apply, Locals, Part], Sequence[Variable]] = same_op


@singledispatch
def rule(op: Op, node: Apply, ranks: int) -> list[OpStrategy]:
    """Return the choices of a node, beside those that every Op has.

    Every Op can be computed from replicated inputs at every rank, and from single ones at theirs. A
    rule for another Op is added with ``@rule.register(ThatOp)``. Among choices of the same cost the
    first is taken: those that shard come first, those whose results are partial last.

    Parameters
    ----------
    op : Op
    node : Apply
        Of the whole graph; the shapes of its variables are static.
    ranks : int
    """
    return []


def listed(node: Apply, ranks: int) -> list[OpStrategy]:
    """The choices that the rule of a node's Op lists.

    Raises ValueError if one of them cannot be a choice of the node.
    """
    found = rule(node.op, node, ranks)
    of = f"the rule of {type(node.op).__name__}"
    if not isinstance(found, list) or not all(isinstance(choice, OpStrategy) for choice in found):
        raise ValueError(f"{of} returns {found!r}, expected a list of OpStrategy")
    for choice in found:
        for side, variables in (("inputs", node.inputs), ("outputs", node.outputs)):
            placements = getattr(choice, side)
            if not isinstance(placements, tuple) or len(placements) != len(variables):
                raise ValueError(
                    f"{of} lists {side}={placements!r}, expected a tuple with a placement for each "
                    f"of {len(variables)}"
                )
            for variable, placement in zip(variables, placements, strict=True):
                if placement is None and side == "inputs":
                    continue
                try:
                    check_placement(placement, getattr(variable.type, "ndim", 0), ranks)
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{of} lists {side}={placements!r}: {error}") from error
    return found


def has_rule(op: Op) -> bool:
    """Return whether a rule is registered for an Op."""
    return rule.dispatch(type(op)) is not rule.dispatch(object)


def replicated(count: int) -> tuple[Placement, ...]:
    """Return `count` times `Replicate`."""
    return (Replicate(),) * count


def partial_sums(node: Apply, linear: Sequence[Sequence[int]]) -> list[OpStrategy]:
    """Choices of an Op that is linear in some of its inputs together.

    Each element of `linear` are positions of inputs: where these are partial sums and the others
    replicated, all outputs are partial sums.
    """
    choices = []
    for positions in linear:
        inputs = tuple(
            Partial() if at in positions else Replicate() for at in range(len(node.inputs))
        )
        choices.append(OpStrategy(inputs, (Partial(),) * len(node.outputs)))
    return choices
