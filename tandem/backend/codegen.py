"""Turns the graph of a function into Python source: one line of PyTorch calls after another.

The source has a line for each node, in the order of the schedule, and frees an intermediate value
in the line after its last use. What it returns shares no memory with anything that outlives the
call. A program that reports variables early is cut into segments, each a function of its own.
"""

import copy
import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph

from tandem.backend.lowering.registry import (
    Lowering,
    Storage,
    Thunk,
    is_host_type,
    is_tensor,
    torch_dtype,
)
from tandem.backend.schedule import Cut, Schedule, Target
from tandem.backend.segments import Segment, SegmentedRun, SegmentWriter, returning

_serial = itertools.count()


@dataclass(frozen=True)
class Program:
    """A function made from a graph."""

    # Takes a tensor (or a Python number) for each input of the graph; returns a tuple of the
    # outputs at `returned`, and updates device-resident inputs in place.
    run: Callable[..., tuple[Any, ...]]
    # If not None, `run` writes nothing. Then `store_results`, which must not be compiled, takes the
    # inputs and the results of `run`, does the rest, and returns the outputs.
    store_results: Callable[..., tuple[Any, ...]] | None
    returned: tuple[int, ...]  # the other outputs are updates of device-resident inputs
    source: str  # of `run`
    breaks: bool  # `run` reads values from tensors; torch.compile then makes several parts
    nodes: Mapping[int, Apply]  # by line of the source
    inner: Mapping[str, Mapping[int, Apply]]  # of programs inside, by file, that errors are to name
    file: str  # name of the source in tracebacks
    as_vectors: frozenset[int]  # inputs without axes that `run` takes as vectors of one element
    # Makes the thunk of arrays, from the storages of the inputs and the thunk for all else.
    thunk_of_arrays: Callable[[Storage, Thunk], Thunk] | None = None

    def failed_node(self, traceback: TracebackType | None) -> Apply | None:
        """Find the node whose computation raised an exception, if it was one."""
        found = None
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            nodes = self.nodes if file == self.file else self.inner.get(file, {})
            found = nodes.get(traceback.tb_lineno, found)
            traceback = traceback.tb_next
        return found


def build_program(
    fgraph: FunctionGraph,
    order: Sequence[Apply],
    buffers: Mapping[Variable, torch.Tensor],
    target: Target,
    inside: bool = False,
) -> Program:
    """Make a program of a graph, given the tensors of its inputs that live on the device.

    One `inside` another program returns tensors where the other's outputs may be numbers.
    """
    schedule = Schedule(fgraph, order, buffers, target)
    writer = _Writer(fgraph, schedule, target, inside)
    for node in schedule.order:
        writer.compute(node)
    program = writer.program(writer.finish())
    # Arrays of the host, which nothing observes, need no tensors round them.
    if buffers or inside or target.results != "host" or target.observe is not None:
        return program
    return replace(program, thunk_of_arrays=_thunk_of_arrays(fgraph, schedule))


def _thunk_of_arrays(
    fgraph: FunctionGraph, schedule: Schedule
) -> Callable[[Storage, Thunk], Thunk] | None:
    """Return what makes the thunk of a graph's only node without tensors, if that can be made."""
    if len(schedule.order) != 1:
        return None
    (node,) = schedule.order
    make = schedule.lowerings[node].thunk_of_arrays
    if make is None or not {*fgraph.outputs} <= {*node.outputs}:
        return None
    given = [fgraph.inputs.index(variable) for variable in node.inputs]
    taken = [node.outputs.index(variable) for variable in fgraph.outputs]
    if len({*taken}) < len(taken):
        return None
    return lambda cells, otherwise: make([cells[index] for index in given], taken, otherwise)


