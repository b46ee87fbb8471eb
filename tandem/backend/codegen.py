"""Turns the graph of a function into Python source: one line of PyTorch calls after another.

The source has a line for each node, in the order of the schedule, and frees an intermediate value
in the line after its last use. What it returns shares no memory with anything that outlives the
call. Updates of device-resident variables are seen as if all were written after everything has been
computed: most are, and one whose old value is not needed any more, in a part of the schedule where
nothing can fail, is written as soon as it is computed, or computed where it belongs.
"""

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar.basic import Composite, IntDiv, Mod, Pow
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.type import TensorType, discrete_dtypes

from tandem.backend.aliasing import Aliases, Overlaps, last_uses
from tandem.backend.lowering import Lowering, host_rule, lower
from tandem.backend.lowering.registry import is_host_type, torch_dtype
from tandem.backend.precision import ProductPrecision, fit
from tandem.ops.base import TensorOp
from tandem.ops.crop import CropMirror
from tandem.ops.momentum import MomentumStep

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
    kernels : ProductPrecision
        How convolutions and matrix products are computed.
    on_gradient_ready : callable or None
        Called with the name of each device-resident input, within the program, as soon as its new
        value is in its memory and the program is done with both.
    """

    device: torch.device
    compiled: bool
    kernels: ProductPrecision = field(default_factory=ProductPrecision)
    on_gradient_ready: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.compiled and self.on_gradient_ready is not None:
            raise ValueError("what is to be told of each update can't go through torch.compile")

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
    settle : callable or None
        If not None, `run` writes nothing. Then `settle`, which must not be compiled, takes the
        inputs and what `run` gave, does the rest, and gives the outputs.
    returned : tuple of int
        Which outputs of the graph `run` gives. The others are updates of device-resident inputs.
    source : str
        The Python source of `run`.
    breaks : bool
        Whether `run` reads values of tensors into Python numbers or sizes, which ``torch.compile``
        can only do between two compiled parts.
    nodes : mapping from int to Apply
        The node that each line of the source computes.
    file : str
        The name under which tracebacks and `linecache` know the source.
    as_vectors : frozenset of int
        Which inputs without axes `run` takes as vectors of one element.
    tells : bool
        Whether it says when an input has been updated.
    """

    run: Callable[..., tuple[Any, ...]]
    settle: Callable[..., tuple[Any, ...]] | None
    returned: tuple[int, ...]
    source: str
    breaks: bool
    nodes: Mapping[int, Apply]
    file: str
    as_vectors: frozenset[int]
    tells: bool

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
    ending = _Ending(fgraph, buffers)
    if ending.stores and not target.compiled:
        order = _numbers_at_once(_uncertain_first(order))
    writer = _Writer(fgraph, order, target, ending)
    for position, node in enumerate(order):
        writer.compute(position, node)
    return writer.program(writer.finish())


class _Ending:
    """What happens to the outputs: which update inputs that live on the device."""

    def __init__(self, fgraph: FunctionGraph, buffers: Mapping[Variable, torch.Tensor]) -> None:
        self.overlaps = Overlaps.of(buffers)
        mapping = update_places(fgraph)
        targets = {output: fgraph.inputs[place] for output, place in mapping.items()}
        # For each output that updates an input in place, the input.
        self.stores = {place: v for place, v in targets.items() if v in buffers}
        self.written = frozenset(self.stores.values())


def update_places(fgraph: FunctionGraph) -> dict[int, int]:
    """Give, for each output that is an update, the place of the input that it updates."""
    return cast(dict[int, int], fgraph.update_mapping or {})


