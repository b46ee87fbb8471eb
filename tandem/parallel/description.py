"""The description of a data-parallel function, which travels to the workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import graph_inputs
from pytensor.graph.utils import MissingInputError
from pytensor.tensor.variable import TensorVariable

from tandem.parallel.fold import check_op
from tandem.parallel.graph_transfer import FlatGraph, decode, encode
from tandem.parallel.graphs import check_no_generators, depends_on, resolve, shared_inputs
from tandem.parallel.messages import ArrayLocation, SentFunction


@dataclass(frozen=True)
class Update:
    """A shared variable, its new value, and how new values of slices become one."""

    variable: SharedVariable
    new: Variable
    op: str | None

    @property
    def reads_itself(self) -> bool:
        """Return whether the new value is computed from the old one."""
        return bool(depends_on([self.new], [self.variable]))


@dataclass(frozen=True)
class Description:
    """A function as one graph without givens, and what becomes of its results."""

    scattered: Sequence[TensorVariable]
    broadcast: Sequence[TensorVariable]
    row_numbers: Sequence[TensorVariable]  # made by `row_index`
    outputs: Sequence[Variable]
    output_ops: Sequence[str | None]
    updates: Sequence[Update]
    sliceables: Sequence[SharedVariable]
    options: Mapping[str, Any] = field(default_factory=dict)  # of `pytensor.function`

    @property
    def inputs(self) -> list[TensorVariable]:
        """All inputs of the graph: scattered ones, broadcast ones, numbers of rows."""
        return [*self.scattered, *self.broadcast, *self.row_numbers]

    @property
    def results(self) -> list[Variable]:
        """All results of the graph: outputs, then new values of updated variables."""
        return [*self.outputs, *(update.new for update in self.updates)]

    @property
    def is_divided(self) -> bool:
        """Return whether there are rows to divide between ranks."""
        return bool(self.scattered or self.sliceables)

    @property
    def shared(self) -> list[SharedVariable]:
        """All shared variables that it reads or writes."""
        written = [update.variable for update in self.updates]
        every = [*shared_inputs(self.results), *written, *self.sliceables]
        return list(dict.fromkeys(every))

    @property
    def has_default_updates(self) -> bool:
        """Test if PyTensor would add updates of its own, which are among `updates` already."""
        return any(getattr(v, "default_update", None) is not None for v in self.shared)

    def updates_from_rows(self) -> list[Update]:
        """Find the updates whose new values are computed from the rows of a rank."""
        rows = [*self.scattered, *self.row_numbers, *self.sliceables]
        reached = depends_on([update.new for update in self.updates], rows)
        return [update for update in self.updates if update.new in reached]

    def without_rows(self) -> "Description":
        """Return a description of the updates alone whose new values need no rows."""
        from_rows = {update.variable for update in self.updates_from_rows()}
        kept = [update for update in self.updates if update.variable not in from_rows]
        return replace(
            self,
            scattered=(),
            row_numbers=(),
            outputs=(),
            output_ops=(),
            updates=kept,
            sliceables=(),
        )

    def pack(
        self,
        number: int,
        number_of: Callable[[SharedVariable], int],
        place: Callable[[np.ndarray], ArrayLocation],
    ) -> SentFunction:
        """Describe this function to another process; `place` puts a constant where it sees it.

        Raises InputError if an Op cannot be sent.
        """
        flat = encode(self.inputs, self.results, number_of)
        return SentFunction(
            number,
            flat.description,
            tuple(place(array) for array in flat.arrays),
            len(self.scattered),
            len(self.broadcast),
            len(self.row_numbers),
            tuple(self.output_ops),
            tuple(number_of(update.variable) for update in self.updates),
            tuple(update.op for update in self.updates),
            tuple(number_of(variable) for variable in self.sliceables),
            dict(self.options),
        )

    @classmethod
    def unpack(
        cls,
        sent: SentFunction,
        variables: Mapping[int, SharedVariable],
        array: Callable[[ArrayLocation], np.ndarray],
    ) -> "Description":
        """Make the function's graph again, over this process's variables."""
        flat = FlatGraph(sent.description, tuple(array(place).copy() for place in sent.constants))
        found, results = decode(flat, variables.__getitem__)
        inputs: list[Any] = found
        first, second = sent.scattered, sent.scattered + sent.broadcast
        count = len(sent.output_ops)
        return cls(
            inputs[:first],
            inputs[first:second],
            inputs[second:],
            results[:count],
            sent.output_ops,
            [
                Update(variables[number], new, op)
                for number, new, op in zip(
                    sent.updated, results[count:], sent.update_ops, strict=True
                )
            ],
            [variables[number] for number in sent.sliceables],
            sent.options,
        )


def row_index() -> TensorVariable:
    """Return the numbers, in the whole call, of the rows at hand: symbolic, int64 (rows,).

    They count from 0 over all rows of a call of a data-parallel function, so that what is keyed by
    them, such as dropout, does not depend on the number of ranks or slices.
    """
    numbers = pt.lvector("row_index")
    numbers.tag.is_row_index = True
    return numbers


_OPTIONS = ("name", "mode", "accept_inplace", "rebuild_strict", "no_default_updates")


def describe(
    inputs: Any,
    outputs: Any,
    bcast_inputs: Any,
    updates: Any,
    givens: Any,
    sliceable_shareds: Any,
    options: Mapping[str, Any],
) -> tuple[Description, bool]:
    """Describe a function by the arguments of `Pool.function`; and whether it returns a list."""
    scattered = _variables("inputs", inputs)
    broadcast = _variables("bcast_inputs", bcast_inputs or [])
    kept = _checked_options(options)
    for variable in scattered:
        lengths = variable.type.shape
        if not lengths or lengths[0] is not None:
            raise TypeError(
                f"the input {variable} is {variable.type}: a scattered one has rows, and their "
                "number may be any; others are bcast_inputs"
            )
    pairs = _pairs("outputs", _listed(outputs))
    sliceables, stood_for = _sliceables(sliceable_shareds)
    triples = _updates(updates)
    resolved = resolve(
        [*scattered, *broadcast],
        [variable for variable, _ in pairs],
        [(variable, new) for variable, new, _ in triples],
        [*stood_for, *_given(givens)],  # which may be computed from what these stand for
        kept.pop("no_default_updates", False),
        rebuild_strict=kept.get("rebuild_strict", True),
    )
    kept.pop("rebuild_strict", None)
    ops = [
        check_op(op, getattr(variable.type, "dtype", None), f"output {i}")
        for i, (variable, op) in enumerate(pairs)
    ]
    update_ops = {variable: op for variable, _, op in triples}
    results = [*resolved.outputs, *resolved.updates.values()]
    check_no_generators([*results, *resolved.updates], [*scattered, *sliceables])
    numbers = _row_numbers(results, [*scattered, *broadcast])
    made = Description(
        scattered,
        broadcast,
        numbers,
        resolved.outputs,
        ops,
        [Update(v, new, update_ops.get(v, "avg")) for v, new in resolved.updates.items()],
        sliceables,
        kept,
    )
    return made, isinstance(outputs, list)


def _variables(what: str, given: Any) -> list[TensorVariable]:
    if not isinstance(given, list | tuple):
        raise TypeError(f"{what} is a list of variables, not {type(given).__name__}")
    for variable in given:
        if not isinstance(variable, TensorVariable) or isinstance(variable, SharedVariable):
            raise TypeError(f"{what}: a tensor variable is needed, not {variable!r}")
    if len(set(given)) != len(given):
        raise ValueError(f"{what}: a variable is given twice")
    return list(given)


def _listed(outputs: Any) -> list[Any]:
    if outputs is None:
        return []
    return outputs if isinstance(outputs, list) else [outputs]


def _pairs(what: str, given: Sequence[Any]) -> list[tuple[Variable, Any]]:
    """Pair each variable with its op."""
    pairs = [each if isinstance(each, tuple) else (each, "avg") for each in given]
    for each, pair in zip(given, pairs, strict=True):
        if len(pair) != 2 or not isinstance(pair[0], Variable):
            raise TypeError(f"{what}: a variable or (variable, op) is needed, not {each!r}")
    return pairs


def _updates(given: Any) -> list[tuple[SharedVariable, Any, Any]]:
    """List updates with their ops, which are known words."""
    members = list(given.items()) if isinstance(given, Mapping) else list(given or [])
    triples = []
    for member in members:
        if not isinstance(member, tuple | list) or len(member) not in (2, 3):
            raise TypeError(
                f"updates: (shared, new) or (shared, new, op) is needed, not {member!r}"
            )
        variable, new, op = (*member, "avg") if len(member) == 2 else member
        triples.append((variable, new, check_op(op, "float64", "an update", is_update=True)))
    return triples


def _sliceables(given: Any) -> tuple[list[SharedVariable], list[tuple[Variable, SharedVariable]]]:
    """List sliceable shared variables, and what they are given for."""
    variables, stood_for = [], []
    for member in given or []:
        if isinstance(member, tuple):
            if len(member) != 2:
                raise TypeError(f"sliceable_shareds: (variable, shared) is needed, not {member!r}")
            stood_for.append(member)
            member = member[1]
        if not isinstance(member, SharedVariable) or not getattr(member.type, "ndim", 0):
            raise TypeError(
                f"sliceable_shareds: a shared variable with rows is needed, not {member!r}"
            )
        variables.append(member)
    return variables, stood_for


def _given(givens: Any) -> list[tuple[Any, Any]]:
    return list(givens.items()) if isinstance(givens, Mapping) else list(givens or [])


def _row_numbers(results: Sequence[Variable], inputs: Sequence[Variable]) -> list[TensorVariable]:
    """Find the variables made by `row_index`; raise where another input is missing."""
    numbers: list[Any] = []
    for variable in dict.fromkeys(graph_inputs(list(results), blockers=list(inputs))):
        if isinstance(variable, Constant | SharedVariable) or variable in inputs:
            continue
        if not getattr(variable.tag, "is_row_index", False):
            raise MissingInputError(
                f"{variable} is needed, and is neither an input nor given", variable=variable
            )
        numbers.append(variable)
    return numbers


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for option in options:
        if option not in _OPTIONS:
            raise TypeError(
                f"function() has no argument {option!r}; of PyTensor's it takes "
                f"{', '.join(_OPTIONS)}"
            )
    name, mode = options.get("name"), options.get("mode")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a text, not {name!r}")
    if mode is not None and not isinstance(mode, str):
        raise TypeError(
            f"mode: each worker makes its own; give the name of one, not {type(mode).__name__}"
        )
    if mode is not None:
        get_mode(mode)  # raises ValueError where there is none of that name
    return dict(options)
