"""To which layer, and to which phase of a step, a node of a compiled function belongs.

Both follow from the data flow between the function's variables, which have the names of parameters:
``conv1.weight``, ``gradient/conv1.weight`` and, of an optimizer's state, ``momentum/conv1.weight``.
A rewrite may replace any other node, and what a graph was built of is then lost.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, cast, get_args

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph

from tandem.layers.parameter import layer_of
from tandem.ops import Collective
from tandem.training.graphs import GRADIENT

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)

INPUT = "input"
"""The part before the first layer with parameters, such as a crop."""
TOTALS = "totals"
"""The part of no layer: sums over minibatches, and counts of pictures."""


class NodeOrigin(NamedTuple):
    """The layer and the phase of a node."""

    layer: str  # the name of a layer with parameters, `INPUT` or `TOTALS`
    phase: Phase


def layers_of(fgraph: FunctionGraph) -> dict[Apply, NodeOrigin]:
    """Find the layer and the phase of each node of a function, such as those of a trainer.

    A node that takes a parameter, or gives its gradient or its new value, belongs to the
    parameter's layer. In the forward pass any other belongs to the nearest such layer before it; in
    the backward pass to that of the activation that it takes or, if it takes none, to that to which
    it passes a gradient.

    Parameters
    ----------
    fgraph : FunctionGraph
        The graph of a function after rewriting, with its ``update_mapping``: one that stores
        gradients, one that updates parameters from them, or one that does neither.

    Raises
    ------
    ValueError
        It updates parameters from gradients that it computes itself.
    """
    flow = _Flow(fgraph)
    phases = flow.phases()
    layers = _layers(flow, phases)
    return {node: NodeOrigin(layers[node], phases[node]) for node in flow.nodes}


class _Named(NamedTuple):
    """The part that a variable of a function has in a parameter."""

    role: str  # "" for its value, `GRADIENT`, or the name of an optimizer's state
    parameter: str


def _named(variable: Variable) -> _Named | None:
    """Read a variable's name; None if it is no parameter's."""
    role, slash, parameter = (variable.name or "").removeprefix("part of ").rpartition("/")
    return _Named(role + slash, parameter) if layer_of(parameter) else None


class _Flow:
    """Nodes in the order of data flow, and what their operands and results are of parameters."""

    def __init__(self, fgraph: FunctionGraph) -> None:
        self.nodes: list[Apply] = fgraph.toposort()
        self._outputs = fgraph.outputs
        mapping = cast(dict[int, int], fgraph.update_mapping or {})
        updated = {fgraph.outputs[at]: fgraph.inputs[of] for at, of in mapping.items()}
        # Variables that hold a parameter: its own, and what is made of nothing else.
        self.names = {v: named for v in fgraph.inputs if (named := _named(v)) is not None}
        self.made: set[Apply] = set()
        for node in self.nodes:
            operands = [v for v in node.inputs if not isinstance(v, Constant)]
            if operands and all(self._is_value(v) for v in operands):
                self.made.add(node)
                self.names |= dict.fromkeys(node.outputs, self.names[operands[0]])
        known = set(self.nodes)
        self.clients: dict[Apply, list[Apply]] = {}
        for node in self.nodes:
            results = (v for v in node.outputs if not _is_token(v))
            users = (user for v in results for user, _ in fgraph.clients[v])
            self.clients[node] = [user for user in dict.fromkeys(users) if user in known]
        read = [self.names[v] for node in self.nodes for v in node.inputs if v in self.names]
        written = {v: self.names[of] for v, of in updated.items() if of in self.names}
        # Of what else is stored among the gradients, the parameter is not read: an average's.
        learned = {named.parameter for named in read if not named.role}
        self.gradients = {v: p for v, (_, p) in written.items() if p in learned}
        self.is_update = any(named.role == GRADIENT for named in read)
        own = [named.parameter for named in written.values() if not named.role]
        if own and not self.is_update:
            raise ValueError(f"the gradient of {own[0]} is not stored before its update")

    def own(self, node: Apply) -> str | None:
        """Name the parameter whose gradient a node gives, or which it takes."""
        gradients = [self.gradients[v] for v in node.outputs if v in self.gradients]
        taken = [self.names[v].parameter for v in node.inputs if v in self.names]
        return next(iter(gradients + taken), None)

    def before(self, node: Apply) -> list[Apply]:
        """Nodes whose results a node takes, but for tokens, which only put them in an order."""
        return [v.owner for v in node.inputs if v.owner is not None and not _is_token(v)]

    def _is_value(self, variable: Variable) -> bool:
        named = self.names.get(variable)
        return named is not None and not named.role

    def phases(self) -> dict[Apply, Phase]:
        """Find the phase of each node.

        The loss follows from all parameters, and their gradients from the loss. So a node of the
        forward pass leads to the gradient of each parameter that it follows from; one of the
        backward pass does not lead to those of later layers, from which it follows. What lies
        between the outputs and their gradient could be of either pass: it is of the forward pass if
        it leads to the loss or, where auxiliary losses are not counted, to a gradient.
        """
        if self.is_update:
            return dict.fromkeys(self.nodes, "update")
        after, leads = self._follows_from(), self._leads_to()
        counts = self._counts()
        counted: set[str] = set().union(*(after[node] for node in counts))
        found: dict[Apply, Phase] = {}
        for node in self.nodes:
            if leads[node]:
                is_turn = counts and after[node] | leads[node] <= counted
                is_forward = after[node] <= leads[node] and not is_turn
            else:
                passed = all(found[n] == "forward" for n in self.before(node))
                is_forward = passed and self.gradients.keys().isdisjoint(node.outputs)
            found[node] = "forward" if is_forward or node in counts else "backward"
        return found

    def _counts(self) -> set[Apply]:
        """Nodes that lead to outputs which no gradient precedes: the loss, and what is counted."""
        behind: set[Apply] = set()
        for node in self.nodes:
            gives = not self.gradients.keys().isdisjoint(node.outputs)
            if gives or not behind.isdisjoint(self.before(node)):
                behind.add(node)
        found = {v.owner for v in self._outputs if v.owner and not _is_token(v)} - behind
        for node in reversed(self.nodes):
            if not found.isdisjoint(self.clients[node]):
                found.add(node)
        return found

    def _follows_from(self) -> dict[Apply, set[str]]:
        """Find the learned parameters that each node's results follow from."""
        learned = set(self.gradients.values())
        found: dict[Apply, set[str]] = {}
        for node in self.nodes:
            own = {self.names[v].parameter for v in node.inputs if v in self.names} & learned
            found[node] = own.union(*(found[owner] for owner in self.before(node)))
        return found

    def _leads_to(self) -> dict[Apply, set[str]]:
        """Find the parameters whose gradients other nodes compute from a node's results."""
        found: dict[Apply, set[str]] = {}
        given = {
            node: {self.gradients[v] for v in node.outputs if v in self.gradients}
            for node in self.nodes
        }
        for node in reversed(self.nodes):
            found[node] = set().union(*(found[n] | given[n] for n in self.clients[node]))
        return found


