"""Regions of small arrays: parts of a graph that one call of Numba's code can compute, on CPUs.

A call of a PyTorch kernel takes microseconds whatever the size, so a graph of many small arrays, or
a loop over them, spends its time between kernels. PyTensor's Numba backend makes machine code of
the whole part. `lower_region` decides for each call which of the two computes it.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import torch
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Maximum, Minimum, ScalarType
from pytensor.scan.op import Scan
from pytensor.tensor.basic import Nonzero, ScalarFromTensor
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, Repeat, Unique
from pytensor.tensor.math import Dot
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.rewriting.shape import ShapeFeature
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.signal.conv import Convolve1d
from pytensor.tensor.sort import ArgSortOp
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedIncSubtensor1,
    AdvancedSubtensor,
    indices_from_subtensor,
)
from pytensor.tensor.type import DenseTensorType
from pytensor.tensor.type_other import NoneTypeT
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.backend.lowering.registry import Lowering, Storage, Thunk, lower
from tandem.backend.runtime import limit_openblas
from tandem.backend.shared import tensor_over
from tandem.ops.region import Region

log = logging.getLogger(__name__)

REGIONS = "regions"
"""Tag of the rewrite, for modes that want it."""

_NOT_COMPILED = ("float16", "complex64", "complex128")
# Work that depends on values, draws, and what sums integers as floats.
_LEFT_OUT = (Nonzero, Repeat, Unique, RandomVariable, Convolve1d)
_NARROW = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32")
_UNCHECKED = (AdvancedSubtensor, AdvancedIncSubtensor, AdvancedIncSubtensor1)
_IN_RANGE = CheckAndRaise(IndexError, "an index is out of range")
_WIDENED = (ps.Add, ps.Sub, ps.Mul, ps.Neg, ps.Sqr, ps.Abs)
LARGEST = 2**14  # elements of a variable of known shape that may be in a region
MOST_WORK = 2000
"""Elements of a kernel's result, on average over a region, up to which Numba computes it.

