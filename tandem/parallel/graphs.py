"""Changes of a function's graph before it is sent to workers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytensor
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors, graph_inputs, toposort
from pytensor.scan.op import Scan
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.type_other import NoneConst

__all__ = [
    "Resolved",
    "check_no_generators",
    "depends_on",
    "replace_sliceables",
    "resolve",
    "shared_inputs",
]

Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None
"""Givens or updates, as `pytensor.function` takes them."""


@dataclass(frozen=True)
class Resolved:
    """A function's graph without givens."""

    outputs: list[Variable]
    updates: dict[SharedVariable, Variable]


def resolve(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    updates: Pairs = None,
    givens: Pairs = None,
    no_default_updates: bool | Collection[Variable] = False,
    *,
    rebuild_strict: bool = True,
) -> Resolved:
    """Apply givens to outputs and updates, and add default updates.

    ``pytensor.function(inputs, resolved.outputs, updates=resolved.updates)``, on shared variables
    without default updates, computes what `pytensor.function` computes with the arguments given
    here. What no given replaces stays the same variable. An explicit update of a shared variable
    takes precedence over its default update.

    Raises
    ------
    TypeError
        A given replaces what is no variable, an update is not of a shared variable, or a value does
        not have the type of what it replaces.
    ValueError
        A given replaces an input, or what an earlier one is computed from; or a shared variable is
        updated twice.
    """
    memo: dict[Variable, Variable] = {}
    for old, new in _pairs(givens):
        if not isinstance(old, Variable):
            raise TypeError(f"givens: {old!r} is replaced, which is not a variable")
        if old in inputs:
            raise ValueError(f"givens: {old} is an input of the function")
        if old in memo:
            raise ValueError(f"givens: {old} is replaced, and an earlier replacement uses it")
        value = new if isinstance(new, Variable) else pytensor.shared(new)
        (memo[old],) = _rebuild([value], memo, rebuild_strict)
    for variable in inputs:
        memo.setdefault(variable, variable)
    explicit = _explicit_updates(updates)
    results = _rebuild([*outputs, *explicit.values()], memo, rebuild_strict)
    count = len(outputs)
    new_values = dict(zip(explicit, results[count:], strict=True))
    if no_default_updates is not True:
        kept = set(no_default_updates or ())
        while added := _default_updates(memo, new_values.keys() | kept):
            values = _rebuild(list(added.values()), memo, rebuild_strict)
            new_values |= zip(added, values, strict=True)
    return Resolved(results[:count], new_values)


def _pairs(given: Pairs) -> list[tuple[Any, Any]]:
    return list(given.items() if isinstance(given, Mapping) else given or ())


def _explicit_updates(updates: Pairs) -> dict[SharedVariable, Variable]:
    found: dict[SharedVariable, Variable] = {}
    for target, value in _pairs(updates):
        if not isinstance(target, SharedVariable):
            raise TypeError(f"updates: {target!r} is not a shared variable")
        if target in found:
            raise ValueError(f"updates: {target} is updated twice")
        try:
            found[target] = target.type.filter_variable(value, allow_convert=True)
        except TypeError as error:
            raise TypeError(f"updates: {target} is {target.type}, its update: {error}") from error
    return found


def _default_updates(
    memo: Mapping[Variable, Variable], without: Collection[Variable]
) -> dict[SharedVariable, Variable]:
    """Find the default updates of the shared variables that are used."""
    return {
        v: v.type.filter_variable(v.default_update, allow_convert=False)
        for v, value in memo.items()
        if isinstance(v, SharedVariable) and value is v
        if v.default_update is not None and v not in without
    }


def _rebuild(
    variables: Sequence[Variable], memo: dict[Variable, Variable], strict: bool
) -> list[Variable]:
    """Return variables computed from what `memo` has in place of others; `memo` takes all in.

    An application of an Op none of whose inputs changes stays. With `strict` types stay too.
    """
    for node in toposort(variables, blockers=memo):
        inputs = [memo.setdefault(v, v) for v in node.inputs]
        outputs: Sequence[Variable] = node.outputs
        if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
            outputs = _applied(node, inputs, strict).outputs
        for old, new in zip(node.outputs, outputs, strict=True):
            memo.setdefault(old, new)
    return [memo.setdefault(v, v) for v in variables]


def _applied(node: Apply, inputs: list[Variable], strict: bool) -> Apply:
    """Apply a node's Op to other inputs; the outputs keep their names."""
    op = node.op
    if strict or [v.type for v in inputs] == [v.type for v in node.inputs]:
        return node.clone_with_new_inputs(inputs, strict=strict)
    if isinstance(op, Scan):
        op = _scan_of(op, node.inputs, inputs)
    elif isinstance(op, OpFromGraph):
        op = _op_of_graph(op, node.inputs, inputs)
    elif isinstance(op, SpecifyShape):
        inputs = _specified(node, inputs)
    made = op.make_node(*inputs)
    for old, new in zip(node.outputs, made.outputs, strict=True):
        new.name = old.name
    return made


