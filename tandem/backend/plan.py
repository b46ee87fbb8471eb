"""The schedule of a function that is not made: what it would compute, and in which order."""

from collections.abc import Mapping, Sequence
from typing import Any

from pytensor.compile.maker import construct_function_ins_and_outs
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.link.basic import Container

from tandem.backend.schedule import Schedule
from tandem.backend.shared import is_on_device


def plan_function(
    inputs: Sequence[Variable],
    updates: Sequence[Any],
    mode: Mode,
    givens: Mapping[Variable, Variable] | None = None,
    name: str | None = None,
) -> Schedule:
    """Rewrite the graph of a function as a mode does, and put its nodes in their order.

    The arguments are those of ``pytensor.function(inputs, [], updates=updates, ...)``, which would
    write and link a program as well; `mode` is a `device_mode`. Variables on the device are neither
    read nor written, so memory that nobody has touched stays so.
    """
    specified, _ = construct_function_ins_and_outs(
        inputs, [], updates=updates, givens=None if givens is None else {**givens}
    )
    maker = mode.function_maker(specified, [], mode, on_unused_input="ignore", name=name)
    fgraph = maker.fgraph
    buffers = {}
    for variable, given in zip(fgraph.inputs, maker.inputs, strict=True):
        value = getattr(given.value, "container", given.value)
        if isinstance(value, Container) and is_on_device(variable, value.storage):
            buffers[variable] = value.storage[0]
    linker = maker.linker
    return Schedule(fgraph, linker.schedule(fgraph), buffers, linker.target)
