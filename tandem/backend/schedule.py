"""Decisions about a graph before its program is written.

For each node: how and when it is computed, where its results lie, and after which node they are
freed. Updates of device-resident variables take effect as if all were written after everything has
been computed. Most are. One whose old value is no longer needed, in a part of the schedule where
nothing can fail, is written as soon as it is computed, or computed where it belongs; or, if its
variable is to be reported early, where the program is cut.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.type import TensorType

from tandem.backend.aliasing import Aliases, Overlaps
from tandem.backend.channel import Channel
from tandem.backend.lowering import Lowering, host_rule, lower
from tandem.backend.lowering.registry import is_host_type
from tandem.backend.perform import by_perform
from tandem.backend.precision import ProductPrecision, fit

Results = Literal["host", "device"]
"""Locations of a function's results: in NumPy arrays, or in tensors on its device."""
Observe = Callable[[Apply, Callable[..., Any]], Callable[..., Any]]
"""Wraps a call that is made for a node: its kernel, or the copy or conversion of an operand."""


@dataclass(frozen=True)
class Target:
    """The device and the options for which a program is made."""

    device: torch.device
    compiled: bool  # torch.compile will read the program
    precision: ProductPrecision = field(default_factory=ProductPrecision)
    on_gradient_ready: Callable[[str], None] | None = None  # the program is cut to call it
    # Names of variables that are reported together; without any, each is reported by itself.
    buckets: tuple[frozenset[str], ...] = ()
    strict: bool = False  # refuse an Op without a kernel
    results: Results = "host"
    channel: Channel | None = None  # to the other ranks
    observe: Observe | None = None  # wraps what each line calls

    @property
    def exposes_results(self) -> bool:
        """Return whether a caller gets the memory in which results were computed."""
        return self.device.type == "cpu" or self.results == "device"


@dataclass
class Cut:
    """A place in a schedule where the program is cut, since variables have their new values."""

    ready: list[Variable] = field(default_factory=list)
    # Of these, the ones that are to be stored here, each with its output of the graph.
    stores: list[tuple[int, Variable]] = field(default_factory=list)


def plan_node(node: Apply, on_host: Collection[Variable], target: Target) -> Lowering:
    """Choose between arithmetic on the host, a kernel, and the Op's own `perform`."""
    known = all(isinstance(v, Constant) or v in on_host for v in node.inputs)
    if known or is_host_type(node.outputs[0]):
        rule = host_rule(node.op, node)
        if rule is not None:
            return Lowering(rule, host=frozenset(range(len(node.inputs))), numbers=True)
    try:
        lowering = lower(node.op, node, device=target.device, compiled=target.compiled)
    except NotImplementedError as refusal:
        if target.strict:
            raise
        return by_perform(node, target.device, refusal)
    if lowering.over is not None:
        lowering = replace(lowering, call=lowering.over(target.channel))
    return fit(lowering, node, target.precision)


