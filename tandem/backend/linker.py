"""The PyTensor linker whose functions run PyTorch's kernels."""

import copy
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.link.basic import JITLinker
from pytensor.link.utils import raise_with_op

from tandem.backend import perform
from tandem.backend.channel import Channel
from tandem.backend.codegen import Program, build_program
from tandem.backend.inner_graphs import INCOMPATIBLE_REWRITES, REQUIRED_REWRITES
from tandem.backend.lowering.registry import Storage, is_host_type, is_tensor
from tandem.backend.precision import ProductPrecision
from tandem.backend.runtime import out_of_memory
from tandem.backend.schedule import Observe, Results, Target, update_mapping
from tandem.backend.segments import SegmentedRun
from tandem.backend.shared import DeviceContainer, is_on_device, tensor_over

# Warnings about a precision that the user has chosen, and for Inductor's authors about a softmax.
INDUCTOR_ADVICE = ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled")

Read = Callable[[Any], Any]


class DeviceLinker(JITLinker):
    """Run a graph with PyTorch's kernels; `device_mode` documents the arguments."""

    required_rewrites = REQUIRED_REWRITES
    incompatible_rewrites = INCOMPATIBLE_REWRITES

    def __init__(
        self,
        device: torch.device,
        compiled: bool = False,
        precision: ProductPrecision = ProductPrecision(),  # noqa: B008 (it never changes)
        tuned: bool = False,
        on_gradient_ready: Callable[[str], None] | None = None,
        strict: bool = False,
        buckets: Iterable[Iterable[str]] = (),
        results: Results = "host",
        channel: Channel | None = None,
        observe: Observe | None = None,
        allow_gc: bool | None = None,
        scheduler: Callable[[FunctionGraph], list[Apply]] | None = None,
    ) -> None:
        super().__init__(allow_gc=allow_gc, schedule=scheduler)
        groups = tuple(frozenset(names) for names in buckets)
        self.target = Target(
            device,
            compiled,
            precision,
            on_gradient_ready,
            groups,
            strict,
            results,
            channel,
            observe,
        )
        # A captured step records the kernels itself, so the compiler must not.
        self._compile_mode = "max-autotune-no-cudagraphs" if tuned else None

    def __repr__(self) -> str:
        return f"DeviceLinker({str(self.target.device)!r}, compiled={self.target.compiled})"

    def accept(
        self,
        fgraph: FunctionGraph,
        no_recycling: Sequence[Variable] | None = None,
        profile: Any = None,
    ) -> "DeviceLinker":
        """Tie this linker to a graph, or a copy of it if it is tied to another."""
        linker = self if self.fgraph in (None, fgraph) else copy.copy(self)
        linker.fgraph = fgraph
        linker.no_recycling = [] if no_recycling is None else no_recycling
        return linker

    @property
    def _graph(self) -> FunctionGraph:
        return cast(FunctionGraph, self.fgraph)

    def fgraph_convert(
        self,
        fgraph: FunctionGraph,
        order: Sequence[Apply],
        input_storage: Storage,
        output_storage: Storage,
        storage_map: dict[Variable, list[Any]],
        **kwargs: Any,
    ) -> Program:
        """Make a program of the graph."""
        buffers = {
            variable: storage[0]
            for variable, storage in zip(fgraph.inputs, input_storage, strict=True)
            if is_on_device(variable, storage)
        }
        return build_program(fgraph, order, buffers, self.target)

    def create_thunk_inputs(self, storage_map: dict[Variable, list[Any]]) -> Storage:
        """Return the storage of each input."""
        return [storage_map[variable] for variable in self._graph.inputs]

    def jit_compile(self, fn: Any) -> Callable[..., tuple[Any, ...]]:
        """Compile the program, or each of its segments, if the target asks for it."""
        run, store_results = fn.run, fn.store_results
        if self.target.compiled:
            for advice in INDUCTOR_ADVICE:
                warnings.filterwarnings("ignore", advice, UserWarning)
            compiler = partial(
                torch.compile, fullgraph=not fn.breaks, dynamic=False, mode=self._compile_mode
            )
            if isinstance(run, SegmentedRun):
                return run.compiled(compiler)
            run = _with_vectors(compiler(run), fn.as_vectors)
        if store_results is None:
            return run
        return lambda *inputs: store_results(*inputs, *run(*inputs))

    def create_jitable_thunk(
        self,
        compute_map: dict[Variable, list[bool]],
        order: Sequence[Apply],
        input_storage: Storage,
        output_storage: Storage,
        storage_map: dict[Variable, list[Any]],
    ) -> tuple[list[Callable[[], list[Any]]], list[Apply], Callable[..., Any]]:
        """Make the function that computes all outputs from the contents of the input storages."""
        program = self.fgraph_convert(
            self._graph, order, input_storage, output_storage, storage_map
        )
        cells = self.create_thunk_inputs(storage_map)
        run = self.jit_compile(program)
        thunk = _make_thunk(self._graph, program, run, cells, self.target)
        thunk.inputs = cells
        thunk.outputs = [storage_map[variable] for variable in self._graph.outputs]
        thunk.lazy = False
        thunk.program = program
        if isinstance(run, SegmentedRun):
            thunk.steps = partial(_steps, self._graph, program, run, cells, self.target)
        return [thunk], [v.owner for v in self._graph.outputs if v.owner is not None][:1], run

    def make_all(
        self,
        input_storage: Storage | None = None,
        output_storage: Storage | None = None,
        storage_map: dict[Variable, list[Any]] | None = None,
    ) -> Any:
        """Make the function and the containers of its inputs and outputs."""
        fn, inputs, outputs, thunks, nodes = super().make_all(
            input_storage, output_storage, storage_map
        )
        inputs = [
            DeviceContainer(variable, container.storage)
            if is_on_device(variable, container.storage)
            else container
            for variable, container in zip(self._graph.inputs, inputs, strict=True)
        ]
        return fn, inputs, outputs, thunks, nodes


