"""A function's graph as flat data, for other processes.

Pickling of a graph recurses from each variable to its owner, and fails on a chain of a few hundred
Ops. Here a graph is a table: its variables are numbered in topological order, and each application
of an Op is a line of numbers. A graph inside an Op is part of the same table: where the pickled Op
would hold a variable, it holds the number.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import FromFunctionOp
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, FrozenApply, NominalVariable, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import toposort

from tandem.errors import InputError

__all__ = ["FlatGraph", "decode", "encode"]

_LEAST_BYTES = 4096
"""Arrays of fewer bytes travel with the description."""

_PROTOCOL = 5


@dataclass(frozen=True)
class FlatGraph:
    """A graph in a form that any process can read.

    Attributes
    ----------
    description : bytes
        All but the values of large constants.
    arrays : tuple of ndarray
        Values of large constants, C-contiguous. `decode` also takes read-only copies, such as views
        of shared memory; they are then used in place and must not change.
    """

    description: bytes
    arrays: tuple[np.ndarray, ...]


def encode(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    number_of: Callable[[SharedVariable], int],
) -> FlatGraph:
    """Describe the graph that computes outputs from inputs.

    Names of variables and the sharing of variables and Ops are kept. Tags are not.

    Parameters
    ----------
    inputs : sequence of Variable
        The graph ends at these, also at one that is computed from others.
    outputs : sequence of Variable
    number_of : callable
        Called for each shared variable; its number stands for the variable in the description.

    Raises
    ------
    InputError
        Another process could not load an Op: its class, or what it holds, is defined in
        ``__main__`` or in a function, or cannot be pickled.
    """
    table = _Writer(number_of)
    for variable in inputs:
        table.add_leaf(variable)
    numbers = [table.number(v) for v in inputs], [table.number(v) for v in outputs]
    header = (table.lines, table.ops, *numbers)
    return FlatGraph(table.pickled(header, "the graph"), tuple(table.arrays))


def decode(
    flat: FlatGraph, shared: Sequence[Variable] | Callable[[int], Variable]
) -> tuple[list[Variable], list[Variable]]:
    """Rebuild a graph from its description.

    Parameters
    ----------
    flat : FlatGraph
    shared : sequence or callable
        The variable that takes the place of the shared variable of each number.

    Returns
    -------
    inputs, outputs : list of Variable

    Raises
    ------
    InputError
        A module that an Op needs cannot be imported here.
    """
    find = shared if callable(shared) else shared.__getitem__
    table = _Reader(flat.arrays, find)
    lines, table.ops, inputs, outputs = table.unpickled(flat.description, "the graph")
    for line in lines:
        table.read(line)
    return [table.variables[n] for n in inputs], [table.variables[n] for n in outputs]


class _Writer:
    """The lines of a graph and of the graphs inside its Ops."""

    def __init__(self, number_of: Callable[[SharedVariable], int]) -> None:
        self.number_of = number_of
        self.lines: list[tuple] = []
        self.ops: list[tuple[str, bytes]] = []  # name for messages, pickle
        self.arrays: list[np.ndarray] = []
        self.numbers: dict[Variable, int] = {}
        self._nodes: dict[Apply, int] = {}
        # Of each Op by identity, its place in `ops`; None while it is being pickled.
        self._op_places: dict[int, int | None] = {}
        self._count = 0  # of variables, of all lines

    def number(self, variable: Variable) -> int:
        """Return the number of a variable; what it is computed from is added before it."""
        if variable not in self.numbers:
            if variable.owner is None:
                self.add_leaf(variable)
            else:
                for node in toposort([variable], blockers=self.numbers):
                    self.node_number(node)
        return self.numbers[variable]

    def node_number(self, node: Apply) -> int:
        """Return the number of an application of an Op, of which the inputs are there."""
        if node not in self._nodes:
            inputs = [self.number(v) for v in node.inputs]
            op = self._op_place(node.op)
            if isinstance(node, FrozenApply):
                self.lines.append(("frozen", op, inputs, [v.type for v in node.outputs]))
            else:
                outputs = [(type(v), v.type, v.name) for v in node.outputs]
                self.lines.append(("apply", op, inputs, outputs))
            self._nodes[node] = len(self._nodes)
            for output in node.outputs:
                # An input of the function that has an owner keeps the number of its own line.
                self.numbers.setdefault(output, self._count)
                self._count += 1
        return self._nodes[node]

    def add_leaf(self, variable: Variable) -> None:
        """Add a variable that nothing computes here."""
        if variable in self.numbers:
            return
        if isinstance(variable, SharedVariable):
            self.lines.append(("shared", self.number_of(variable)))
        elif isinstance(variable, NominalVariable):
            self.lines.append(("nominal", variable.id, variable.type, variable.name))
        elif isinstance(variable, Constant):
            self.lines.append(self._constant(variable))
        else:
            self.lines.append(("free", type(variable), variable.type, variable.name))
        self.numbers[variable] = self._count
        self._count += 1

    def _constant(self, constant: Constant) -> tuple:
        value = constant.data
        kind = type(constant), constant.type, constant.name
        if type(value) is not np.ndarray:
            return ("constant", *kind, value)
        value = np.asarray(value, order="C")
        if value.nbytes < _LEAST_BYTES:
            return ("constant", *kind, value)
        self.arrays.append(value)
        return ("array", *kind, len(self.arrays) - 1)

    def _op_place(self, op: Op) -> int:
        if id(op) not in self._op_places:
            self._op_places[id(op)] = None
            kind, name = type(op).__name__, str(op)
            name = _shortened(name if name.startswith(kind) else f"{kind} {name}")
            self.ops.append((name, self.pickled(op, f"the Op {name}")))
            self._op_places[id(op)] = len(self.ops) - 1
        place = self._op_places[id(op)]
        if place is None:
            raise InputError(f"the Op {op} holds a variable that it computes itself")
        return place

    def pickled(self, value: Any, what: str) -> bytes:
        """Pickle a value that may hold variables, or raise InputError that says of what."""
        file = io.BytesIO()
        try:
            _Pickler(file, self).dump(value)
        except InputError:
            raise
        except _NotImportable as error:
            raise InputError(
                f"{what} cannot be sent to worker processes: {error} is defined in __main__ (or "
                "locally), which they do not run: put it in a module, and import it"
            ) from None
        except Exception as error:
            raise InputError(f"{what} cannot be sent to worker processes: {error}") from error
        return file.getvalue()


class _NotImportable(Exception):
    """A class or function that another process cannot import."""


class _Pickler(pickle.Pickler):
    """Pickles what an Op holds, with numbers of a table in place of variables."""

    def __init__(self, file: io.BytesIO, table: _Writer) -> None:
        super().__init__(file, _PROTOCOL)
        self.table = table

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Variable):
            return self.table.number(value)
        if isinstance(value, Apply):
            for variable in value.inputs:
                self.table.number(variable)
            return "node", self.table.node_number(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            _check_importable(value)
        elif isinstance(value, FromFunctionOp):
            # It is pickled as the name of its function.
            function: Any = getattr(value, "_FromFunctionOp__fn")  # noqa: B009
            _check_importable(function)
        elif isinstance(value, FunctionGraph):
            graph = list(value.inputs), list(value.outputs), value.update_mapping
            return _function_graph, graph
        elif isinstance(value, Op) and isinstance(value, HasInnerGraph):
            return _without_caches(value)
        return NotImplemented


def _check_importable(value: Any) -> None:
    if value.__module__ in ("__main__", "__mp_main__") or "<" in value.__qualname__:
        raise _NotImportable(value.__qualname__)


def _function_graph(
    inputs: list[Variable], outputs: list[Variable], update_mapping: Any
) -> FunctionGraph:
    return FunctionGraph(inputs, outputs, clone=False, update_mapping=update_mapping)


def _without_caches(op: Op) -> Any:
    """Reduce an Op without its compiled function and the graphs of its gradient."""
    reduced = op.__reduce_ex__(_PROTOCOL)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = {name: value for name, value in reduced[2].items() if name != "_fn"}
    if isinstance(op, OpFromGraph) and "_lop_op_cache" in state:
        state |= {"_lop_op_cache": {}, "_rop_op_cache": None}
    return (*reduced[:2], state, *reduced[3:])


def _shortened(text: str, length: int = 120) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


class _Reader:
    """The variables of a table, rebuilt line by line."""

    def __init__(self, arrays: Sequence[np.ndarray], shared: Callable[[int], Variable]) -> None:
        self.variables: list[Variable] = []
        self.nodes: list[Apply] = []
        self.ops: list[tuple[str, bytes]] = []
        self._arrays = arrays
        self._shared = shared
        self._op_of: dict[int, Op] = {}

    def read(self, line: tuple) -> None:
        """Rebuild the variables of a line."""
        match line:
            case "shared", number:
                self.variables.append(self._shared(number))
            case "nominal", place, kind, name:
                self.variables.append(NominalVariable(place, kind, name=name))
            case "constant", make, kind, name, value:
                self.variables.append(make(kind, value, name=name))
            case "array", make, kind, name, number:
                self.variables.append(make(kind, self._arrays[number], name=name))
            case "free", make, kind, name:
                self.variables.append(make(kind, None, name=name))
            case "frozen", op, inputs, kinds:
                given = tuple(self.variables[n] for n in inputs)
                self._add_node(FrozenApply(self._op(op), given, tuple(kinds)))
            case "apply", op, inputs, outputs:
                made = [make(kind, None, name=name) for make, kind, name in outputs]
                self._add_node(Apply(self._op(op), [self.variables[n] for n in inputs], made))

    def _add_node(self, node: Apply) -> None:
        self.nodes.append(node)
        self.variables += node.outputs

    def _op(self, place: int) -> Op:
        if place not in self._op_of:
            name, pickled = self.ops[place]
            self._op_of[place] = self.unpickled(pickled, f"the Op {name}")
        return self._op_of[place]

    def unpickled(self, pickled: bytes, what: str) -> Any:
        """Load what a `_Writer` has pickled."""
        try:
            return _Unpickler(io.BytesIO(pickled), self).load()
        except (ImportError, AttributeError) as error:
            raise InputError(f"{what} cannot be loaded by a worker process: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, table: _Reader) -> None:
        super().__init__(file)
        self.table = table

    def persistent_load(self, number: Any) -> Any:
        if isinstance(number, int):
            return self.table.variables[number]
        return self.table.nodes[number[1]]
