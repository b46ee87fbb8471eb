"""Rules: for each Op, how its parts are computed; one module for each kind of Op."""

from tandem.placement.rules import pytensor_ops, tandem_ops
from tandem.placement.rules.registry import Choice, Locals, Part, has_rule, rule

__all__ = ["Choice", "Locals", "Part", "has_rule", "pytensor_ops", "rule", "tandem_ops"]
