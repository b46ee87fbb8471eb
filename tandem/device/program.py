"""Turns the graph of a function into Python source: one line of PyTorch calls after another.

The source has a line for each node, in the order of the schedule, and frees an intermediate value
in the line after its last use. What it returns shares no memory with anything that outlives the
call, and updates of device-resident variables are written after everything has been computed.
"""

import itertools
import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph

from tandem.device.aliasing import Aliases, Overlaps, last_uses
from tandem.device.lowering import Lowering, host_rule, lower
from tandem.device.lowering.registry import is_host_type, torch_dtype

_serial = itertools.count()


@dataclass(frozen=True)
class Target:
    """What a program is made for.

    Parameters
    ----------
    device : torch.device
        Where tensors are.
    compiled : bool
        Whether ``torch.compile`` will read the program.
    """

    device: torch.device
    compiled: bool

    @property
    def shares_memory(self) -> bool:
        """Whether a result is handed out without a copy."""
        return self.device.type == "cpu"


@dataclass(frozen=True)
class Program:
    """A function made from a graph.

    Parameters
    ----------
    run : callable
        Takes a tensor (or a Python number) for each input of the graph; gives a tuple of the
        outputs at `returned`, and updates device-resident inputs in place.
    returned : tuple of int
        Which outputs of the graph `run` gives. The others are updates of device-resident inputs.
    source : str
        The Python source of `run`.
    breaks : bool
        Whether `run` reads values of tensors into Python numbers, which ``torch.compile`` can only
        do between two compiled parts.
    nodes : mapping from int to Apply
        The node that each line of the source computes.
    """

    run: Callable[..., tuple[Any, ...]]
    returned: tuple[int, ...]
    source: str
    breaks: bool
    nodes: Mapping[int, Apply]
    file: str

    def failed_node(self, traceback: TracebackType | None) -> Apply | None:
        """Find the node whose computation raised an exception, if it was one."""
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self.file:
                return self.nodes.get(traceback.tb_lineno)
            traceback = traceback.tb_next
        return None


def build_program(
    fgraph: FunctionGraph,
    order: Sequence[Apply],
    buffers: Mapping[Variable, torch.Tensor],
    target: Target,
) -> Program:
    """Make a program of a graph.

    Parameters
    ----------
    fgraph : FunctionGraph
        The graph; its ``update_mapping`` says which outputs update which inputs.
    order : sequence of Apply
        Its nodes, each after those that it depends on.
    buffers : mapping from Variable to Tensor
        The inputs that live on the device, with their memory.
    target : Target
        Device and way of running.

    Raises
    ------
    NotImplementedError
        If a node has an Op or a dtype without a lowering.
    """
    writer = _Writer(fgraph, order, target)
    for position, node in enumerate(order):
        writer.compute(position, node)
    returned = writer.finish(_Ending(fgraph, buffers))
    return writer.program(returned)


@dataclass(frozen=True)
class _Ending:
    """What is done when everything has been computed."""

    fgraph: FunctionGraph
    buffers: Mapping[Variable, torch.Tensor]
    overlaps: Overlaps = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "overlaps", Overlaps.of(self.buffers))

    @property
    def stores(self) -> dict[int, Variable]:
        """For each output that updates an input in place, the input."""
        mapping = self.fgraph.update_mapping or {}
        targets = {output: self.fgraph.inputs[place] for output, place in mapping.items()}
        return {output: target for output, target in targets.items() if target in self.buffers}


def plan_node(node: Apply, on_host: set[Variable], target: Target) -> Lowering:
    """Choose between arithmetic on the host and a call on the device.

    Parameters
    ----------
    node : Apply
        The node.
    on_host : set of Variable
        The variables whose values are Python numbers.
    target : Target
        Device and way of running.
    """
    known = all(isinstance(v, Constant) or v in on_host for v in node.inputs)
    if known or is_host_type(node.outputs[0]):
        rule = host_rule(node.op, node)
        if rule is not None:
            return Lowering(rule, host=frozenset(range(len(node.inputs))), numbers=True)
    return lower(node.op, node, device=target.device, compiled=target.compiled)


