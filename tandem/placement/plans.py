"""Plans: the steps by which a rank gets tensors in the placements in which they are needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pytensor.graph.basic import Apply, Variable

from tandem.placement.conversions import Kind
from tandem.placement.placements import Placement
from tandem.placement.rules import OpStrategy

Form = tuple[Variable, Placement]
"""A variable as it is had in a placement."""


@dataclass(frozen=True, eq=False)
class ConversionStep:
    """A step that makes a form from another of the same variable."""

    variable: Variable
    source: Placement
    target: Placement
    kind: Kind
    total: float  # bytes that all ranks receive together

    @property
    def makes(self) -> list[Form]:
        return [(self.variable, self.target)]

    @property
    def needs(self) -> list[Form]:
        return [(self.variable, self.source)]


@dataclass(frozen=True, eq=False)
class ComputationStep:
    """A step that makes forms of a node's outputs, by one of its choices."""

    node: Apply
    choice: OpStrategy
    total = 0.0

    @property
    def makes(self) -> list[Form]:
        return list(zip(self.node.outputs, self.choice.outputs, strict=True))

    @property
    def needs(self) -> list[Form]:
        pairs = zip(self.node.inputs, self.choice.inputs, strict=True)
        return [(v, placement) for v, placement in pairs if placement is not None]


Step = ConversionStep | ComputationStep


@dataclass(frozen=True)
class Plan:
    """The steps that make forms, in their order, by the form that each makes."""

    steps: Mapping[Form, Step] = field(default_factory=dict)
    expected: frozenset[Form] = frozenset()  # forms that will be made in any case

    @cached_property
    def cost(self) -> tuple[float, int]:
        """Bytes that the ranks receive together, and the number of conversions."""
        return self._cost(self.expected)

    def cost_of(self, form: Form) -> tuple[float, int]:
        """The cost of a plan for a form, which counts although it is expected to be made."""
        return self._cost(self.expected - {form}) if form in self.expected else self.cost

    def _cost(self, free: frozenset[Form]) -> tuple[float, int]:
        conversions = [
            s for f, s in self.steps.items() if isinstance(s, ConversionStep) and f not in free
        ]
        return sum(s.total for s in conversions), sum(s.kind.name != "keep" for s in conversions)

    @property
    def whole_cost(self) -> tuple[float, int]:
        """The cost with what is expected."""
        return self._cost(frozenset())

    @property
    def converts(self) -> bool:
        """Return whether a tensor is converted, also where that is expected."""
        steps = [s for s in self.steps.values() if isinstance(s, ConversionStep)]
        return any(s.kind.name != "keep" for s in steps)

    def then(self, other: "Plan") -> "Plan":
        """Return both plans as one, with what they have in common once."""
        added = {form: s for form, s in other.steps.items() if form not in self.steps}
        return Plan({**self.steps, **added}, self.expected)
