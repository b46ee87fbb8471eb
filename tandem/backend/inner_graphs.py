"""Rewrites of graphs inside Ops, and of the branches of an IfElse into such graphs."""

from collections.abc import Sequence
from typing import Any, cast

from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.type import Type
from pytensor.ifelse import IfElse

from tandem.backend.norm_rewrites import NORMALIZATION
from tandem.backend.pooling_rewrites import POOLING

REQUIRED_REWRITES = ("minimum_compile", "lazy_branches")

# A trace of a Scan is cut to what is read of it, in a form that no other backend needs.
REWRITES = RewriteDatabaseQuery(
    include=["fast_run", "scan_save_mem_no_prealloc", POOLING, NORMALIZATION]
)

# Rewrites for another backend (C code, BLAS through C, loops in C or Numba), and those that write
# over operands or fuse, which the program itself or torch.compile does.
INCOMPATIBLE_REWRITES = (
    "cxx_only",
    "BlasOpt",
    "fusion",
    "inplace",
    "add_mul_fusion",
    "scan_reduce_trace_prealloc",
    "reuse_lu_decomposition_multiple_solves",
    "scan_split_non_sequence_lu_decomposition_solve",
)


def rewritten(graph: Any) -> FunctionGraph:
    """Return a copy of a graph inside an Op, rewritten as the graph of a function is."""
    inner: FunctionGraph = graph.clone()
    query = REWRITES.including(*REQUIRED_REWRITES).excluding(*INCOMPATIBLE_REWRITES)
    optdb.query(query).rewrite(inner)
    return inner


class Branches(Op):
    """An `IfElse` that owns what only one of its branches needs, and computes just one.

    Inputs are the condition and then those of both graphs; outputs are those of the graph that the
    condition chooses.
    """

    def __init__(self, graphs: tuple[FunctionGraph, FunctionGraph]) -> None:
        self.graphs = graphs

    def make_node(self, *inputs: Variable) -> Apply:
        yes, no = self.graphs
        pairs = zip(yes.outputs, no.outputs, strict=True)
        return Apply(self, list(inputs), [_common(one.type, other.type)() for one, other in pairs])

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Any) -> None:
        raise NotImplementedError("Branches are computed by a device's linker")


def _common(one: Any, other: Any) -> Type:
    """The type of what is of either type: with the lengths that both know."""
    if one.is_super(other):
        return cast(Type, one)
    if not hasattr(other, "shape"):
        return cast(Type, other)
    shape = tuple(a if a == b else None for a, b in zip(one.shape, other.shape, strict=True))
    return cast(Type, other.clone(shape=shape))


class LazyBranches(GraphRewriter):
    """Moves what only one branch of an `IfElse` needs into a graph of that branch."""

    def apply(self, fgraph: FunctionGraph) -> None:
        # The last one first: others may be part of its branches.
        for node in reversed(fgraph.toposort()):
            if isinstance(node.op, IfElse) and node in fgraph.apply_nodes:
                _make_lazy(fgraph, node)


def _make_lazy(fgraph: FunctionGraph, node: Apply) -> None:
    condition, *choices = node.inputs
    half = len(node.outputs)
    places = range(1, half + 1), range(half + 1, 2 * half + 1)
    parts = [_exclusive(fgraph, node, branch) for branch in places]
    if not any(parts):
        return
    values = choices[:half], choices[half:]
    inputs = [_inputs(part, outputs) for part, outputs in zip(parts, values, strict=True)]
    yes, no = (FunctionGraph(i, o, clone=True) for i, o in zip(inputs, values, strict=True))
    results = Branches((yes, no)).make_node(condition, *inputs[0], *inputs[1]).outputs
    pairs = [
        (old, old.type.filter_variable(new)) for old, new in zip(node.outputs, results, strict=True)
    ]
    fgraph.replace_all(pairs, reason="lazy_branches")


def _exclusive(fgraph: FunctionGraph, node: Apply, branch: range) -> dict[Apply, None]:
    """Find the nodes whose results nothing but one branch of an IfElse needs."""
    found: dict[Apply, None] = {}
    pending = [node.inputs[place].owner for place in branch]
    while pending:
        owner = pending.pop()
        if owner is None or owner in found:
            continue
        clients = (client for output in owner.outputs for client in fgraph.clients[output])
        if all(user in found or (user is node and at in branch) for user, at in clients):
            found[owner] = None
            pending += [variable.owner for variable in owner.inputs]
    return found


def _inputs(part: dict[Apply, None], outputs: Sequence[Variable]) -> list[Variable]:
    """List what a branch takes from outside: neither constant nor computed by its own nodes."""
    used = [variable for node in part for variable in node.inputs] + list(outputs)
    outside = (v for v in used if v.owner not in part and not isinstance(v, Constant))
    return list(dict.fromkeys(outside))


# After all other rewrites: these know an IfElse.
optdb.register("lazy_branches", LazyBranches(), position=200)