def _scan_of(scan: Scan, before: Sequence[Variable], after: Sequence[Variable]) -> Scan:
    """Return a Scan whose steps take inputs of the types that its outer inputs now have."""
    outer = scan.get_oinp_iinp_iout_oout_mappings()["outer_inp_from_inner_inp"]
    places = [outer[place] for place in range(len(scan.inner_inputs))]
    inputs, outputs = _graph_of(
        scan, [before[place] for place in places], [after[place] for place in places]
    )
    return Scan(
        inputs,
        outputs,
        scan.info,
        mode=scan.mode,
        truncate_gradient=scan.truncate_gradient,
        name=scan.name,
        profile=scan.profile,
        allow_gc=scan.allow_gc,
        strict=scan.strict,
    )


def _op_of_graph(
    op: OpFromGraph, before: Sequence[Variable], after: Sequence[Variable]
) -> OpFromGraph:
    """Return an OpFromGraph whose graph takes inputs of the types that its inputs now have."""
    inputs, outputs = _graph_of(op, before, after)
    return OpFromGraph(inputs, outputs, inline=op.is_inline, name=op.name, **op.kwargs)


def _specified(node: Apply, inputs: list[Variable]) -> list[Variable]:
    """Drop the lengths that were known without being specified, and no longer are."""
    before, after = node.inputs[0].type.shape, inputs[0].type.shape
    lengths = zip(inputs[1:], before, after, strict=True)
    return [
        inputs[0],
        *(n if known is None or still is not None else NoneConst for n, known, still in lengths),
    ]


def _graph_of(
    op: Any, before: Sequence[Variable], after: Sequence[Variable]
) -> tuple[list[Variable], list[Variable]]:
    """Rebuild the graph inside an Op, without lengths that its inputs no longer have."""
    inputs = []
    for inner, old, new in zip(op.inner_inputs, before, after, strict=True):
        kind = inner.type
        if old.type != new.type and kind.ndim:
            lengths = zip(kind.shape, new.type.shape[-kind.ndim :], strict=True)
            kind = kind.clone(shape=[n if n == length else None for n, length in lengths])
        inputs.append(kind(name=inner.name))
    memo = dict(zip(op.inner_inputs, inputs, strict=True))
    return inputs, _rebuild(op.inner_outputs, memo, strict=False)


def depends_on(variables: Iterable[Variable], sources: Iterable[Variable]) -> set[Variable]:
    """Find the variables that are computed from any of the sources, or are one."""
    variables = list(variables)
    reached = set(sources)
    for node in toposort(variables):
        if not reached.isdisjoint(node.inputs):
            reached.update(node.outputs)
    return reached.intersection(variables)


def shared_inputs(variables: Iterable[Variable]) -> list[SharedVariable]:
    """List the shared variables that variables are computed from, in an order of the graph."""
    found = (v for v in graph_inputs(list(variables)) if isinstance(v, SharedVariable))
    return list(dict.fromkeys(found))


def check_no_generators(results: Iterable[Variable], rows: Iterable[Variable] = ()) -> None:
    """Raise ValueError for a shared random generator, and for one that is drawn from for `rows`.

    Any other draws the same for all workers, as it should.
    """
    made = [*ancestors(results)]
    drawing = [
        (variable, node)
        for node in dict.fromkeys(variable.owner for variable in made if variable.owner)
        for variable in node.inputs
        if isinstance(variable.type, RandomType)
    ]
    refused = [v for v in made if isinstance(v, SharedVariable) and isinstance(v.type, RandomType)]
    refused += [v for v, node in drawing if depends_on(node.inputs, rows)]
    for variable in refused:
        raise ValueError(
            f"{variable.name or 'a variable'} is a random generator: each worker would "
            "draw the same numbers for other rows; use dropout that is keyed by the row, "
            "tandem.layers.dropout with Training(seed, epoch, indices=row_index()), or "
            "tandem.ops.dropout_mask(seed, epoch, row_index(), ...), with another epoch in "
            "each call"
        )


def replace_sliceables(
    outputs: Sequence[Variable], replacements: Mapping[SharedVariable, Variable]
) -> list[Variable]:
    """Return outputs computed from a replacement wherever they read a shared variable.

    A replacement may be computed from the variable it replaces, and may be of a type with other
    lengths, as ``x[start:stop]`` is. `outputs` has no givens, see `resolve`.

    Raises
    ------
    TypeError
        A replacement has another dtype or number of axes than its variable.
    """
    memo: dict[Variable, Variable] = {}
    for old, new in replacements.items():
        if (old.type.dtype, old.type.ndim) != (new.type.dtype, new.type.ndim):
            raise TypeError(f"{old} is {old.type}, its replacement is {new.type}")
        memo[old] = new
    return _rebuild(outputs, memo, strict=False)