def _is_certain(node: Apply) -> bool:
    """Whether a node cannot fail: its shapes are known to fit, and no value is out of a range."""
    variables = [*node.inputs, *node.outputs]
    if any(not isinstance(v.type, TensorType) or None in v.type.shape for v in variables):
        return False
    if isinstance(node.op, Elemwise):
        divides = isinstance(node.op.scalar_op, IntDiv | Mod | Pow | Composite)
        return not (divides and node.outputs[0].type.dtype in discrete_dtypes)
    if isinstance(node.op, TensorOp):
        return not isinstance(node.op, CropMirror)
    return isinstance(node.op, DimShuffle | CAReduce | Dot | Softmax | LogSoftmax)


def _uncertain_first(order: Sequence[Apply]) -> list[Apply]:
    """Put the nodes that can fail, and what they need, before those that cannot."""
    needed: set[Variable] = set()
    first: set[Apply] = set()
    for node in reversed(order):
        if not _is_certain(node) or not needed.isdisjoint(node.outputs):
            first.add(node)
            needed.update(node.inputs)
    return [n for n in order if n in first] + [n for n in order if n not in first]


def _numbers_at_once(order: Sequence[Apply]) -> list[Apply]:
    """Put what gives a single number, and cannot fail, right behind what it is computed from.

    A check of a large result is done while that is in the cache, and then the result is done with.
    """
    followers: dict[Apply | None, list[Apply]] = {}
    positions = {node: position for position, node in enumerate(order)}
    moved: set[Apply] = set()
    last: dict[Apply, Apply | None] = {}
    for node in order:
        owners = [variable.owner for variable in node.inputs if variable.owner is not None]
        small = all(variable.type.ndim == 0 for variable in node.outputs)
        if small and owners and _is_certain(node):
            last[node] = max((last.get(o) or o for o in owners), key=positions.__getitem__)
            followers.setdefault(last[node], []).append(node)
            moved.add(node)
    found: list[Apply] = []
    for node in order:
        if node not in moved:
            found += [node, *followers.get(node, ())]
    return found


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
    lowering = lower(node.op, node, device=target.device, compiled=target.compiled)
    return fit(lowering, node, target.kernels)


