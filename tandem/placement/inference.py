"""Inference of the placement of each node of a graph, and of the conversions that follow.

Nodes are looked at in topological order, and each takes the choice for which the ranks together
receive the fewest bytes. This is greedy: it looks ahead only to the placements that results must
have, and over partial sums, which must be added sooner or later. A conversion is made once, however
many nodes need it; so the search is repeated with the conversions that it has found, for nodes that
come before them and can use them as well.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import io_toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape

from tandem.placement.annotations import Place
from tandem.placement.conversions import describe, find_kind, nbytes
from tandem.placement.placements import Partial, Placement, Replicate, Single
from tandem.placement.plans import ComputationStep, ConversionStep, Form, Plan, Step
from tandem.placement.rules import OpStrategy, has_rule, listed

_PASSES = 8
_DEPTH = 4  # nodes that may be computed again, in a row, in place of a conversion


@dataclass(frozen=True)
class Inferred:
    """The steps by which every rank computes its part of a graph."""

    steps: Sequence[Step]
    without_rule: Sequence[Apply]  # nodes for which something was converted since they have none

    @cached_property
    def conversions(self) -> list[ConversionStep]:
        return [step for step in self.steps if isinstance(step, ConversionStep)]

    @property
    def moved(self) -> list[Form]:
        """The forms for which bytes pass between ranks."""
        return [form for step in self.conversions if step.kind.moves for form in step.makes]

    @property
    def cost(self) -> tuple[float, int]:
        """Bytes that the ranks receive together, and the number of conversions."""
        return sum(step.total for step in self.conversions), len(self.conversions)


def infer(
    outputs: Sequence[Form],
    given: Mapping[Variable, Placement],
    ranks: int,
    fixed: Collection[Variable] = (),
) -> Inferred:
    """Find the steps for the forms of a graph's outputs, from those of its inputs.

    Inputs that are not `given` are replicated. Those that are `fixed` move to no other rank, nor do
    the same elements in another order. Raises ValueError if a tensor must be converted that is
    fixed, or whose shape is not known.
    """
    nodes = io_toposort([], [v for v, _ in outputs])

    def search(expected: Sequence[Form]) -> Inferred:
        return _Search(nodes, outputs, given, ranks, fixed, expected).result()

    best = search([])
    for _ in range(_PASSES):
        found = search(best.moved)
        if found.cost >= best.cost:
            break
        best = found
    return best


class _Search:
    """One pass over a graph."""

    def __init__(
        self,
        nodes: Sequence[Apply],
        outputs: Sequence[Form],
        given: Mapping[Variable, Placement],
        ranks: int,
        fixed: Collection[Variable],
        expected: Sequence[Form],
    ) -> None:
        self._nodes, self._outputs, self._ranks = nodes, outputs, ranks
        self._given, self._expected = given, frozenset(expected)
        self._expected_forms: dict[Variable, list[Placement]] = {}
        for variable, placement in dict.fromkeys(expected):  # in an order that all ranks have
            self._expected_forms.setdefault(variable, []).append(placement)
        singles = [p for p in (*given.values(), *(p for _, p in outputs)) if isinstance(p, Single)]
        singles += [n.op.placement for n in nodes if _is_single(n)]
        self._everywhere: list[Placement] = [Replicate(), *dict.fromkeys(singles)]
        self._choices: dict[Apply, list[OpStrategy]] = {}
        self._available: dict[Variable, dict[Placement, None]] = {}
        self._steps: list[Step] = []
        self._plans: dict[tuple[Variable, Placement, int], Plan | ValueError] = {}
        self._without_rule: list[Apply] = []
        self._fixed = _with_views(fixed, nodes)
        self._users: dict[Variable, list[Apply]] = {}
        for node in nodes:
            for variable in dict.fromkeys(node.inputs):
                self._users.setdefault(variable, []).append(node)
        self._annotated = self._find_annotated()

    def result(self) -> Inferred:
        """Choose for every node, and keep the steps that the outputs need."""
        for node in self._nodes:
            self._commit(self._best(node))
        for variable, placement in self._outputs:
            self._commit(self._plan(variable, placement, 0))
        needed, live = set(self._outputs), []
        for step in reversed(self._steps):
            if not needed.isdisjoint(step.makes):
                needed.update(step.needs)
                live.append(step)
        used = {step.node for step in live if isinstance(step, ComputationStep)}
        return Inferred(live[::-1], [node for node in self._without_rule if node in used])

    # Choices

    def _of(self, node: Apply) -> list[OpStrategy]:
        """All choices of a node, in the order in which ties are decided."""
        if node not in self._choices:
            found = listed(node, self._ranks)
            if not isinstance(node.op, Place):
                found = [c for c in found if _may_add(node, c)] + [
                    OpStrategy((p,) * len(node.inputs), (p,) * len(node.outputs))
                    for p in self._everywhere
                ]
            self._choices[node] = found
        return self._choices[node]

    def _best(self, node: Apply) -> Plan:
        found: dict[tuple[float, bool, int, tuple[float, int], int], Plan] = {}
        failure: ValueError | None = None
        for number, choice in enumerate(self._of(node)):
            step = ComputationStep(node, choice)
            try:
                plan = self._for_all(step.needs, 0)
                later = [self._later(*form) for form in step.makes]
            except ValueError as error:  # a conversion of what is fixed, or has no known shape
                failure = error
                continue
            total, count = (sum(costs) for costs in zip(plan.cost, *later, strict=True))
            # Sums that have not been added yet are larger than their parts: what is computed of
            # them takes longer.
            waits = not _is_view(node) and any(map(_is_partial, choice.outputs)) and total > 0
            count += sum(self._misfits(*form) for form in step.makes)
            key = (total, waits, count, plan.whole_cost, number)
            found[key] = plan.then(self._alone(step))
        if not found:
            assert failure is not None
            raise failure
        best = min(found)
        if not has_rule(node.op) and found[best].converts:
            self._without_rule.append(node)
        return found[best]

    def _later(self, variable: Variable, placement: Placement) -> tuple[float, int]:
        """The cost of a result in a placement behind its node, as far as is known."""
        annotation = self._annotated.get(variable)
        if annotation is not None:
            return self._direct(variable, placement, annotation).whole_cost
        if not _is_partial(placement) or _size(variable) == 1:  # a number may wait for its use
            return 0.0, 0
        return nbytes(variable) * (self._ranks - 1), 0

    def _misfits(self, variable: Variable, placement: Placement) -> int:
        """Count nodes that cannot use a result in a placement as their other inputs lie so far."""

        def fits(node: Apply, choice: OpStrategy) -> bool:
            return all(
                p is None or (p == placement if v is variable else self._may_be(v, p))
                for v, p in zip(node.inputs, choice.inputs, strict=True)
            )

        return sum(
            not any(fits(node, choice) for choice in self._of(node))
            for node in self._users.get(variable, ())
        )

    def _may_be(self, variable: Variable, placement: Placement) -> bool:
        """Return whether a variable is had in a placement, or no placement is known yet."""
        if variable.owner is None:
            return placement in self._forms(variable) or Replicate() in self._forms(variable)
        return variable not in self._available or placement in self._available[variable]

    def _find_annotated(self) -> dict[Variable, Placement]:
        """Placements that results should have, since outputs must have theirs.

        An annotation goes backwards through nodes that compute an element from those at its place.
        """
        annotated = dict(self._outputs)
        for node in reversed(self._nodes):
            if isinstance(node.op, Dot | Blockwise):  # an element of a product needs many
                continue
            for at, output in enumerate(node.outputs):
                if output not in annotated:
                    continue
                fitting = [c for c in self._of(node) if c.outputs[at] == annotated[output]]
                for position, variable in enumerate(node.inputs):
                    options = {c.inputs[position] for c in fitting}
                    option = options.pop() if len(options) == 1 else None
                    is_free = variable not in self._fixed
                    if option is not None and is_free and _same_size(variable, output):
                        annotated.setdefault(variable, option)
        return annotated

    # Plans

    def _forms(self, variable: Variable) -> Iterable[Placement]:
        if variable not in self._available:  # an input, or a constant
            self._available[variable] = {self._given.get(variable, Replicate()): None}
        return self._available[variable]

    def _for_all(self, forms: Iterable[Form], depth: int) -> Plan:
        plans = (self._plan(variable, placement, depth) for variable, placement in forms)
        return reduce(Plan.then, plans, Plan(expected=self._expected))

    def _plan(self, variable: Variable, target: Placement, depth: int) -> Plan:
        """The cheapest way to a form: it is there, is computed again, or is converted."""
        key = variable, target, depth
        if key not in self._plans:
            self._plans[key] = self._found(variable, target, depth)
        plan = self._plans[key]
        if isinstance(plan, ValueError):
            raise plan
        return plan

    def _found(self, variable: Variable, target: Placement, depth: int) -> Plan | ValueError:
        forms = self._forms(variable)
        if target in forms:
            return Plan(expected=self._expected)
        again = self._again(variable, target, depth)
        if again is not None and again.cost == (0.0, 0):
            return again
        options: list[Plan] = []
        failure: ValueError | None = None
        for source in forms:
            ways = [source, *(p for p in self._expected_forms.get(variable, ()) if p not in forms)]
            try:
                options += [
                    self._direct(variable, source, way).then(self._direct(variable, way, target))
                    for way in ways
                ]
            except ValueError as error:
                failure = error
        if again is not None:  # a view takes no time, others what is the same by a conversion
            options.insert(0 if _is_view(variable.owner) else len(options), again)
        if failure is not None and not options:
            return failure
        return min(options, key=lambda plan: plan.cost_of((variable, target)))

    def _again(self, variable: Variable, target: Placement, depth: int) -> Plan | None:
        """Recompute a result by another choice of its node, where that is cheap."""
        node = variable.owner
        if node is None or depth == _DEPTH or not _is_cheap(node):
            return None
        plans = []
        for choice in self._of(node):
            if choice.outputs[node.outputs.index(variable)] == target:
                step = ComputationStep(node, choice)
                with contextlib.suppress(ValueError):
                    plans.append(self._for_all(step.needs, depth + 1).then(self._alone(step)))
        return min(plans, key=lambda plan: plan.cost, default=None)

    def _direct(self, variable: Variable, source: Placement, target: Placement) -> Plan:
        """Convert a form into another, by way of the whole if there is no other way."""
        if source == target:
            return Plan(expected=self._expected)
        kind = find_kind(source, target)
        if kind is None:
            whole = self._direct(variable, source, Replicate())
            return whole.then(self._direct(variable, Replicate(), target))
        if kind.moves and variable in self._fixed:
            raise ValueError(f"{describe(variable)} is fixed, and would have to be moved")
        total = kind.weight(self._ranks) * nbytes(variable)
        return self._alone(ConversionStep(variable, source, target, kind, total))

    def _alone(self, step: Step) -> Plan:
        return Plan(dict.fromkeys(step.makes, step), self._expected)

    def _commit(self, plan: Plan) -> None:
        steps = list(dict.fromkeys(plan.steps.values()))
        if len(steps) > 1 or any(isinstance(step, ConversionStep) for step in steps):
            self._plans.clear()  # there are new forms, from which others may be had
        for step in steps:
            self._steps.append(step)
            for variable, placement in step.makes:
                self._available.setdefault(variable, {})[placement] = None


def _with_views(fixed: Collection[Variable], nodes: Sequence[Apply]) -> set[Variable]:
    """Variables, with those that are the same elements with other axes."""
    found = set(fixed)
    for node in nodes:
        if _is_view(node) and node.inputs[0] in found:
            found.update(node.outputs)
    return found


def _is_view(node: Apply) -> bool:
    return isinstance(node.op, DimShuffle | Reshape)


def _is_partial(placement: Placement) -> bool:
    return isinstance(placement, Partial)


def _may_add(node: Apply, choice: OpStrategy) -> bool:
    """Return whether results that are partial sums are of dtypes in which terms can be added later.

    Of bool there is no sum, and that of small integers may wrap around, which its terms do not.
    """
    pairs = zip(node.outputs, choice.outputs, strict=True)
    dtypes = [np.dtype(v.type.dtype) for v, placement in pairs if placement == Partial("sum")]
    return all(dtype.kind in "fc" or dtype in ("int64", "uint64") for dtype in dtypes)


def _is_single(node: Apply) -> bool:
    return isinstance(node.op, Place) and isinstance(node.op.placement, Single)


def _size(variable: Variable) -> int | None:
    shape = getattr(variable.type, "shape", None)
    if shape is None or None in shape:
        return None
    size = 1
    for length in shape:
        size *= length
    return size


def _same_size(a: Variable, b: Variable) -> bool:
    return _size(a) is not None and _size(a) == _size(b)


def _is_cheap(node: Apply) -> bool:
    """Return whether recomputing a node is cheap: it moves data, or makes much of little."""
    if isinstance(node.op, Elemwise | DimShuffle | Reshape):
        return True
    sizes = [_size(v) for v in (*node.inputs, *node.outputs)]
    if None in sizes:
        return False
    given = sum(_size(v) or 0 for v in node.inputs)
    return given * 8 < sum(_size(v) or 0 for v in node.outputs)