Measured by `benchmarks.programs`: at this size a kernel takes about as long as its call.
"""
_KEPT = 256  # shapes whose decision is remembered
_MOST_CALLS = 50_000  # of kernels that are counted, in a loop of many steps
_PER_ELEMENT = 64  # multiplications and additions of a product that take the time of one element
_PRODUCTS = {"mm", "bmm", "addmm", "addmv", "mv", "dot", "baddbmm"}

Key = tuple[Any, ...]
Function = Callable[..., Any]


class SmallRegions(GraphRewriter):
    """Makes a `Region` of each connected run of nodes that Numba can compile, and of each loop."""

    def apply(self, fgraph: FunctionGraph) -> None:
        order = fgraph.toposort()
        wanted = {node for node in order if _is_small(node) and _is_compiled(node)}
        # Nodes of one even phase need nothing of each other by way of an unwanted one.
        phases: dict[Apply, int] = {}
        groups: dict[int, list[Apply]] = {}
        for node in order:
            before = [phases[v.owner] for v in node.inputs if v.owner is not None]
            if isinstance(node.op, ScalarFromTensor):  # whoever needs it computes it
                phases[node] = max(before, default=0)
                continue
            is_other = node not in wanted
            phases[node] = max((p + (p % 2 != is_other) for p in before), default=int(is_other))
            if not is_other:
                groups.setdefault(phases[node], []).append(node)
        for nodes in groups.values():
            is_all = len(nodes) == len(order)
            if is_all or any(isinstance(node.op, Scan) for node in nodes) or _computing(nodes) > 1:
                _merge(fgraph, nodes)


def _computing(nodes: Sequence[Apply]) -> int:
    return sum(not isinstance(node.op, DimShuffle) for node in nodes)


def _merge(fgraph: FunctionGraph, nodes: Sequence[Apply]) -> None:
    inside = {*nodes}
    used = dict.fromkeys(v for node in nodes for v in node.inputs)
    numbers = {v.owner for v in used if v.owner and isinstance(v.owner.op, ScalarFromTensor)}
    used.update(dict.fromkeys(v for node in numbers for v in node.inputs))

    def is_needed(variable: Variable) -> bool:
        users = {user for user, _ in fgraph.clients[variable]} - inside
        return any(user not in numbers or is_needed(user.outputs[0]) for user in users)

    outside = (v for v in used if v.owner not in inside and v.owner not in numbers)
    inputs = [v for v in outside if not isinstance(v, Constant)]
    outputs = [v for node in nodes for v in node.outputs if is_needed(v)]
    fresh = [v.type() for v in inputs]  # never a shared variable, whose value a clone would keep
    copies = clone_replace(outputs, dict(zip(inputs, fresh, strict=True)))
    region = Region(FunctionGraph(fresh, copies, clone=False))
    results = region.make_node(*inputs).outputs
    fgraph.replace_all([*zip(outputs, results, strict=True)], reason=REGIONS)


def _is_small(node: Apply) -> bool:
    """Return whether nothing is known to be large: where sizes are unknown, each call decides."""
    shapes = [v.type.shape for v in node.outputs if isinstance(v.type, DenseTensorType)]
    for shape in shapes:
        elements = 1
        for length in shape:
            elements *= length or 1
        if elements > LARGEST:
            return False
    return True


def _is_compiled(node: Apply, inside: bool = False) -> bool:
    """Return whether Numba computes a node, or one inside another, of arrays and of numbers."""
    op = node.op
    core = op.core_op if isinstance(op, Blockwise) else op
    if isinstance(core, _LEFT_OUT) or getattr(op, "destroy_map", None) or _differs(node):
        return False
    variables = [*node.inputs, *node.outputs]
    variables = [v for v in variables if not isinstance(v.type, NoneTypeT)]
    if not all(isinstance(v.type, DenseTensorType | ScalarType) for v in variables):
        return False
    if any(v.type.dtype in _NOT_COMPILED for v in variables):
        return False
    if isinstance(op, Scan | OpFromGraph):
        return all(_is_compiled(inner, inside=True) for inner in op.fgraph.toposort())
    # Numbers and shapes are computed by the host between kernels.
    if not inside and any(isinstance(v.type, ScalarType) for v in node.outputs):
        return False
    return _has_dispatch(op)


def _differs(node: Apply) -> bool:
    """Return whether Numba computes other values than NumPy.

    Integers of less than 64 bits are added and multiplied in 64, and matrices of integers in
    floats; a stable sort is a quicksort, a quotient of floats is rounded before its floor, and a
    negative power of an integer is 0.
    """
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    dtype = node.outputs[0].type.dtype if node.outputs else ""
    if isinstance(op, ArgSortOp):
        return bool(op.kind != "mergesort")
    if isinstance(op, Dot | BatchedDot):
        return not dtype.startswith("float")
    if isinstance(op, CumOp):
        return dtype in _NARROW
    if isinstance(op, CAReduce):
        return dtype == "bool" and _is_extreme(op)
    kind = op.scalar_op if isinstance(op, Elemwise) else op
    if isinstance(kind, ps.IntDiv):
        return dtype not in ("int64", "uint64")
    if isinstance(kind, ps.Pow):
        return not dtype.startswith("float")
    return dtype in _NARROW and isinstance(kind, _WIDENED)


def _has_dispatch(op: Op) -> bool:
    from pytensor.link.numba.dispatch import basic

    if isinstance(op, Blockwise):
        op = op.core_op
        if isinstance(op, HasInnerGraph):
            return False
    if isinstance(op, Elemwise):
        op = op.scalar_op
    tables = (
        basic.numba_funcify,
        basic.numba_funcify_default_op_cache_key,
        basic.numba_funcify_and_cache_key,
    )
    return any(table.dispatch(type(op)) is not table.dispatch(object) for table in tables)


# After all other rewrites.
optdb.register("small_regions", SmallRegions(), REGIONS, position=300)


class _Enough(Exception):
    """Ends a count."""


class Work(TorchDispatchMode):
    """Counts the kernels that are called, and the elements that they compute."""

    calls = elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.calls == _MOST_CALLS:
            raise _Enough
        results = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view:
            self.elements += sum(
                _elements(func, args, value)
                for value in (results if isinstance(results, tuple | list) else (results,))
                if isinstance(value, torch.Tensor)
            )
        return results

    @property
    def is_small(self) -> bool:
        """Return whether Numba's code takes less time than the calls."""
        return self.elements <= MOST_WORK * self.calls


