"""What a data-parallel function computes, and how it travels to the workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from tandem.parallel.graph_transfer import FlatGraph, decode, encode
from tandem.parallel.messages import Place, SentFunction


@dataclass(frozen=True)
class Update:
    """A shared variable, its new value, and how new values of slices become one."""

    variable: SharedVariable
    new: Variable
    op: str | None


@dataclass(frozen=True)
class Description:
    """A function as one graph without givens, and what becomes of its results."""

    scattered: Sequence[TensorVariable]
    broadcast: Sequence[TensorVariable]
    row_numbers: Sequence[TensorVariable]  # made by `row_index`
    outputs: Sequence[Variable]
    output_ops: Sequence[str | None]
    updates: Sequence[Update]
    sliceables: Sequence[SharedVariable]
    options: Mapping[str, Any] = field(default_factory=dict)  # of `pytensor.function`

    @property
    def inputs(self) -> list[TensorVariable]:
        """All inputs of the graph: scattered ones, broadcast ones, numbers of rows."""
        return [*self.scattered, *self.broadcast, *self.row_numbers]

    @property
    def results(self) -> list[Variable]:
        """All results of the graph: outputs, then new values of updated variables."""
        return [*self.outputs, *(update.new for update in self.updates)]

    @property
    def is_divided(self) -> bool:
        """Whether there are rows to divide between ranks."""
        return bool(self.scattered or self.sliceables)

    def pack(
        self,
        number: int,
        number_of: Callable[[SharedVariable], int],
        place: Callable[[np.ndarray], Place],
    ) -> SentFunction:
        """Describe this function to another process; `place` puts a constant where it sees it.

        Raises InputError if an Op cannot be sent.
        """
        flat = encode(self.inputs, self.results, number_of)
        return SentFunction(
            number,
            flat.description,
            tuple(place(array) for array in flat.arrays),
            len(self.scattered),
            len(self.broadcast),
            len(self.row_numbers),
            tuple(self.output_ops),
            tuple(number_of(update.variable) for update in self.updates),
            tuple(update.op for update in self.updates),
            tuple(number_of(variable) for variable in self.sliceables),
            dict(self.options),
        )

    @classmethod
    def unpack(
        cls,
        sent: SentFunction,
        variables: Mapping[int, SharedVariable],
        array: Callable[[Place], np.ndarray],
    ) -> "Description":
        """Make the function's graph again, over this process's variables."""
        flat = FlatGraph(sent.description, tuple(array(place).copy() for place in sent.constants))
        inputs, results = decode(flat, variables.__getitem__)
        first, second = sent.scattered, sent.scattered + sent.broadcast
        count = len(sent.output_ops)
        return cls(
            inputs[:first],
            inputs[first:second],
            inputs[second:],
            results[:count],
            sent.output_ops,
            [
                Update(variables[number], new, op)
                for number, new, op in zip(
                    sent.updated, results[count:], sent.update_ops, strict=True
                )
            ],
            [variables[number] for number in sent.sliceables],
            sent.options,
        )