class _Writer:
    """Writes the source of a program line by line."""

    def __init__(self, fgraph: FunctionGraph, order: Sequence[Apply], target: Target) -> None:
        self.target = target
        self.fgraph = fgraph
        self.aliases = Aliases(fgraph.inputs)
        self.on_host = {v for v in fgraph.inputs if is_host_type(v)}
        self.uses = last_uses(order, fgraph.outputs)
        self.names = {v: f"i{place}" for place, v in enumerate(fgraph.inputs)}
        self.converted: dict[Variable, str] = {}
        self.live: dict[int, list[Variable]] = {}
        self.globals: dict[str, Any] = {"torch": torch}
        self.lines = [f"def step({', '.join(self.names.values())}):"]
        self.nodes: dict[int, Apply] = {}
        self.breaks = False
        self._plan(order)

    def _plan(self, order: Sequence[Apply]) -> None:
        """Lower all nodes, so that it is known what shares memory before anything is reused."""
        self.lowerings: list[Lowering] = []
        for node in order:
            lowering = plan_node(node, self.on_host, self.target)
            if lowering.numbers:
                self.on_host.update(node.outputs)
            self.aliases.compute(node, lowering)
            self.lowerings.append(lowering)
        self.root_uses: dict[Variable, int] = {}
        for variable, position in self.uses.items():
            for root in self.aliases.roots(variable):
                self.root_uses[root] = max(position, self.root_uses.get(root, 0))
        self.dying: dict[int, list[Variable]] = {}
        for variable, position in self.uses.items():
            if not isinstance(variable, Constant) and variable not in self.fgraph.inputs:
                self.dying.setdefault(position, []).append(variable)

    def compute(self, position: int, node: Apply) -> None:
        """Write the line that computes `node`, and free what it was the last to use."""
        lowering = self.lowerings[position]
        places = [place for place in range(len(node.inputs)) if place not in lowering.omit]
        arguments = [
            self.number(node.inputs[place])
            if place in lowering.host
            else self.tensor(node.inputs[place])
            for place in places
        ]
        call = self.bind("f", self._call(position, node, lowering))
        for output in node.outputs:
            self.names[output] = f"v{len(self.names)}"
        results = ", ".join(self.names[output] for output in node.outputs)
        self.write(f"{results} = {call}({', '.join(arguments)})", node)
        self._free(position)

    def _call(self, position: int, node: Apply, lowering: Lowering) -> Callable[..., Any]:
        """Take the variant that writes over an operand, where nobody can see it."""
        if self.target.compiled:
            return lowering.call
        for place, variant in lowering.reuse.items():
            operand = node.inputs[place]
            owners = [v for v in node.inputs if operand in self.aliases.roots(v)]
            if (
                self.aliases.roots(operand) == {operand}
                and operand.owner is not None
                and owners == [operand]
                and self.root_uses[operand] == position
            ):
                return variant
        return lowering.call

    def _free(self, position: int) -> None:
        dead = [self.names[v] for v in self.dying.get(position, ())]
        dead += [self.converted[v] for v in self.dying.get(position, ()) if v in self.converted]
        if dead:
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
            return self._constant_number(variable)
        if variable in self.on_host:
            return self.names[variable]
        if variable not in self.converted:
            self.breaks = True
            self.converted[variable] = f"{self.names[variable]}_"
            convert = "tuple({}.tolist())" if variable.type.ndim else "{}.item()"
            self.write(f"{self.converted[variable]} = {convert.format(self.names[variable])}")
        return self.converted[variable]

    def _constant_number(self, variable: Constant) -> str:
        value = variable.data
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        if isinstance(value, list):
            value = tuple(value)
        return repr(value) if type(value) in (int, bool) else self.bind("c", value)

    def tensor(self, variable: Variable) -> str:
        """Name the value of a variable as a tensor on the device."""
        if variable not in self.on_host and not isinstance(variable, Constant):
            return self.names[variable]
        if variable not in self.converted:
            if isinstance(variable, Constant):
                self.converted[variable] = self.bind("c", self._constant_tensor(variable))
            else:
                self.converted[variable] = f"{self.names[variable]}_"
                convert = self.bind("t", _tensor_maker(variable, self.target.device))
                self.write(f"{self.converted[variable]} = {convert}({self.names[variable]})")
        return self.converted[variable]

    def _constant_tensor(self, variable: Constant) -> Any:
        if not hasattr(variable.type, "dtype"):
            return variable.data
        array = np.array(variable.data)
        return torch.from_numpy(array).to(self.target.device, torch_dtype(variable))

    def finish(self, ending: _Ending) -> tuple[int, ...]:
        """Write copies of what would be overwritten, then the updates, then the return."""
        stores = ending.stores
        written = set(stores.values())
        results: dict[int, str] = {}
        taken: set[Variable] = set()
        for place, output in enumerate(self.fgraph.outputs):
            if place in stores and output is stores[place]:
                continue
            if place not in stores and (output in self.on_host or is_host_type(output)):
                results[place] = self.number(output)
                continue
            name = self.tensor(output)
            roots = self.aliases.roots(output)
            exposed = place not in stores and self.target.shares_memory
            if ending.overlaps.touch(roots, written) or (
                exposed and self._is_exposed(output, taken)
            ):
                self.write(f"r{place} = {name}.clone()")
                name = f"r{place}"
            elif exposed:
                taken |= roots
            results[place] = name
        for place, variable in stores.items():
            if place in results:
                self._store(variable, self.fgraph.outputs[place], results[place])
        returned = tuple(place for place in results if place not in stores)
        self.write(f"return ({''.join(f'{results[place]}, ' for place in returned)})")
        return returned

    def _is_exposed(self, output: Variable, taken: set[Variable]) -> bool:
        """Whether somebody else could see, or be seen through, the memory of an output."""
        roots = self.aliases.roots(output)
        outside = any(isinstance(v, Constant) or v in self.fgraph.inputs for v in roots)
        return outside or not roots.isdisjoint(taken) or self.aliases.is_repeated(output)

    def _store(self, variable: Variable, output: Variable, name: str) -> None:
        if output.type.shape != variable.type.shape or None in output.type.shape:
            # copy_ would repeat a value that is too short.
            check = self.bind("s", _shape_checker(variable))
            self.write(f"{check}({self.names[variable]}, {name})")
        self.write(f"{self.names[variable]}.copy_({name})")

    def program(self, returned: tuple[int, ...]) -> Program:
        source = "\n".join(self.lines) + "\n"
        file = f"<device function {next(_serial)}: {self.fgraph.name or 'unnamed'}>"
        namespace: dict[str, Any] = {}
        exec(compile(source, file, "exec"), self.globals, namespace)
        run = namespace["step"]
        # A traceback and a debugger show the lines; they are forgotten with the function.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        weakref.finalize(run, linecache.cache.pop, file, None)
        return Program(run, returned, source, self.breaks, self.nodes, file)


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