def _with_vectors(
    run: Callable[..., tuple[Any, ...]], indices: frozenset[int]
) -> Callable[..., tuple[Any, ...]]:
    """Pass the arguments at `indices` to `run` as vectors of one element, over the same memory."""
    if not indices:
        return run
    return lambda *inputs: run(
        *(value.view(1) if index in indices else value for index, value in enumerate(inputs))
    )


def _make_thunk(
    fgraph: FunctionGraph,
    program: Program,
    run: Callable[..., tuple[Any, ...]],
    cells: Storage,
    target: Target,
) -> Any:
    on_host = target.device.type == "cpu"
    readers = [_reader(variable, target.device) for variable in fgraph.inputs]
    pairs = list(zip(readers, cells, strict=True))
    mapping = update_mapping(fgraph)
    # New values of variables on the host go there in any case.
    writers = [
        _writer(fgraph.outputs[index], "host" if index in mapping else target.results, on_host)
        for index in program.returned
    ]
    # An output that is not returned is an update in place: the input's storage holds its value.
    slots: list[list[Any]] = [
        [None] if index in program.returned else cells[mapping[index]]
        for index in range(len(fgraph.outputs))
    ]
    own = [slots[index] for index in program.returned]

    def thunk() -> list[Any]:
        differentiates = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # half the time of no_grad, which counts for small arrays
        try:
            values = run(*[read(cell[0]) for read, cell in pairs])
            for slot, write, value in zip(own, writers, values):  # noqa: B905
                slot[0] = write(value)
        except Exception as error:
            _explain(error, fgraph, program, target.device)
        finally:
            torch.set_grad_enabled(differentiates)
        outputs = [slot[0] for slot in slots]
        for slot in own:
            slot[0] = None
        return outputs

    if program.thunk_of_arrays is None:
        return thunk
    return program.thunk_of_arrays(cells, thunk)


def _steps(
    fgraph: FunctionGraph,
    program: Program,
    run: SegmentedRun,
    cells: Storage,
    target: Target,
) -> Iterator[tuple[Any, ...]]:
    """Run a function's segments one after another, without reports; it returns nothing."""
    readers = [_reader(variable, target.device) for variable in fgraph.inputs]
    try:
        yield from run.steps(*[read(cell[0]) for read, cell in zip(readers, cells, strict=True)])
    except Exception as error:
        _explain(error, fgraph, program, target.device)


def _reader(variable: Variable, device: torch.device) -> Read:
    """Make the conversion from an input's stored value to the program's argument."""
    if is_host_type(variable):
        return lambda value: value.item() if isinstance(value, np.generic) else value
    if not is_tensor(variable):
        return lambda value: value
    dtype = variable.type.dtype
    on_host = device.type == "cpu"

    def read(value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        tensor = tensor_over(value if isinstance(value, np.ndarray) else np.asarray(value, dtype))
        return tensor if on_host else tensor.to(device)

    return read


def _writer(variable: Variable, results: Results, on_host: bool) -> Callable[[Any], Any]:
    """Make the conversion from a result of the program to the output's value."""
    if not (is_tensor(variable) or is_host_type(variable)):
        return lambda value: value
    dtype = np.dtype(variable.type.dtype)

    def write(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if results == "device":
                return value
            return value.numpy() if on_host else value.cpu().numpy()
        return dtype.type(value) if is_host_type(variable) else np.array(value, dtype)

    return write


def _explain(
    error: Exception, fgraph: FunctionGraph, program: Program, device: torch.device
) -> NoReturn:
    """Add the node that failed to an exception, and raise it again."""
    if isinstance(error, torch.OutOfMemoryError):
        raise out_of_memory(error) from error
    node = program.failed_node(error.__traceback__)
    if node is None:
        raise error
    if type(error) is RuntimeError and device.type == "cpu" and not _is_from_perform(error):
        # Shapes that do not fit are a ValueError of NumPy's, and so of PyTensor's own linkers. On a
        # GPU it may be any fault of the device.
        error = ValueError(*error.args).with_traceback(error.__traceback__)
    error.add_note(f"while PyTorch computed {node} ({type(node.op).__name__})")
    raise_with_op(fgraph, node, exc_info=(type(error), error, error.__traceback__))


def _is_from_perform(error: Exception) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_filename == perform.__file__ for frame in frames)
