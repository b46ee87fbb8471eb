"""Rules: for each Op, how its parts are computed; one module for each kind of Op."""

from tandem.placement.rules import pytensor_ops, tandem_ops
from tandem.placement.rules.registry import Locals, OpStrategy, Part, has_rule, listed, rule

__all__ = [
    "Locals",
    "OpStrategy",
    "Part",
    "has_rule",
    "listed",
    "pytensor_ops",
    "rule",
    "tandem_ops",
]
