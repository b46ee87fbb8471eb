"""Which variables of a graph may share memory, and what therefore must be copied."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.math import Dot

from tandem.backend.lowering import Lowering
from tandem.ops.base import TensorOp

# Ops whose results are new numbers. The others move numbers about, and torch.compile may find that
# one does nothing (a copy, a join of one part, a flip of an axis of length 1) and leave it out.
_COMPUTING = (Elemwise, CAReduce, Dot, BatchedDot, Blockwise, TensorOp)

Roots = frozenset[Variable]


class Aliases:
    """Follows, through a schedule, whose memory each variable may be a view of.

    The *roots* of a variable are the inputs, constants and fresh results whose memory its value may
    lie in. A fresh result is its own only root. Numbers on the host have none.

    Parameters
    ----------
    inputs : iterable of Variable
        The graph's inputs.
    compiled : bool
        Whether ``torch.compile`` reads the program. It leaves out copies that it takes for
        needless, also one that was to save a value from being written over (PyTorch 2.13), so
        whatever only moves numbers counts as a view then.
    """

    def __init__(self, inputs: Iterable[Variable], compiled: bool = False) -> None:
        self._compiled = compiled
        self._roots: dict[Variable, Roots] = {v: frozenset((v,)) for v in inputs}
        self._repeated: set[Variable] = set()

    def roots(self, variable: Variable) -> Roots:
        """Give the roots of a variable that has been computed."""
        if isinstance(variable, Constant):
            return frozenset((variable,))
        return self._roots.get(variable, frozenset())

    def is_repeated(self, variable: Variable) -> bool:
        """Whether several elements of the variable may lie at one address."""
        return variable in self._repeated

    def place(self, result: Variable, memory: Variable) -> None:
        """Take note that a fresh result lies in the memory of an input."""
        for variable, roots in self._roots.items():
            if result in roots:
                self._roots[variable] = roots - {result} | {memory}

    def compute(self, node: Apply, lowering: Lowering) -> None:
        """Take note of what `node` does."""
        if lowering.numbers:
            return
        for place, output in enumerate(node.outputs):
            viewed = self._viewed(node, lowering, place)
            roots = frozenset().union(*(self.roots(variable) for variable in viewed))
            # A view of a number is a tensor made of it: fresh.
            self._roots[output] = roots or frozenset((output,))
            if lowering.repeats or any(variable in self._repeated for variable in viewed):
                self._repeated.add(output)

    def _viewed(self, node: Apply, lowering: Lowering, output: int) -> list[Variable]:
        if self._compiled and not isinstance(node.op, _COMPUTING):
            return list(node.inputs)
        places = (*node.op.view_map.get(output, ()), *lowering.views.get(output, ()))
        return [node.inputs[place] for place in places]


@dataclass(frozen=True)
class Overlaps:
    """Which inputs lie in the same memory, as far as the linker can see.

    Parameters
    ----------
    groups : mapping from Variable to frozenset of Variable
        For each input that stays on the device, the inputs that its memory overlaps; itself among
        them.
    """

    groups: Mapping[Variable, Roots]

    @classmethod
    def of(cls, buffers: Mapping[Variable, torch.Tensor]) -> "Overlaps":
        """Compare the addresses of the buffers of device-resident inputs."""
        spans = {variable: _span(buffer) for variable, buffer in buffers.items()}
        return cls(
            {
                one: frozenset(
                    other
                    for other in spans
                    if other is one
                    or (spans[one][0] < spans[other][1] and spans[other][0] < spans[one][1])
                )
                for one in spans
            }
        )

    def are_alone(self, variable: Variable) -> bool:
        """Whether no other input lies in the variable's memory."""
        return self.groups[variable] == {variable}

    def touch(self, roots: Iterable[Variable], written: Collection[Variable]) -> bool:
        """Whether memory of one of `roots` is written when the inputs in `written` are."""
        return any(not self.groups.get(root, frozenset()).isdisjoint(written) for root in roots)


def _span(buffer: torch.Tensor) -> tuple[int, int]:
    """Give the first address of a tensor and the first one behind it."""
    if not buffer.numel():
        return buffer.data_ptr(), buffer.data_ptr()
    last = sum(
        (size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )
    return buffer.data_ptr(), buffer.data_ptr() + (last + 1) * buffer.element_size()


def last_uses(order: Sequence[Apply], outputs: Iterable[Variable]) -> dict[Variable, int]:
    """Give the position in the schedule of each variable's last use.

    A variable that is an output of the graph is in use until ``len(order)``; one that nobody uses,
    until it is computed.
    """
    last: dict[Variable, int] = {}
    for position, node in enumerate(order):
        for variable in (*node.inputs, *node.outputs):
            last[variable] = position
    last.update((variable, len(order)) for variable in outputs)
    return last
