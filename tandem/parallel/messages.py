"""Messages of the master to the workers, one for a call, and their answers.

A message is the same for all workers: each finds its own part by its rank. Arrays are not in it but
where they lie, in memory that all ranks see. Ranks of mpirun or torchrun see none: each gets its
part of a message, with the arrays, see `rank_messages`.
"""

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple


class ArrayLocation(NamedTuple):
    """The place of an array."""

    buffer: int  # number of the buffer
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0  # bytes


class Rows(NamedTuple):
    """Rows of an array: `start + step * i`, or those that `indices` list, for i below `number`."""

    number: int
    start: int = 0
    step: int = 1
    indices: ArrayLocation | None = None  # int64 (number,)


class Extent(NamedTuple):
    """The place of a resident variable in the memory of every rank."""

    offset: int  # bytes
    dtype: str
    shape: tuple[int, ...]
    block: int = 0  # of a GPU's memory, whose blocks are of one dtype


class SentVariable(NamedTuple):
    """A shared variable that the workers are to have too."""

    number: int
    name: str | None
    type: Any  # of PyTensor
    extent: Extent | None  # of a resident
    value: ArrayLocation | None  # None: it lies there


class SentFunction(NamedTuple):
    """A function without its graph's objects, see `graph_transfer`."""

    number: int
    description: bytes
    constants: tuple[ArrayLocation, ...]
    scattered: int  # numbers of the graph's inputs, in this order
    broadcast: int
    row_numbers: int
    output_ops: tuple[str | None, ...]
    updated: tuple[int, ...]  # numbers of variables; their new values are the graph's last outputs
    update_ops: tuple[str | None, ...]
    sliceables: tuple[int, ...]  # numbers of variables
    options: Mapping[str, Any]  # of `pytensor.function`


class Define(NamedTuple):
    """Make variables and functions, and drop functions."""

    variables: tuple[SentVariable, ...]
    functions: tuple[SentFunction, ...]
    blocks: tuple[int, ...] = ()  # bytes of each block of a GPU's memory so far
    dropped: tuple[int, ...] = ()  # numbers of functions that the program no longer has


class Call(NamedTuple):
    """Call a function on this rank's rows."""

    function: int
    inputs: tuple[ArrayLocation, ...]  # scattered ones first
    rows: tuple[Rows, ...]  # of each scattered input, those of all ranks
    # Rows of each rank; None: there is nothing to divide, and every rank computes the same.
    counts: tuple[int, ...] | None
    local: tuple[Rows, ...] | None  # of sliceable variables, by rank; None: all that each has
    slices: int
    outputs: tuple[int, ...]  # numbers of those that are computed


class Put(NamedTuple):
    """Set private variables, each to an array or, `scattered`, to this rank's part of its rows."""

    variables: tuple[int, ...]
    values: tuple[ArrayLocation, ...]
    scattered: bool = False
    rank: int | None = None  # of the only one that does it


class Publish(NamedTuple):
    """Write private variables where other ranks see them, at this rank's places."""

    variables: tuple[int, ...]
    places: tuple[tuple[ArrayLocation, ...], ...]  # by variable, then by rank
    rank: int | None = None  # of the only one that does it


class Vector(NamedTuple):
    """A vector of each rank, where all ranks see it or each has its own."""

    # Places by rank, an extent of every rank's memory, or the number of a variable.
    where: tuple[ArrayLocation, ...] | Extent | int
    shares: tuple[float, ...]  # weights by rank; one of weight 0 is not read


class Reduce(NamedTuple):
    """Reduce this rank's shard of vectors that all ranks see, into all of them."""

    vectors: tuple[Vector, ...]
    op: str


class Open(NamedTuple):
    """Open the block of each other GPU's memory in which an extent lies."""

    extent: Extent


class Release(NamedTuple):
    """Give up the memory of other GPUs."""


class Close(NamedTuple):
    """End."""


Task = Define | Call | Put | Publish | Reduce | Open | Release | Close


class Message(NamedTuple):
    """A task, and changes of what memory all ranks see.

    The descriptors of new buffers follow it through the pipe.
    """

    task: Task
    new: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class Answer(NamedTuple):
    """A task is done."""

    # Of a call: each result, or where it lies in the worker's own memory; None: there were no rows.
    results: tuple[Any, ...] | None = None
    shapes: Mapping[int, tuple[int, ...]] = {}  # of private variables whose shape has changed
    excerpt: float = 0.0  # seconds: of taking rows
    function: float = 0.0  # seconds: of computing


_TIMES = struct.Struct("dd")


def repeated(answer: "Answer | Fault", former: "Answer | Fault | None") -> bytes | None:
    """Return the times of an answer that is the former one but for these; None if it is not."""
    if type(answer) is Answer and type(former) is Answer and answer[:2] == former[:2]:
        return _TIMES.pack(*answer[2:])
    return None


def repetition(data: bytes, former: "Answer | Fault | None") -> Answer | None:
    """Return the answer that repeats the `former` with the times in `data`; None for a pickle."""
    if len(data) == _TIMES.size and isinstance(former, Answer):
        return Answer(*former[:2], *_TIMES.unpack(data))
    return None


class Fault(NamedTuple):
    """A task has raised an exception."""

    error: Exception | None  # None where it cannot be pickled
    description: str
    traceback: str
