"""A graph of whole tensors as the graph of one rank, with the conversions that it needs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.type import TensorType

from tandem.ops.collective import first_token, placeholder
from tandem.placement.conversions import convert_here, describe, known_shape
from tandem.placement.inference import infer
from tandem.placement.placements import (
    Partial,
    Placement,
    Replicate,
    Shape,
    Single,
    check_placement,
    local_index,
    local_shape,
)
from tandem.placement.plans import ComputationStep, ConversionStep, Form, Step
from tandem.placement.rules import Part
from tandem.placement.static_lengths import with_static_lengths


@dataclass(frozen=True)
class Conversion:
    """A conversion that moves bytes between ranks."""

    number: int  # from 0, in the order in which every rank makes them
    kind: str  # such as "all-gather"
    shape: Shape  # of the whole tensor
    dtype: str
    received: int  # bytes, at this rank
    name: str  # of what is converted
    source: Placement
    target: Placement


@dataclass(frozen=True)
class Partitioned:
    """One rank's part of a graph.

    Attributes
    ----------
    outputs : list of Variable or None
        Its part of each output; None where the output is at another rank alone.
    inputs : dict of Variable to Variable
        For each input of the whole graph, shared variables included, the variable in its place. One
        that is at another rank alone is left out.
    shared : dict of Variable to (tuple of slice, tuple of int)
        For each shared variable among them, which elements of its value this rank has, and their
        shape.
    conversions : list of Conversion
        In the order in which all ranks make them.
    received : int
        Bytes that come from other ranks each time the graph is computed.
    without_rule : list of str
        Ops that were computed from whole tensors, which had to be converted, since they have no
        rule.
    token : Variable or None
        A scalar that is known when all conversions have been made; None if there are none. A
        function must compute it too: the other ranks wait for all of them, also for those whose
        results this rank does not use.
    """

    outputs: list[Variable | None]
    inputs: dict[Variable, Variable]
    shared: dict[Variable, tuple[tuple[slice, ...], Shape]] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    without_rule: list[str] = field(default_factory=list)
    token: Variable | None = None

    @property
    def received(self) -> int:
        return sum(conversion.received for conversion in self.conversions)


def partition(
    outputs: Sequence[Variable],
    *,
    given: Mapping[Variable, Placement],
    wanted: Mapping[Variable, Placement],
    ranks: int,
    rank: int,
    strict: bool = False,
    fixed: Collection[Variable] = (),
) -> Partitioned:
    """Turn a graph of whole tensors into the graph of one of several ranks.

    Every rank partitions the same graph, which contains gradients and updates already (as GSPMD
    does: Xu et al. 2021, arXiv 2105.04663). The placement of every node is inferred, see
    `tandem.placement.inference`, and the conversions between placements become Ops of
    `tandem.ops.collective`, whose functions need a mode with a channel. What is computed equals the
    whole graph, but for roundings in the order of sums, and NaN where infinity meets the zeros of
    ranks that have no terms.

    Parameters
    ----------
    outputs : sequence of Variable
        Of the whole graph. An update is the pair of a variable, which is `given`, and an output,
        whose placement is `wanted` to be that of its variable.
    given : mapping of Variable to Placement
        Of inputs and shared variables; the others are replicated.
    wanted : mapping of Variable to Placement
        Of outputs; the others become replicated.
    ranks, rank : int
        With one rank the graph remains as it is.
    strict : bool
        Refuse an Op that has no rule. By default it is computed at every rank, from whole tensors.
    fixed : collection of Variable
        Inputs that stay where they are, such as weights, even where moving them would take fewer
        bytes.

    Raises
    ------
    ValueError
        A variable cannot have its placement, or has to be converted and is fixed, or its shape is
        not known; one that is given is computed, or one that is wanted is no output.
    TypeError
        What is given or wanted is no placement, or `outputs` is a single variable.
    NotImplementedError
        With `strict`: an Op has no rule.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is none of {ranks} ranks")
    found = Partitioning.of(
        outputs, given=given, wanted=wanted, ranks=ranks, strict=strict, fixed=fixed
    )
    return found.part(rank)


@dataclass(frozen=True)
class Partitioning:
    """The properties that the parts of all ranks share."""

    forms: Sequence[Form]  # of the outputs
    given: Mapping[Variable, Placement]
    ranks: int
    steps: Sequence[Step]
    without_rule: Sequence[str]

    @classmethod
    def of(
        cls,
        outputs: Sequence[Variable],
        *,
        given: Mapping[Variable, Placement],
        wanted: Mapping[Variable, Placement],
        ranks: int,
        strict: bool = False,
        fixed: Collection[Variable] = (),
    ) -> "Partitioning":
        """Infer placements and conversions; see `partition`."""
        _check_placements(outputs, given, wanted, ranks)
        if ranks == 1:
            return cls(
                [(v, Replicate()) for v in outputs], dict.fromkeys(given, Replicate()), 1, [], []
            )
        whole = with_static_lengths(outputs)
        forms = [(new, wanted.get(v, Replicate())) for v, new in zip(outputs, whole, strict=True)]
        found = infer(forms, given, ranks, fixed)
        names = list(dict.fromkeys(_op_name(node) for node in found.without_rule))
        if strict and names:
            raise NotImplementedError(
                f"{', '.join(names)}: no rule says how it is computed by parts, so every rank would"
                " need whole tensors; register one with @tandem.placement.rule.register, or do "
                "without `strict`"
            )
        return cls(forms, given, ranks, found.steps, names)

    def part(self, rank: int) -> Partitioned:
        """Build the graph of a rank."""
        builder = _Builder(self.given, Part(self.ranks, rank))
        for variable in (*graph_inputs([v for v, _ in self.forms]), *self.given):
            builder.take(variable)
        for step in self.steps:
            builder.add(step)
        # With one rank there are no steps, and the graph remains as it is.
        outputs = [builder.locals[f] if self.ranks > 1 else f[0] for f in self.forms]
        return Partitioned(
            outputs,
            builder.inputs,
            _shared(builder.inputs, self.given, builder.part),
            builder.conversions,
            list(self.without_rule),
            builder.token if builder.conversions else None,
        )