class Schedule:
    """The nodes of a graph in the order in which they run, and the memory of their results."""

    def __init__(
        self,
        fgraph: FunctionGraph,
        order: Sequence[Apply],
        buffers: Mapping[Variable, torch.Tensor],
        target: Target,
    ) -> None:
        self.fgraph, self._outputs = fgraph, fgraph.outputs
        self._compiled = target.compiled
        self._overlaps = Overlaps.of(buffers)
        updated = {index: fgraph.inputs[i] for index, i in update_mapping(fgraph).items()}
        # For each output that updates a device-resident input, that input.
        self.stores = {index: v for index, v in updated.items() if v in buffers}
        self.on_host = {v for v in fgraph.inputs if is_host_type(v)}
        self.lowerings: dict[Apply, Lowering] = {}
        for node in order:
            self.lowerings[node] = plan_node(node, self.on_host, target)
            numbers = self.lowerings[node].numbers
            self.on_host.update(v for v in node.outputs if numbers or is_host_type(v))
        groups = self._groups(order, target)
        if self.stores and (groups or not target.compiled):
            order = self._numbers_at_once(self._arranged(order, groups))
        self.order = order
        self._positions = {node: position for position, node in enumerate(order)}
        self.aliases = Aliases(fgraph.inputs, target.compiled)
        for node in order:
            self.aliases.compute(node, self.lowerings[node])
        self._find_last_uses(fgraph.inputs)
        # Nodes whose results go at once to the inputs that they update: (output of the graph,
        # input) for each of the node's outputs.
        self.direct = {} if target.compiled else self._direct_stores()
        for node, stores in self.direct.items():
            for output, (_, variable) in zip(node.outputs, stores, strict=True):
                self.aliases.place(output, variable)
        self.cuts = self._cuts(groups)  # by the last node before each
        # Outputs that are stored before the end.
        self.early = {
            index
            for stores in (*self.direct.values(), *(cut.stores for cut in self.cuts.values()))
            for index, _ in stores
        }

    def call(self, node: Apply) -> Callable[..., Any]:
        """Choose a variant of a node's call: one that overwrites an operand, where nothing reads it
        afterwards."""
        lowering = self.lowerings[node]
        if node in self.direct and lowering.into is not None:
            return lowering.into
        for index, variant in () if self._compiled else lowering.reuse.items():
            operand = node.inputs[index]
            owners = [v for v in node.inputs if operand in self.aliases.roots(v)]
            if (
                self.aliases.roots(operand) == {operand}
                and operand.owner is not None
                and owners == [operand]
                and self._root_uses[operand] == self._positions[node]
            ):
                return variant
        return lowering.call

    def is_overwritten(self, output: Variable) -> bool:
        """Return whether the updates at the end write into the memory of an output."""
        return self._overlaps.touch(self.aliases.roots(output), frozenset(self.stores.values()))

    def _is_certain(self, node: Apply) -> bool:
        """Return whether a node cannot fail: its shapes are known to fit, and no value is out of
        range.
        """
        lowering = self.lowerings[node]
        given = [
            v
            for at, v in enumerate(node.inputs)
            if at not in lowering.omit and not isinstance(v, Constant)
        ]
        variables = [*given, *node.outputs]
        static = all(isinstance(v.type, TensorType) and None not in v.type.shape for v in variables)
        return static and lowering.certain

    def _groups(self, order: Sequence[Apply], target: Target) -> list[list[int]]:
        """Find the updates that are reported together, as outputs of the graph, in their order."""
        if target.on_gradient_ready is None:
            return []
        if target.buckets:
            named = [[i for i, v in self.stores.items() if v.name in b] for b in target.buckets]
            return [group for group in named if group]
        places = {output: at for at, node in enumerate(order) for output in node.outputs}
        return [[i] for i in sorted(self.stores, key=lambda i: places.get(self._outputs[i], -1))]

    def _arranged(self, order: Sequence[Apply], groups: Sequence[Sequence[int]]) -> list[Apply]:
        """Put the nodes that can fail first, then those for each group but the last, then the rest.

        Each stands behind what it needs.
        """
        found, rest = _in_front(order, lambda node: not self._is_certain(node))
        for group in groups[:-1]:
            part, rest = _in_front(rest, lambda node: False, [self._outputs[i] for i in group])
            found += part
        return found + rest

    def _numbers_at_once(self, order: Sequence[Apply]) -> list[Apply]:
        """Put nodes that give a single number, and cannot fail, right behind their last operand.

        A large result is thus checked while it is in the cache, and then no longer needed.
        """
        followers: dict[Apply, list[Apply]] = {}
        positions = {node: position for position, node in enumerate(order)}
        last: dict[Apply, Apply] = {}
        for node in order:
            owners = [variable.owner for variable in node.inputs if variable.owner is not None]
            if _gives_numbers(node) and owners and self._is_certain(node):
                last[node] = max((last.get(o, o) for o in owners), key=positions.__getitem__)
                followers.setdefault(last[node], []).append(node)
        found: list[Apply] = []
        for node in order:
            if node not in last:
                found += [node, *followers.get(node, ())]
        return found

    def _find_last_uses(self, inputs: Collection[Variable]) -> None:
        """Find when each variable, and each root's memory, is used for the last time."""
        uses: dict[Variable, int] = {}
        for node, position in self._positions.items():
            for variable in (*node.inputs, *node.outputs):
                uses[variable] = position
        uses.update((variable, len(self.order)) for variable in self._outputs)
        self._root_uses: dict[Variable, int] = {}
        self.dying: dict[Apply, list[Variable]] = {}
        for variable, position in uses.items():
            for root in self.aliases.roots(variable):
                self._root_uses[root] = max(position, self._root_uses.get(root, 0))
            intermediate = not isinstance(variable, Constant) and variable not in inputs
            if intermediate and position < len(self.order):
                self.dying.setdefault(self.order[position], []).append(variable)

    @cached_property
    def _certain_from(self) -> int:
        """The position behind the last node that can fail."""
        uncertain = (at for node, at in self._positions.items() if not self._is_certain(node))
        return max(uncertain, default=-1) + 1

    def _fits(self, output: Variable, variable: Variable) -> bool:
        """Return whether storing `output` cannot fail, and changes no other variable."""
        return (
            output.type.shape == variable.type.shape
            and None not in variable.type.shape
            and self._overlaps.are_alone(variable)
        )

    def _direct_stores(self) -> dict[Apply, list[tuple[int, Variable]]]:
        found: dict[Apply, dict[Variable, tuple[int, Variable]]] = {}
        for index, variable in self.stores.items():
            output = self._outputs[index]
            if self._may_store(output, variable):
                found.setdefault(output.owner, {})[output] = index, variable
        return {
            node: [stores[output] for output in node.outputs]
            for node, stores in found.items()
            if len(stores) == len(node.outputs)
        }

    def _may_store(self, output: Variable, variable: Variable) -> bool:
        """Test if the old value of `variable` is not read after `output` has been computed."""
        node = output.owner
        if self._positions.get(node, -1) < self._certain_from:
            return False
        lowering = self.lowerings[node]
        others = [v for v in node.inputs if variable in self.aliases.roots(v) and v is not variable]
        return (
            self._fits(output, variable)
            and self.aliases.roots(output) == {output}
            and self._outputs.count(output) == 1
            and self._root_uses.get(variable, -1) <= self._positions[node]
            and (lowering.into is None or lowering.in_place or variable not in node.inputs)
            and not others
        )

    def _cuts(self, groups: Sequence[Sequence[int]]) -> dict[Apply, Cut]:
        """Find where the program is cut: after each group but those that end with the program."""
        direct = {
            index: self._positions[self._last_access(node, variable)]
            for node, stores in self.direct.items()
            for index, variable in stores
        }
        ready = [
            self._behind_numbers(
                max(direct[i] if i in direct else self._storable_from(i) for i in group)
            )
            for group in groups
        ]
        found: dict[Apply, Cut] = {}
        for group, at in zip(groups, ready, strict=True):
            if at < max(ready):
                cut = found.setdefault(self.order[at], Cut())
                cut.ready += [self.stores[index] for index in group]
                cut.stores += [(i, self.stores[i]) for i in group if i not in direct]
        return found

    def _behind_numbers(self, at: int) -> int:
        """Find the last of the nodes behind a position that give numbers only.

        What they are made of need not be kept for a later segment, such as a gradient of which it
        is checked whether it is finite.
        """
        while at + 1 < len(self.order) and _gives_numbers(self.order[at + 1]):
            at += 1
        return at

    def _storable_from(self, index: int) -> int:
        """Find after which node an update may be stored; the number of nodes if at the end only."""
        output, variable = self._outputs[index], self.stores[index]
        if not self._fits(output, variable):
            return len(self.order)
        return max(
            self._positions.get(output.owner, 0),
            self._root_uses.get(variable, 0),
            self._certain_from - 1,
        )

    def _last_access(self, writer: Apply, variable: Variable) -> Apply:
        """Find the last node that uses the memory of a variable that `writer` stores directly."""
        readers = (
            node
            for node in self.order
            if any(variable in self.aliases.roots(v) for v in node.inputs)
        )
        return max((writer, *readers), key=self._positions.__getitem__)


def _gives_numbers(node: Apply) -> bool:
    return all(getattr(variable.type, "ndim", None) == 0 for variable in node.outputs)


def _in_front(
    order: Sequence[Apply], is_wanted: Callable[[Apply], bool], variables: Iterable[Variable] = ()
) -> tuple[list[Apply], list[Apply]]:
    """Divide nodes into those that are wanted, or needed for these or `variables`, and others."""
    needed = set(variables)
    first: set[Apply] = set()
    for node in reversed(order):
        if is_wanted(node) or not needed.isdisjoint(node.outputs):
            first.add(node)
            needed.update(node.inputs)
    return [n for n in order if n in first], [n for n in order if n not in first]


def update_mapping(fgraph: FunctionGraph) -> dict[int, int]:
    """Return, for each output that is an update, the index of the input that it updates."""
    return cast(dict[int, int], fgraph.update_mapping or {})