def _elements(func: Any, args: Any, value: torch.Tensor) -> int:
    name = func._schema.name.partition("::")[2]
    if name in _PRODUCTS:
        factor = next(x for x in reversed(args) if isinstance(x, torch.Tensor))
        length = factor.shape[-2] if factor.ndim > 1 else factor.shape[0]
        return value.numel() + value.numel() * length // _PER_ELEMENT
    if "linalg" in name or "cholesky" in name or "solve" in name:
        return value.numel() * max(1, math.isqrt(value.numel()) // 4)
    return value.numel()


class _Call:
    """The call of a region. What computes it depends on its shapes, and on nothing that was before.

    For new shapes the kernels compute arrays of that shape, whose work is counted.
    """

    def __init__(self, graph: FunctionGraph) -> None:
        self._graph = graph
        self._kinds = [
            None if isinstance(v.type, ScalarType) else np.dtype(v.type.dtype) for v in graph.inputs
        ]
        self._is_all_arrays = all(kind is not None for kind in self._kinds)
        lengths = _lengths(graph)
        self._lengths = lengths or []
        # By shapes, and by values of lengths: Numba's code, or None where kernels compute.
        self._chosen: OrderedDict[Key, Function | None] = OrderedDict()
        self._compiled: Function | None = None
        self._is_refused = lengths is None

    def __call__(self, step: Callable[..., Any], *inputs: Any) -> Any:
        compiled = None if self._is_refused else self._choose(step, inputs)
        results = step(*inputs) if compiled is None else self._by_numba(compiled, step, inputs)
        return results[0] if len(results) == 1 else tuple(results)

    def _choose(self, step: Callable[..., Any], inputs: tuple[Any, ...]) -> Function | None:
        shapes = [x.shape for x in inputs if isinstance(x, torch.Tensor)]
        key: Key = (*shapes, *[convert(inputs[index]) for index, convert in self._lengths])
        if key in self._chosen:
            return self._chosen[key]
        if len(self._chosen) == _KEPT:
            self._chosen.popitem(last=False)
        chosen = self._function() if self._has_little_work(step, inputs) else None
        self._chosen[key] = chosen
        return chosen

    def _function(self) -> Function | None:
        if self._compiled is None:
            try:
                self._compiled = _compile(self._graph)
            except Exception as error:
                self._refuse(error)
        return self._compiled

    def _refuse(self, error: Exception) -> None:
        log.debug("Numba can't compile %s: %s", self._graph, error)
        self._is_refused = True
        self._chosen.clear()

    def _has_little_work(self, step: Callable[..., Any], inputs: tuple[Any, ...]) -> bool:
        """Count the work for inputs of the same shapes.

        Other values than those of the key may decide it too, such as when a loop ends. They are not
        those of the call, which may be the first of many.
        """
        ndims = [v.type.ndim for v in self._graph.inputs]
        if [x.ndim if isinstance(x, torch.Tensor) else 0 for x in inputs] != ndims:
            return False
        random = torch.Generator().manual_seed(0)
        given = [_sample(x, random) for x in inputs]
        for index, _ in self._lengths:
            given[index] = inputs[index]
        work = Work()
        try:
            with work, np.errstate(all="ignore"):
                step(*given)
        except _Enough:
            pass
        except Exception:  # what does not fit these values, or any
            return False
        return work.is_small

    def _by_numba(
        self, compiled: Function, step: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> Any:
        given = [
            x if kind is None else x.contiguous().numpy()
            for x, kind in zip(inputs, self._kinds, strict=True)
        ]
        if any(x.dtype != k for x, k in zip(given, self._kinds, strict=True) if k is not None):
            return step(*inputs)
        try:
            results = compiled(*given)
        except Exception as error:
            # Whatever the user's arrays led to, the kernels report with the node.
            results = step(*inputs)
            if _is_numbas(error):
                self._refuse(error)
            return results
        return [tensor_over(np.asarray(value)) for value in results]

    def thunk_of_arrays(self, given: Storage, taken: Sequence[int], otherwise: Thunk) -> Thunk:
        """Make the thunk of a graph that is this region alone, without tensors round its arrays.

        Parameters
        ----------
        given
            The storage of each input.
        taken
            For each output of the graph, the index of the region's output.
        otherwise
            Computes what Numba's code does not, or not for these arrays.
        """
        if not self._is_all_arrays:  # Numba's code converts numbers
            return otherwise
        # As source, since a loop over two arrays takes as long as adding them.
        names = [f"x{index}" for index in range(len(given))]
        key = [f"{name}.shape" for name in names]
        key += [f"{kind.__name__}(x{index})" for index, kind in self._lengths]
        fit = " and ".join(f"{name}.dtype == dtype_{name}" for name in names) or "True"
        source = [
            "def thunk():",
            "    results = None",
            "    try:",
            *(f"        {name} = cell_{name}[0]" for name in names),
            f"        if {fit}:",
            f"            results = chosen[{''.join(f'{part}, ' for part in key) or '()'}]"
            f"({', '.join(names)})",
            "    except Exception:",
            "        pass",
            "    if results is None:",
            "        return otherwise()",
            f"    return [{', '.join(f'results[{index}]' for index in taken)}]",
        ]
        scope: dict[str, Any] = {"chosen": self._chosen, "otherwise": otherwise}
        for name, cell, kind in zip(names, given, self._kinds, strict=True):
            scope |= {f"cell_{name}": cell, f"dtype_{name}": kind}
        exec("\n".join(source), scope)
        return cast(Thunk, scope["thunk"])


def _lengths(graph: FunctionGraph) -> list[tuple[int, type]] | None:
    """Find the inputs whose values lengths depend on, each with a number's type.

    None if one of them has axes: sizes are then unknown, whatever the shapes.
    """
    graph = graph.clone()
    shapes = ShapeFeature()
    graph.attach_feature(shapes)
    pending = [length for shape in shapes.shape_of.values() for length in shape or ()]
    pending += [node.inputs[0] for node in graph.apply_nodes if isinstance(node.op, Scan)]
    found: set[Variable] = set()
    while pending:
        variable = pending.pop()
        node = variable.owner
        if variable not in found and not (node and isinstance(node.op, Shape | Shape_i)):
            found.add(variable)
            pending += node.inputs if node else ()
    given = [(index, v.type) for index, v in enumerate(graph.inputs) if v in found]
    if any(kind.ndim for _, kind in given):
        return None
    return [(index, float if kind.dtype.startswith("float") else int) for index, kind in given]


def _sample(x: Any, random: torch.Generator) -> Any:
    """Return an input of the same shape: positive numbers, matrices that have a factor, index 0."""
    if not isinstance(x, torch.Tensor):
        return type(x)(0.5)
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=x.dtype)
    values = torch.rand(x.shape, generator=random, dtype=x.dtype)
    if x.ndim > 1 and x.shape[-1] == x.shape[-2]:
        values.diagonal(dim1=-2, dim2=-1).add_(x.shape[-1])
    return values


def _compile(graph: FunctionGraph) -> Function:
    """Compile a graph, or load it from PyTensor's cache on disk, without inexact mathematics.

    A function of arrays alone has code for whole ones of the graph's dtypes, and raises TypeError
    for others, but for those of another byte order.
    """
    import numba
    import scipy.linalg  # noqa: F401 (loads its OpenBLAS)

    limit_openblas()
    copy = graph.clone()
    _check(copy)
    # Numba rewrites what is within a loop by the mode of the configuration, which may be ours.
    with pytensor.config.change_flags(numba__fastmath=False, mode="NUMBA"):
        function = pytensor.function(
            copy.inputs, copy.outputs, mode="NUMBA", trust_input=True, on_unused_input="ignore"
        )
    compiled = function.vm.jit_fn
    types = [v.type for v in graph.inputs]
    if all(isinstance(kind, DenseTensorType) for kind in types):
        samples = (numba.typeof(np.empty((1,) * kind.ndim, kind.dtype)) for kind in types)
        compiled.compile((numba.types.BaseTuple.from_types(tuple(samples)),))  # of ``*args``
        compiled.disable_compile()
    return cast(Function, compiled)


def _is_numbas(error: Exception) -> bool:
    return type(error).__module__.startswith("numba")


def _check(graph: Any) -> None:
    """Let Numba's code compute what NumPy does.

    Its maxima and minima pass over elements that are NaN, and several indices, or those of rows
    that are written, reach behind an array.
    """
    for node in graph.toposort():
        op = node.op
        if isinstance(op, Scan | OpFromGraph):
            op = op.clone()
            _check(op.fgraph)
            results = op.make_node(*node.inputs).outputs
        elif isinstance(op, _UNCHECKED):
            results = op.make_node(*_with_checks(node)).outputs
        elif _is_extreme(op) and node.outputs[0].type.dtype.startswith("float"):
            (x,) = node.inputs
            is_nan = pt.any(pt.isnan(x), axis=op.axis)
            results = [pt.switch(is_nan, np.array(np.nan, x.type.dtype), op(x))]
        else:
            continue
        graph.replace_all([*zip(node.outputs, results, strict=True)], reason=REGIONS)


def _with_checks(node: Apply) -> list[Any]:
    """The inputs of a node, with indices that raise where one is out of range."""
    op: Any = node.op
    first = 1 if isinstance(op, AdvancedSubtensor) else 2
    given: list[Any] = node.inputs[:first]
    indices = node.inputs[first:]
    checked: dict[Variable, Any] = {}
    axis = 0
    for index in indices_from_subtensor(indices, op.idx_list):
        if isinstance(index, slice) or index.type.dtype != "bool":
            if not isinstance(index, slice):
                length = given[0].shape[axis]
                fits = pt.all((index >= -length) & (index < length))
                checked[index] = _IN_RANGE(checked.get(index, index), fits)
            axis += 1
        else:  # a mask, of several axes
            axis += index.type.ndim
    return [*given, *(checked.get(index, index) for index in indices)]


def _is_extreme(op: Op) -> bool:
    return isinstance(op, CAReduce) and isinstance(op.scalar_op, Maximum | Minimum)


@lower.register(Region)
def lower_region(op: Region, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    host = frozenset(i for i, v in enumerate(node.inputs) if isinstance(v.type, ScalarType))
    call = _Call(op.fgraph)
    return Lowering(
        call,
        host=host,
        graphs=(op.fgraph.clone(),),
        opaque=True,
        named=True,
        thunk_of_arrays=call.thunk_of_arrays,
    )