def _check_placements(
    outputs: Sequence[Variable],
    given: Mapping[Variable, Placement],
    wanted: Mapping[Variable, Placement],
    ranks: int,
) -> None:
    """Refuse what cannot be asked of a partition; see `partition`."""
    if isinstance(outputs, Variable):
        raise TypeError(f"outputs: {describe(outputs)} is a variable, expected a list of them")
    for variable, placement in (*given.items(), *wanted.items()):
        try:
            check_placement(placement, getattr(variable.type, "ndim", 0), ranks)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{describe(variable)}: {error}") from error
        if placement == Partial("sum") and getattr(variable.type, "dtype", "") == "bool":
            raise ValueError(f"{describe(variable)}: a sum needs numbers, and its type is bool")
    for variable in given:
        if variable.owner is not None:
            raise ValueError(
                f"{describe(variable)} is given a placement, but is computed: only inputs are "
                "given, and `place` annotates others"
            )
    for variable in wanted:
        if variable not in outputs:
            raise ValueError(f"{describe(variable)} is wanted, but is none of the outputs")


def _shared(
    inputs: Mapping[Variable, Variable], given: Mapping[Variable, Placement], part: Part
) -> dict[Variable, tuple[tuple[slice, ...], Shape]]:
    found: dict[Variable, tuple[tuple[slice, ...], Shape]] = {}
    for variable in inputs:
        if isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType):
            shape = tuple(variable.get_value(borrow=True).shape)
            where = shape, given.get(variable, Replicate()), part.ranks, part.rank
            index, own = local_index(*where), local_shape(*where)
            if index is not None and own is not None:
                found[variable] = index, own
    return found


def _op_name(node: Apply) -> str:
    inner = getattr(node.op, "scalar_op", None)
    return type(node.op if inner is None else inner).__name__


class _Builder:
    """Builds a rank's graph, step by step."""

    def __init__(self, given: Mapping[Variable, Placement], part: Part) -> None:
        self.part = part
        self._given = given
        self.locals: dict[Form, Any] = {}
        self.inputs: dict[Variable, Variable] = {}
        self.conversions: list[Conversion] = []
        self.token: Any = first_token()

    def take(self, variable: Variable) -> None:
        """Make the rank's variable of an input."""
        placement = self._given.get(variable, Replicate())
        if (variable, placement) in self.locals:
            return
        own = self._own_input(variable, placement)
        self.locals[variable, placement] = own
        if own is not None and not isinstance(variable, Constant):
            self.inputs[variable] = own

    def _own_input(self, variable: Variable, placement: Placement) -> Variable | None:
        if isinstance(placement, Replicate):
            return variable
        shape = local_shape(known_shape(variable), placement, self.part.ranks, self.part.rank)
        if shape is None:
            return None
        own = cast(TensorType, variable.type).clone(shape=shape)()
        own.name = variable.name
        return own

    def add(self, step: Step) -> None:
        """Compute a node, or convert a tensor."""
        if isinstance(step, ComputationStep):
            self._compute(step)
        elif step.kind.op is None:
            self.locals[step.makes[0]] = convert_here(
                step.variable, self.locals[step.needs[0]], step.source, step.target, self.part
            )
        else:
            self._communicate(step)

    def _compute(self, step: ComputationStep) -> None:
        node, choice = step.node, step.choice
        if any(isinstance(p, Single) and p.rank != self.part.rank for p in choice.outputs):
            self.locals.update(dict.fromkeys(step.makes))
            return
        pairs = zip(node.inputs, choice.inputs, strict=True)
        inputs = [None if p is None else self.locals[v, p] for v, p in pairs]
        outputs = choice.local(node, inputs, self.part)
        for form, local in zip(step.makes, outputs, strict=True):
            self._check(step, form, local)
            if local.name is None:
                local.name = form[0].name
            self.locals.setdefault(form, local)

    def _check(self, step: ComputationStep, form: Form, local: Variable) -> None:
        """Refuse what a rule has made if it cannot be a rank's part."""
        whole, found = (getattr(v.type, "shape", ()) for v in (form[0], local))
        if None in whole:
            return
        expected = local_shape(whole, form[1], self.part.ranks, self.part.rank) or ()
        fits = len(found) == len(expected) and all(
            n in (None, length) for n, length in zip(found, expected, strict=True)
        )
        if not fits or local.type.dtype != form[0].type.dtype:
            raise ValueError(
                f"the rule of {_op_name(step.node)} gives rank {self.part.rank} a part of type "
                f"{local.type}, expected {form[0].type.dtype} of shape {expected}, {form[1]}"
            )

    def _communicate(self, step: ConversionStep) -> None:
        variable, source, target = step.variable, step.source, step.target
        assert step.kind.op is not None
        shape = known_shape(variable)
        op = step.kind.op(len(self.conversions), self.part, shape)
        local = self.locals[variable, source]
        result, self.token = op(
            placeholder(variable.type.ndim, variable.type.dtype) if local is None else local,
            self.token,
        )
        is_elsewhere = isinstance(target, Single) and target.rank != self.part.rank
        self.locals[variable, target] = None if is_elsewhere else result
        self.conversions.append(
            Conversion(
                len(self.conversions),
                step.kind.name,
                shape,
                variable.type.dtype,
                op.received(variable.type.dtype),
                describe(variable),
                source,
                target,
            )
        )
