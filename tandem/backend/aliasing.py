"""Variables of a graph that may share memory, and must therefore be copied."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from pytensor.graph.basic import Apply, Constant, Variable

from tandem.backend.lowering import Lowering

Roots = frozenset[Variable]


class Aliases:
    """The memory that each variable of a schedule may be a view of.

    The *roots* of a variable are the inputs, constants and fresh results in whose memory its value
    may lie. A fresh result is its own only root. So is a number on the host: it is converted to a
    tensor once, of which there may be views.

    With `compiled`, whatever only moves numbers counts as a view: ``torch.compile`` (2.13) leaves
    out copies that it considers needless, also one that protects a value from being overwritten.
    """

    def __init__(self, inputs: Iterable[Variable], compiled: bool = False) -> None:
        self._compiled = compiled
        self._roots: dict[Variable, Roots] = {v: frozenset((v,)) for v in inputs}
        self._repeated: set[Variable] = set()

    def roots(self, variable: Variable) -> Roots:
        """Return the roots of a variable that has been computed."""
        if isinstance(variable, Constant):
            return frozenset((variable,))
        return self._roots.get(variable, frozenset())

    def is_repeated(self, variable: Variable) -> bool:
        """Return whether several elements of the variable may lie at one address."""
        return variable in self._repeated

    def place(self, result: Variable, memory: Variable) -> None:
        """Record that a fresh result lies in the memory of an input."""
        for variable, roots in self._roots.items():
            if result in roots:
                self._roots[variable] = roots - {result} | {memory}

    def compute(self, node: Apply, lowering: Lowering) -> None:
        """Record the memory of a node's outputs."""
        for index, output in enumerate(node.outputs):
            viewed = [] if lowering.numbers else self._viewed(node, lowering, index)
            roots = frozenset().union(*(self.roots(variable) for variable in viewed))
            self._roots[output] = roots or frozenset((output,))
            if lowering.repeats or any(variable in self._repeated for variable in viewed):
                self._repeated.add(output)

    def _viewed(self, node: Apply, lowering: Lowering, output: int) -> list[Variable]:
        if self._compiled and not lowering.computes:
            return list(node.inputs)
        indices = (*node.op.view_map.get(output, ()), *lowering.views.get(output, ()))
        return [node.inputs[index] for index in indices]


@dataclass(frozen=True)
class Overlaps:
    """For each device-resident input, the inputs whose memory overlaps its own, itself included."""

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
        """Return whether no other input lies in the variable's memory."""
        return self.groups[variable] == {variable}

    def touch(self, roots: Iterable[Variable], written: Collection[Variable]) -> bool:
        """Return whether memory of one of `roots` is written when the inputs in `written` are."""
        return any(not self.groups.get(root, frozenset()).isdisjoint(written) for root in roots)


def _span(buffer: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the first one behind it."""
    if not buffer.numel():
        return buffer.data_ptr(), buffer.data_ptr()
    last = sum(
        (size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )
    return buffer.data_ptr(), buffer.data_ptr() + (last + 1) * buffer.element_size()