def _is_token(variable: Variable) -> bool:
    node = variable.owner
    return node is not None and isinstance(node.op, Collective) and variable is node.outputs[1]


def _layers(flow: _Flow, phases: Mapping[Apply, Phase]) -> dict[Apply, str]:
    """Find the layer of each node: its own, and then that of the nearest that has one."""
    own = {node: layer_of(name) for node in flow.nodes if (name := flow.own(node))}
    found = dict(own)
    forward, backward, update = ([n for n in flow.nodes if phases[n] == p] for p in PHASES)

    def users(node: Apply) -> list[Apply]:
        return [n for n in flow.clients[node] if phases[n] == phases[node]]

    _spread(found, forward, flow.before)
    # Of what follows from no layer, such as a mask: that of an activation to which it is applied.
    _spread(found, forward[::-1], lambda node: [n for n in users(node) if n not in own])
    for node in backward:
        taken = [v.owner for v in node.inputs if getattr(v.type, "ndim", 0) and v.owner in found]
        activations = [n for n in taken if n and phases[n] == "forward" and n not in flow.made]
        if node not in found and activations:
            found[node] = found[activations[-1]]
    for nodes in (backward, update):
        _spread(found, nodes[::-1], users)
        _spread(found, nodes, flow.before)
    for node in reversed(flow.nodes):
        leads = any(found[n] != TOTALS for n in flow.clients[node])
        found.setdefault(node, INPUT if leads else TOTALS)
    return found


def _spread(
    found: dict[Apply, str], nodes: Iterable[Apply], near: Callable[[Apply], Iterable[Apply]]
) -> None:
    """Give nodes, in an order in which neighbours come first, the layer of the nearest of them."""
    distances = dict.fromkeys(found, 0)
    for node in nodes:
        known = [n for n in near(node) if n in distances]
        if node not in found and known:
            nearest = min(known, key=distances.__getitem__)
            found[node], distances[node] = found[nearest], distances[nearest] + 1