class _Writer:
    """Writes the source of a program line by line."""

    def __init__(
        self, fgraph: FunctionGraph, order: Sequence[Apply], target: Target, ending: _Ending
    ) -> None:
        self.target = target
        self.fgraph = fgraph
        self.ending = ending
        self.aliases = Aliases(fgraph.inputs, target.compiled)
        self.on_host = {v for v in fgraph.inputs if is_host_type(v)}
        self.uses = last_uses(order, fgraph.outputs)
        self.names = {v: f"i{place}" for place, v in enumerate(fgraph.inputs)}
        self.converted: dict[Variable, str] = {}
        self.forms: dict[Variable, dict[Callable[..., Any], str]] = {}
        self.serial = itertools.count()
        self.globals: dict[str, Any] = {"torch": torch}
        self.lines = [f"def step({', '.join(self.names.values())}):"]
        self.as_vectors = self._unpack_scalars() if target.compiled else frozenset()
        self.nodes: dict[int, Apply] = {}
        self.breaks = False
        self._plan(order)

    def _unpack_scalars(self) -> frozenset[int]:
        """Take each number that is updated in place as a vector of one element.

        torch.compile 2.13 takes a float64 tensor without axes for a number of the program's, and
        loses what is written into it.
        """
        places = set()
        for place, variable in enumerate(self.fgraph.inputs):
            if variable in self.ending.written and variable.type.ndim == 0:
                places.add(place)
                self.lines.append(f"    {self.names[variable]} = {self.names[variable]}.view(())")
        return frozenset(places)

    def _plan(self, order: Sequence[Apply]) -> None:
        """Lower all nodes, so that it is known what shares memory before anything is reused."""
        self.lowerings: list[Lowering] = []
        for node in order:
            lowering = plan_node(node, self.on_host, self.target)
            if lowering.numbers:
                self.on_host.update(node.outputs)
            self.breaks |= lowering.counts
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
        self.direct = {} if self.target.compiled else self._direct_stores(order)
        for position, stores in self.direct.items():
            for output, (_, variable) in zip(order[position].outputs, stores, strict=True):
                self.aliases.place(output, variable)
        self.done: dict[int, list[Variable]] = {}
        if self.target.on_gradient_ready is not None:
            for position, stores in self.direct.items():
                for _, variable in stores:
                    self.done.setdefault(self._last_look(order, position, variable), []).append(
                        variable
                    )

    def _last_look(self, order: Sequence[Apply], written: int, variable: Variable) -> int:
        """Where the program last looks into the memory of a variable that is stored directly."""
        looks = (
            position
            for position, node in enumerate(order)
            if any(variable in self.aliases.roots(v) for v in node.inputs)
        )
        return max((*looks, written))

    def _direct_stores(self, order: Sequence[Apply]) -> dict[int, list[tuple[int, Variable]]]:
        """Find the nodes whose results may go at once to the inputs which these update.

        For the position of each in the schedule, by output of the node, the place among the
        graph's outputs and the input.
        """
        positions = {node: position for position, node in enumerate(order)}
        certain_from = max(
            (position + 1 for node, position in positions.items() if not _is_certain(node)),
            default=0,
        )
        found: dict[int, dict[Variable, tuple[int, Variable]]] = {}
        for place, variable in self.ending.stores.items():
            output = self.fgraph.outputs[place]
            position = positions.get(output.owner, -1)
            if position >= certain_from and self._may_store(position, output, variable):
                found.setdefault(position, {})[output] = place, variable
        return {
            position: [stores[output] for output in order[position].outputs]
            for position, stores in found.items()
            if len(stores) == len(order[position].outputs)
        }

    def _may_store(self, position: int, output: Variable, variable: Variable) -> bool:
        """Whether nobody looks at the old value of `variable` after the node at `position`."""
        node = output.owner
        others = [v for v in node.inputs if variable in self.aliases.roots(v) and v is not variable]
        elementwise = (
            self.lowerings[position].into is None
            or isinstance(node.op, Elemwise | MomentumStep)
            or variable not in node.inputs
        )
        return (
            self.aliases.roots(output) == {output}
            and self.fgraph.outputs.count(output) == 1
            and output.type.shape == variable.type.shape
            and None not in variable.type.shape
            and self.root_uses.get(variable, -1) <= position
            and self.ending.overlaps.are_alone(variable)
            and elementwise
            and not others
        )

    def compute(self, position: int, node: Apply) -> None:
        """Write the line that computes `node`, and free what it was the last to use."""
        lowering = self.lowerings[position]
        places = [place for place in range(len(node.inputs)) if place not in lowering.omit]
        arguments = [self._argument(lowering, place, node.inputs[place]) for place in places]
        call = self.bind("f", self._call(position, node, lowering))
        targets = [self.names[variable] for _, variable in self.direct.get(position, ())]
        if lowering.into is not None:
            arguments[:0] = targets
        for output in node.outputs:
            self.names[output] = f"v{len(self.names)}"
        results = ", ".join(self.names[output] for output in node.outputs)
        self.write(f"{results} = {call}({', '.join(arguments)})", node)
        if lowering.into is None:
            for output, target in zip(node.outputs, targets, strict=False):
                self.write(f"{self.names[output]} = {target}.copy_({self.names[output]})")
        self._free(position)
        self._tell(self.done.get(position, ()))

    def _argument(self, lowering: Lowering, place: int, variable: Variable) -> str:
        if place in lowering.host:
            return self.number(variable)
        if place in lowering.prepare:
            return self.prepared(variable, lowering.prepare[place])
        return self.tensor(variable)

    def prepared(self, variable: Variable, prepare: Callable[..., Any]) -> str:
        """Name the value of a variable in another form, made when it is first asked for."""
        forms = self.forms.setdefault(variable, {})
        if prepare not in forms:
            node = variable.owner
            name = f"p{next(self.serial)}"
            if node and _is_transposition(node) and node.inputs[0] in self.fgraph.inputs:
                # A weight and its transpose are one form, seen in two ways.
                straight = self.prepared(node.inputs[0], prepare)
                self.write(f"{name} = {straight}.permute({tuple(node.op.shuffle)})")
            else:
                call = self.bind("f", prepare)
                self.write(f"{name} = {call}({self.tensor(variable)})")
            forms[prepare] = name
        return forms[prepare]

    def _call(self, position: int, node: Apply, lowering: Lowering) -> Callable[..., Any]:
        """Take the variant that writes over an operand, where nobody can see it."""
        if self.target.compiled:
            return lowering.call
        if position in self.direct and lowering.into is not None:
            return lowering.into
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

    def _tell(self, variables: Iterable[Variable]) -> None:
        """Say that the program is done with these."""
        if self.target.on_gradient_ready is not None:
            for variable in variables:
                self.write(f"{self.bind('h', self.target.on_gradient_ready)}({variable.name!r})")

    def _free(self, position: int) -> None:
        dead = [self.names[v] for v in self.dying.get(position, ())]
        dead += [self.converted[v] for v in self.dying.get(position, ()) if v in self.converted]
        dead += [n for v in self.dying.get(position, ()) for n in self.forms.pop(v, {}).values()]
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

    def finish(self) -> tuple[int, ...]:
        """Write copies of what would be overwritten, then the updates, then the return."""
        stores = self.ending.stores
        results = self._results(stores)
        for place, _ in itertools.chain.from_iterable(self.direct.values()):
            del results[place]
        endangered = {
            place
            for place in results
            if self.ending.overlaps.touch(
                self.aliases.roots(self.fgraph.outputs[place]), self.ending.written
            )
        }
        if endangered and self.target.compiled:
            self._begin_settling(results)
        self._copy_shared(results, stores, endangered)
        for place, variable in stores.items():
            if place in results:
                self._store(variable, self.fgraph.outputs[place], results[place])
                self._tell([variable])
        returned = tuple(place for place in results if place not in stores)
        self._return(results[place] for place in returned)
        return returned

    def _results(self, stores: Mapping[int, Variable]) -> dict[int, str]:
        """Name the value of each output, but of an update of a variable to itself."""
        results = {}
        for place, output in enumerate(self.fgraph.outputs):
            if place in stores:
                if output is not stores[place]:
                    results[place] = self.tensor(output)
            elif output in self.on_host or is_host_type(output):
                results[place] = self.number(output)
            else:
                results[place] = self.tensor(output)
        return results

    def _begin_settling(self, results: dict[int, str]) -> None:
        """End the part that is compiled, and write the rest into a function of its own."""
        self._return(results.values())
        results.update({place: f"o{place}" for place in results})
        inputs = [self.names[variable] for variable in self.fgraph.inputs]
        self.lines.append(f"def settle({', '.join([*inputs, *results.values()])}):")

    def _copy_shared(
        self, results: dict[int, str], stores: Mapping[int, Variable], endangered: set[int]
    ) -> None:
        """Copy the results that will be written over, or that share memory and are handed out."""
        taken: set[Variable] = set()
        for place, name in results.items():
            output = self.fgraph.outputs[place]
            exposed = place not in stores and self.target.shares_memory
            if place in endangered or (exposed and self._is_exposed(output, taken)):
                self.write(f"r{place} = {name}.clone()")
                results[place] = f"r{place}"
            elif exposed:
                taken |= self.aliases.roots(output)

    def _return(self, names: Iterable[str]) -> None:
        self.write(f"return ({''.join(f'{name}, ' for name in names)})")

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
        settle = namespace.get("settle")
        return Program(
            run,
            settle,
            returned,
            source,
            self.breaks,
            self.nodes,
            file,
            self.as_vectors,
            self.target.on_gradient_ready is not None,
        )


def _is_transposition(node: Apply) -> bool:
    return isinstance(node.op, DimShuffle) and not node.op.drop and not node.op.augment


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
