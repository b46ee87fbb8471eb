"""Spans of single Ops: what the functions of a traced run call, line by line."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytensor.compile.executor import Function
from pytensor.graph.basic import Apply
from pytensor.tensor.elemwise import Elemwise

from tandem.ops.region import Region
from tandem.ops.work import work_of
from tandem.trace.recorder import Recorder, clock
from tandem.training.attribution import layers_of
from tandem.training.functions import DeviceFunctions


def record_ops(functions: DeviceFunctions, recorder: Recorder) -> None:
    """Record each Op of the functions that are compiled from now on."""
    observer = OpObserver(recorder)
    functions.observe(observer, observer.describe)


@dataclass
class _Call:
    """A call of a program: the kernel of a node, or a conversion of an operand or a result."""

    node: Apply
    is_copy: bool  # of a result
    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)


class OpObserver:
    """Wraps the calls of functions, see `tandem.backend.device_mode`.

    A span has the name of its Op; the conversion of an operand or the copy of a result is one
    more, without work of its own, named ``convert`` or ``copy``.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: list[_Call] = []  # of the function that is being compiled

    def __call__(self, node: Apply, call: Callable[..., Any]) -> Callable[..., Any]:
        recorder, about = self._recorder, _Call(node, getattr(call, "__name__", "") == "copy_")
        self._calls.append(about)

        def recorded(*arguments: Any, **keywords: Any) -> Any:
            if not recorder.recording:
                return call(*arguments, **keywords)
            begin = clock()
            try:
                return call(*arguments, **keywords)
            finally:
                recorder.add(about.name, begin, clock(), about.args)

        return recorded

    def describe(self, function: Function) -> None:
        """Name the calls of a function that has been compiled."""
        places = layers_of(function.maker.fgraph)
        # Operands are converted before the kernel is called, results are copied thereafter.
        kernels = {call.node: call for call in self._calls if not call.is_copy}
        for call in self._calls:
            kernel = kernels.setdefault(call.node, call)
            layer, phase = places[call.node]
            call.args = {"op": op_name(call.node), "layer": layer, "phase": phase}
            if isinstance(call.node.op, Region):
                call.args["ops"] = _ops(call.node.op)
            call.args |= _work(call.node, counts=call is kernel)
            call.name = call.args["op"] if call is kernel else ("convert", "copy")[call.is_copy]
        self._calls = []


def op_name(node: Apply) -> str:
    """Name the Op of a node; an elementwise one by what it computes, a region by its first Ops."""
    op = node.op
    if isinstance(op, Region):
        ops = _ops(op)
        rest = [f"+{len(ops) - 3}"] if len(ops) > 3 else []
        return f"Region ({', '.join([*ops[:3], *rest])})"
    if isinstance(op, Elemwise):
        return f"Elemwise {type(op.scalar_op).__name__}"
    return type(op).__name__


def _ops(region: Region) -> list[str]:
    return [op_name(node).removeprefix("Elemwise ") for node in region.fgraph.toposort()]


def _work(node: Apply, counts: bool) -> dict[str, Any]:
    """Shapes and work of a node, as far as they are static; a conversion counts no operations."""
    shapes = [[*shape] for out in node.outputs if (shape := getattr(out.type, "shape", None))]
    found: dict[str, Any] = {"shape": shapes[0] if len(shapes) == 1 else shapes}
    try:
        work = work_of(node)
    except ValueError:  # of a length that is not known
        return found
    flops, nbytes = (work.flops, work.nbytes) if counts else (0, 0)
    return found | {"kind": work.kind, "flops": flops, "bytes": nbytes}