class _Writer:
    """Writes the source of a program line by line."""

    def __init__(
        self, fgraph: FunctionGraph, schedule: Schedule, target: Target, inside: bool
    ) -> None:
        self.fgraph, self.schedule, self.target, self.inside = fgraph, schedule, target, inside
        self.names = {v: f"i{index}" for index, v in enumerate(fgraph.inputs)}
        self.converted: dict[Variable, str] = {}
        self.forms: dict[Variable, dict[Callable[..., Any], str]] = {}
        self.serial = itertools.count()
        self.globals: dict[str, Any] = {"torch": torch}
        self.lines: list[str] = []
        self.nodes: dict[int, Apply] = {}
        self.inner: dict[str, Mapping[int, Apply]] = {}
        self.segments: SegmentWriter | None = None
        self.as_vectors = self._updated_numbers() if target.compiled else {}
        self.breaks = any(x.counts or x.opaque for x in schedule.lowerings.values())
        self.kept_vectors: set[str] = set()
        if target.on_gradient_ready is None:
            vectors = self.as_vectors.values()
            self.lines = [f"def step({', '.join(self.names.values())}):"]
            if self.breaks:
                self.kept_vectors.update(vectors)
                self.lines += [f"    {name}_vector = {name}" for name in vectors]
            self.lines += [f"    {name} = {name}.view(())" for name in vectors]
        else:
            self.segments = SegmentWriter(self.lines)

    def _updated_numbers(self) -> dict[int, str]:
        """Find the numbers that are updated in place, to be taken as vectors of one element.

        torch.compile 2.13 takes a float64 tensor without axes for a number of the program's, and
        loses what is written into it.
        """
        written = set(self.schedule.stores.values())
        return {
            index: self.names[v]
            for index, v in enumerate(self.fgraph.inputs)
            if v in written and v.type.ndim == 0
        }

    def _cut(self, cut: Cut, segments: SegmentWriter) -> None:
        """Write the stores that are due at a cut, and begin a segment."""
        for index, variable in cut.stores:
            output = self.fgraph.outputs[index]
            self._store(variable, output, self.tensor(output))
        segments.cut(cut.ready)

    def compute(self, node: Apply) -> None:
        """Write the line that computes `node`, and free what it was the last to use."""
        lowering = self.schedule.lowerings[node]
        arguments = [
            self._argument(node, index)
            for index in range(len(node.inputs))
            if index not in lowering.omit
        ]
        arguments[:0] = [self._inner(graph, lowering) for graph in lowering.graphs]
        function = self.schedule.call(node)
        if lowering.opaque and self.target.compiled:
            function = torch.compiler.disable(function)
        call = self.bind("f", self._observed(node, function))
        targets = [self._written(variable) for _, variable in self.schedule.direct.get(node, ())]
        if lowering.into is not None:
            arguments[:0] = targets
        for output in node.outputs:
            self.names[output] = f"v{len(self.names)}"
        results = ", ".join(self.names[output] for output in node.outputs)
        self.write(f"{results} = {call}({', '.join(arguments)})", node)
        if lowering.into is None:
            for output, target in zip(node.outputs, targets, strict=False):
                name = self.names[output]
                self.write(f"{name} = {self._copying(node, target, name)}")
        self._free(self.schedule.dying.get(node, ()))
        if self.segments is not None and node in self.schedule.cuts:
            self._cut(self.schedule.cuts[node], self.segments)

    def _inner(self, graph: FunctionGraph, lowering: Lowering) -> str:
        """Name the program of a graph inside an Op."""
        target = replace(self.target, on_gradient_ready=None, buckets=(), observe=None)
        program = build_program(graph, graph.toposort(), {}, target, inside=True)
        self.breaks |= program.breaks
        if lowering.named:
            self.inner[program.file] = program.nodes
        run = program.run
        if lowering.opaque and target.compiled:
            # What calls it is not compiled, so it is by itself.
            run = torch.compile(run, fullgraph=not program.breaks, dynamic=False)
        return self.bind("g", run)

    def _observed(self, node: Apply, call: Callable[..., Any]) -> Callable[..., Any]:
        return call if self.target.observe is None else self.target.observe(node, call)

    def _copying(self, node: Apply | None, target: str, name: str) -> str:
        """Write the copy of a node's result into the memory of `target`."""
        if self.target.observe is None or node is None:
            return f"{target}.copy_({name})"
        return f"{self.bind('f', self._observed(node, torch.Tensor.copy_))}({target}, {name})"

    def _argument(self, node: Apply, index: int) -> str:
        lowering, variable = self.schedule.lowerings[node], node.inputs[index]
        if index in lowering.host:
            return self.number(variable)
        if index in lowering.prepare:
            return self.prepared(variable, lowering.prepare[index], node)
        return self.tensor(variable)

    def prepared(self, variable: Variable, prepare: Callable[..., Any], user: Apply) -> str:
        """Name the converted value of a variable; convert it on first use, by the node `user`."""
        forms = self.forms.setdefault(variable, {})
        if prepare not in forms:
            if isinstance(variable, Constant):
                value = prepare(_constant_tensor(variable, self.target.device))
                return forms.setdefault(prepare, self.bind("c", value))
            node = variable.owner
            name = f"p{next(self.serial)}"
            permutes = None if node is None else self.schedule.lowerings[node].permutes
            if permutes is not None and node.inputs[0] in self.fgraph.inputs:
                # A weight and its transpose are one converted tensor and a view of it.
                straight = self.prepared(node.inputs[0], prepare, user)
                self.write(f"{name} = {straight}.permute({permutes})")
            else:
                call = self.bind("f", self._observed(user, prepare))
                self.write(f"{name} = {call}({self.tensor(variable)})")
            forms[prepare] = name
        return forms[prepare]

    def _free(self, variables: Sequence[Variable]) -> None:
        dead = [self.names[v] for v in variables]
        dead += [self.converted[v] for v in variables if v in self.converted]
        dead += [name for v in variables for name in self.forms.pop(v, {}).values()]
        # A compiled segment would be given what it only deletes.
        if dead and not (self.segments is not None and self.target.compiled):
            self.write(f"del {', '.join(dead)}")

    def write(self, line: str, node: Apply | None = None) -> None:
        self.lines.append(f"    {line}")
        if node is not None:
            self.nodes[len(self.lines)] = node

    def bind(self, kind: str, value: Any) -> str:
        """Give a value a name that the source can use."""
        name = f"{kind}{len(self.globals)}"
        self.globals[name] = value
        return name

    def number(self, variable: Variable) -> str:
        """Name the value of a variable as a Python number or a tuple of numbers."""
        if isinstance(variable, Constant):
            value = _constant_number(variable)
            return repr(value) if type(value) in (int, bool) else self.bind("c", value)
        if variable in self.schedule.on_host:
            return self.names[variable]
        if variable not in self.converted:
            self.breaks = True
            self.converted[variable] = f"{self.names[variable]}_"
            convert = "tuple({}.tolist())" if variable.type.ndim else "{}.item()"
            self.write(f"{self.converted[variable]} = {convert.format(self.names[variable])}")
        return self.converted[variable]

    def tensor(self, variable: Variable) -> str:
        """Name the value of a variable as a tensor on the device."""
        if variable not in self.schedule.on_host and not isinstance(variable, Constant):
            return self.names[variable]
        if variable not in self.converted:
            if isinstance(variable, Constant):
                value = _constant_tensor(variable, self.target.device)
                self.converted[variable] = self.bind("c", value)
            else:
                self.converted[variable] = f"{self.names[variable]}_"
                convert = self.bind("t", _tensor_maker(variable, self.target.device))
                self.write(f"{self.converted[variable]} = {convert}({self.names[variable]})")
        return self.converted[variable]

    def finish(self) -> tuple[int, ...]:
        """Write copies of what would be overwritten, then the updates, then the return."""
        stores = self.schedule.stores
        results = self._results()
        outputs = self.fgraph.outputs
        endangered = {i for i in results if self.schedule.is_overwritten(outputs[i])}
        if endangered and self.target.compiled:
            self._begin_settling(results)
        self._copy_shared(results, endangered)
        for index, variable in stores.items():
            if index in results:
                self._store(variable, outputs[index], results[index])
        returned = tuple(index for index in results if index not in stores)
        self._return(results[index] for index in returned)
        return returned

    def _results(self) -> dict[int, str]:
        """Name the value of each output that is returned, or stored at the end."""
        stores, results = self.schedule.stores, {}
        for index, output in enumerate(self.fgraph.outputs):
            if index in stores:
                if output is not stores[index] and index not in self.schedule.early:
                    results[index] = self.tensor(output)
            elif is_host_type(output) or (output in self.schedule.on_host and not self.inside):
                results[index] = self.number(output)
            else:
                results[index] = self.tensor(output)
        return results

    def _begin_settling(self, results: dict[int, str]) -> None:
        """End the part that is compiled, and write the rest into a function of its own."""
        self._return(results.values())
        results.update({index: f"o{index}" for index in results})
        inputs = [self.names[variable] for variable in self.fgraph.inputs]
        self.lines.append(f"def store_results({', '.join([*inputs, *results.values()])}):")

    def _copy_shared(self, results: dict[int, str], endangered: set[int]) -> None:
        """Copy results that will be overwritten, or that are returned and share memory."""
        returned: set[Variable] = set()
        are_exposed = self.inside or self.target.exposes_results
        for index, name in results.items():
            output = self.fgraph.outputs[index]
            exposed = index not in self.schedule.stores and are_exposed
            if index in endangered or (exposed and self._is_shared(output, returned)):
                if is_tensor(output):
                    self.write(f"r{index} = {name}.clone()")
                else:
                    self.write(f"r{index} = {self.bind('f', copy.deepcopy)}({name})")
                results[index] = f"r{index}"
            elif exposed:
                returned |= self.schedule.aliases.roots(output)

    def _return(self, names: Iterable[str]) -> None:
        self.lines.append(returning(names))
        if self.segments is not None:
            early = {v for cut in self.schedule.cuts.values() for v in cut.ready}
            self.segments.end(v for v in self.schedule.stores.values() if v not in early)

    def _is_shared(self, output: Variable, returned: set[Variable]) -> bool:
        """Test if an output's memory is also that of an input, a constant or another result."""
        roots = self.schedule.aliases.roots(output)
        outside = any(isinstance(v, Constant) or v in self.fgraph.inputs for v in roots)
        repeated = self.schedule.aliases.is_repeated(output)
        return outside or not roots.isdisjoint(returned) or repeated

    def _store(self, variable: Variable, output: Variable, name: str) -> None:
        if output.type.shape != variable.type.shape or None in output.type.shape:
            # copy_ would repeat a value that is too short.
            check = self.bind("s", _shape_checker(variable))
            self.write(f"{check}({self.names[variable]}, {name})")
        self.write(self._copying(output.owner, self._written(variable), name))

    def _written(self, variable: Variable) -> str:
        """Return what stands for the memory of an input that is written to.

        Behind a break torch.compile takes the step's own variables anew, see `_updated_numbers`.
        """
        name = self.names[variable]
        return f"{name}_vector.view(())" if name in self.kept_vectors else name

    def program(self, returned: tuple[int, ...]) -> Program:
        """Compile the source, whose results are the outputs at `returned`."""
        inputs = tuple(self.names[variable] for variable in self.fgraph.inputs)
        makers: Sequence[Callable[..., Segment]] = ()
        if self.segments is not None:
            vectors = self.as_vectors.values()
            makers = self.segments.connect(inputs, self.target.compiled, vectors)
        source = "\n".join(self.lines) + "\n"
        file = (
            f"<device function {next(_serial)}: {getattr(self.fgraph, 'name', None) or 'unnamed'}>"
        )
        namespace: dict[str, Any] = {}
        exec(compile(source, file, "exec"), self.globals, namespace)
        functions = [value for name, value in namespace.items() if name.startswith("step")]
        # Tracebacks and debuggers show the lines until the function is gone.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        weakref.finalize(functions[0], linecache.cache.pop, file, None)
        run, store_results = functions[0], namespace.get("store_results")
        if self.target.on_gradient_ready is not None:
            segments = tuple(make(step) for make, step in zip(makers, functions, strict=True))
            run = SegmentedRun(inputs, segments, store_results, self.target.on_gradient_ready)
        return Program(
            run=run,
            store_results=None if makers else store_results,
            returned=returned,
            source=source,
            breaks=self.breaks,
            nodes=self.nodes,
            inner=self.inner,
            file=file,
            as_vectors=frozenset() if makers else frozenset(self.as_vectors),
        )


def _constant_number(variable: Constant) -> Any:
    value = variable.data
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return tuple(value) if isinstance(value, list) else value


def _constant_tensor(variable: Constant, device: torch.device) -> Any:
    if not is_tensor(variable) and not is_host_type(variable):
        return variable.data
    return torch.from_numpy(np.array(variable.data)).to(device, torch_dtype(variable))


def _tensor_maker(variable: Variable, device: torch.device) -> Callable[[Any], torch.Tensor]:
    dtype = torch_dtype(variable)
    if getattr(variable.type, "ndim", 0):
        return lambda numbers: torch.tensor(numbers, dtype=dtype, device=device)
    # A fill, unlike a copy from the host, makes nothing wait.
    return lambda number: torch.full((), number, dtype=dtype, device=device)


def _shape_checker(variable: Variable) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def check(buffer: torch.Tensor, value: torch.Tensor) -> None:
        if buffer.shape != value.shape:
            raise ValueError(
                f"the update of {variable} has shape {tuple(value.shape)}; its buffer has shape "
                f"{tuple(buffer.shape)}"
            )

    return check
