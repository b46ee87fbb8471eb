"""A part of a graph as one Op, which `tandem.backend.regions` makes."""

from collections.abc import Sequence
from typing import Any

import pytensor
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op


class Region(Op):
    """A part of a graph as one node; its inputs and outputs are those of the graph."""

    def __init__(self, fgraph: FunctionGraph) -> None:
        self.fgraph = fgraph

    def make_node(self, *inputs: Variable) -> Apply:
        return Apply(self, list(inputs), [v.type() for v in self.fgraph.outputs])

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Any) -> None:
        """Compute the graph by the `perform` of its Ops."""
        graph = self.fgraph.clone()
        mode = Mode(linker="py", optimizer=None)  # type: ignore[arg-type]
        function = pytensor.function(
            graph.inputs, graph.outputs, mode=mode, on_unused_input="ignore"
        )
        for storage, value in zip(output_storage, function(*inputs), strict=True):
            storage[0] = value

    def __str__(self) -> str:
        return f"Region{{{', '.join(str(node.op) for node in self.fgraph.toposort())}}}"
