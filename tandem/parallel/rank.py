"""One rank of a pool: its variables and functions, and every task that a message asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import numpy as np
import pytensor
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable

from tandem.distributed.group import RankGroup
from tandem.parallel.buffers import ReceivedBuffers, SharedBuffers
from tandem.parallel.description import Description, Update
from tandem.parallel.fold import Fold
from tandem.parallel.gpu import Gpu, RankGpu
from tandem.parallel.local_function import LocalFunction, Share
from tandem.parallel.messages import (
    ArrayLocation,
    Call,
    Define,
    Extent,
    Open,
    Publish,
    Put,
    Reduce,
    Release,
    Rows,
    SentVariable,
)
from tandem.parallel.residents import (
    Access,
    HostResidents,
    NearResidents,
    RankMemory,
    RankResidents,
    Residents,
    ShardedReduction,
    reduce_shard,
)
from tandem.parallel.selection import Selection
from tandem.parallel.worker import RankSettings
from tandem.split import edges


@dataclass
class Rank:
    """A rank's variables and functions, by number."""

    number: int
    size: int
    residents: Residents
    make_mode: Callable[[], Mode]
    buffers: SharedBuffers | ReceivedBuffers
    gpu: RankGpu | None = None
    variables: dict[int, SharedVariable] = field(default_factory=dict)
    numbers: dict[SharedVariable, int] = field(default_factory=dict)
    functions: dict[int, LocalFunction] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # as the master knows them

    def array(self, place: ArrayLocation) -> np.ndarray:
        """Return an array by its place."""
        return self.buffers.array(place)

    def do(self, task: Put | Publish | Reduce | Open | Release) -> None:
        """Do a task on shared variables."""
        match task:
            case Put():
                self.put(task)
            case Publish():
                self.publish(task)
            case Reduce():
                self.reduce(task)
            case Open():
                self.residents.open(task.extent)
            case Release():
                self.residents.release()

    def define(self, task: Define) -> None:
        """Make variables and functions that the master has sent; drop what it no longer has."""
        for number in task.dropped:
            self.functions.pop(number, None)
        self.residents.extend(task.blocks)
        for sent in task.variables:
            # Again, where an earlier task failed; the master's value may have changed since.
            made = self.variables[sent.number] = self._made(sent)
            self.numbers[made] = sent.number
        for function in task.functions:
            description = Description.unpack(function, self.variables, self.array)
            compiled = LocalFunction(description, self.make_mode, self.gpu)
            compiled.compile()
            self.functions[function.number] = compiled

    def _made(self, sent: SentVariable) -> SharedVariable:
        if sent.extent is not None:
            resident: SharedVariable = self.residents.variable(sent.extent, sent.name)
            if sent.value is not None:
                resident.set_value(self.array(sent.value))
            return resident
        assert sent.value is not None
        value = self.array(sent.value).copy()
        self.shapes[sent.number] = value.shape
        # Of the same type, which may have a shape that is free, or lengths of one that broadcast.
        return pytensor.shared(value, name=sent.name, shape=sent.type.shape)

    def call(self, task: Call) -> list[Fold] | None:
        """Compute this rank's part of a call; None if it has no rows."""
        share = Share(
            self.number,
            self.size,
            [self._selection(rows) for rows in task.rows],
            task.counts,
            None if task.local is None else self._selection(task.local[self.number]),
            task.slices,
            task.outputs,
        )
        if self.gpu is not None:
            for place in task.inputs:
                if (buffer := self.buffers.buffer(place.buffer)) is not None:
                    self.gpu.lock(buffer)
        inputs = [self.array(place) for place in task.inputs]
        return self.functions[task.function].run(inputs, share)

    def put(self, task: Put) -> None:
        """Set variables from memory that all ranks see."""
        if task.rank not in (None, self.number):
            return
        for number, place in zip(task.variables, task.values, strict=True):
            value = self.array(place)
            if task.scattered:
                lo, hi = edges(len(value), self.size)[self.number : self.number + 2]
                value = value[lo:hi]
            variable = self.variables[number]
            variable.set_value(np.array(value, variable.type.dtype), borrow=True)
            if number in self.shapes:
                self.shapes[number] = value.shape

    def publish(self, task: Publish) -> None:
        """Write variables where other ranks see them."""
        if task.rank in (None, self.number):
            for number, places in zip(task.variables, task.places, strict=True):
                value = self.variables[number].get_value(borrow=True)
                self.array(places[self.number])[...] = value

    def reduce(self, task: Reduce) -> None:
        """Reduce this rank's shard of vectors into all of them."""
        for vector in task.vectors:
            if isinstance(vector.where, Extent):
                self.residents.reduce(vector.where, task.op, vector.shares)
            elif isinstance(vector.where, int):
                variable = self.variables[vector.where]
                value = np.array(variable.get_value(borrow=True), order="C")
                flat = value.reshape(-1)
                ShardedReduction(self.residents.ranks, flat).reduce(flat, task.op, vector.shares)
                variable.set_value(value, borrow=True)
            else:
                vectors = [self.array(place).reshape(-1) for place in vector.where]
                reduce_shard(vectors, task.op, vector.shares, self.number)

    def as_arrays(self, results: Sequence[Any]) -> list[Any]:
        """Return results of functions as arrays, and None as it is."""
        found = results if self.gpu is None else self.gpu.download(results)
        return [None if value is None else np.asarray(value) for value in found]

    def changed_shapes(self, updates: Sequence[Update]) -> Mapping[int, tuple[int, ...]]:
        """Find private variables that an update has given shapes the master does not know."""
        changed = {}
        for update in updates:
            number = self.numbers[update.variable]
            if number in self.shapes:
                shape = update.variable.get_value(borrow=True).shape
                if shape != self.shapes[number]:
                    changed[number] = self.shapes[number] = shape
        return changed

    def _selection(self, rows: Rows) -> Selection:
        indices = None if rows.indices is None else self.array(rows.indices)
        return Selection(rows.number, rows.start, rows.step, indices)


def open_rank(
    settings: RankSettings,
    access: Access,
    buffers: SharedBuffers | ReceivedBuffers,
    former: Rank | None = None,
) -> Rank:
    """Set up this process as a rank: threads, device, memory.

    The resident variables of a former one, on the same device, keep their values.

    Raises ValueError if there is no such precision.
    """
    from tandem.backend import Precision, device_mode, keep_freed_memory, set_threads

    if settings.precision not in (known := get_args(Precision)):
        raise ValueError(f"precision is {settings.precision!r}; it can be {', '.join(known)}")
    set_threads(settings.threads)
    keep_freed_memory()  # results of kernels
    residents, gpu = (
        (former.residents, former.gpu) if former else _open_memory(settings.gpu, access)
    )
    residents.join(access, settings.rank)
    mode = partial(
        device_mode,
        "cpu" if gpu is None else gpu.device,
        precision=settings.precision,
        regions=settings.regions,
        results="host" if gpu is None else "device",
    )
    return Rank(settings.rank, settings.ranks, residents, mode, buffers, gpu)


def _open_memory(gpu: Gpu | None, access: Access) -> tuple[Residents, RankGpu | None]:
    if gpu is None:
        if isinstance(access, RankMemory):
            return NearResidents(), None
        return RankResidents() if isinstance(access, RankGroup) else HostResidents(), None
    from tandem.parallel.gpu_residents import CudaResidents

    opened = RankGpu(gpu)
    return CudaResidents(opened), opened
