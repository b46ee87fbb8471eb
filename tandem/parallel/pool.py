"""A pool of ranks that share functions, variables and data: its life, and what is made in it."""

import contextlib
import itertools
import multiprocessing
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pytensor.compile.mode import Mode
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.variable import TensorVariable

from tandem.config.hardware import available_cores
from tandem.distributed import local_groups
from tandem.memory import HostBuffer
from tandem.memory.flat import FlatLayout
from tandem.parallel.buffers import ArrayWriter, SharedBuffers
from tandem.parallel.collectives import Collectives
from tandem.parallel.data import Data, data
from tandem.parallel.description import describe
from tandem.parallel.devices import check_numbers, choose_devices
from tandem.parallel.function import Function
from tandem.parallel.gpu import gpu_of
from tandem.parallel.messages import Define, Extent, Release, SentVariable
from tandem.parallel.rank import open_rank
from tandem.parallel.rank_team import (
    RankTeam,
    choose_rank_devices,
    is_rank,
    join,
    serve_master,
    share_cores,
    share_memory,
)
from tandem.parallel.registry import Registry
from tandem.parallel.residents import Access
from tandem.parallel.team import PoolWorkers, Team, WorkerLost
from tandem.parallel.waiting import SPIN_SECONDS
from tandem.parallel.worker import RankSettings
from tandem.validation import unmasked

if TYPE_CHECKING:
    from tandem.backend import Precision


@dataclass(frozen=True)
class FlatShared:
    """Resident variables that lie side by side in one vector, which is one for collectives."""

    vector: TensorSharedVariable  # (n,), padding included
    views: Mapping[str, TensorSharedVariable]


class Pool(Collectives):
    """Ranks that compute functions on parts of the same data. A context manager.

    The process that makes it is one of the ranks, the master; the others are worker processes. All
    functions of `tandem.parallel` are methods of a pool; the module has one of its own, made by
    `fork`.

    Parameters
    ----------
    n_parallel : int, optional
        Ranks, the master included: by default one for each GPU, or for each core of the processor.
    use_gpu : bool, optional
        Whether ranks compute on GPUs; by default where there are any.
    master_rank : int
        The rank of this process.
    profile_workers : bool
        Have each worker r write a profile of its work to ``worker_r.prof`` when the pool is closed.
    max_n_var, max_dim : int, optional
        Of the original; without effect, for nothing here has such limits.
    devices : sequence of str, optional
        The device of each rank, "cpu" or "cuda:0" and so on; several may have the same.
    threads : int, optional
        Of each rank's computation on the processor; by default the cores divided by the ranks. They
        are set for this process too.
    precision : "float32", "tf32", "bfloat16" or "float64"
        Of the operands of products and convolutions, see `tandem.backend.device_mode`.
    regions : bool
        On CPUs, compute loops and small arrays by Numba's code, see `tandem.backend.device_mode`.
    timeout : float
        Seconds without a sign of life after which a worker is taken for dead.

    Raises
    ------
    InputError
        A device does not exist.
    RuntimeError
        This is a worker process.
    TypeError, ValueError
        A number is not possible.
    """

    def __init__(
        self,
        n_parallel: int | None = None,
        use_gpu: bool | None = None,
        master_rank: int = 0,
        profile_workers: bool = False,
        max_n_var: int | None = None,
        max_dim: int | None = None,
        *,
        devices: Sequence[str] | None = None,
        threads: int | None = None,
        precision: "Precision" = "float32",
        regions: bool = False,
        timeout: float = 30.0,
    ) -> None:
        self.registry = Registry()
        self.staging = HostBuffer.create(0, "staging")
        # Those that the program still has; the others need not be sent.
        self._functions: weakref.WeakValueDictionary[int, Function] = weakref.WeakValueDictionary()
        self._function_numbers = itertools.count()
        self._memory = HostBuffer.create(0, "residents")  # the master's
        self._device = ""  # the master's
        self._team: Team | None = None
        self._end: weakref.finalize[..., Pool] | None = None  # of a team whose pool is gone
        self._pid = os.getpid()
        self.start(
            n_parallel,
            use_gpu,
            master_rank,
            profile_workers,
            max_n_var,
            max_dim,
            devices=devices,
            threads=threads,
            precision=precision,
            regions=regions,
            timeout=timeout,
        )

    def start(
        self,
        n_parallel: int | None = None,
        use_gpu: bool | None = None,
        master_rank: int = 0,
        profile_workers: bool = False,
        max_n_var: int | None = None,
        max_dim: int | None = None,
        *,
        devices: Sequence[str] | None = None,
        threads: int | None = None,
        precision: "Precision" = "float32",
        regions: bool = False,
        timeout: float = 30.0,
    ) -> None:
        """Start the workers of a pool that is closed, from the master's values.

        Parameters and errors are those of `Pool`.
        """
        if self._team is not None and self._team.is_open:
            self._check_process()
            raise RuntimeError("the pool is open: close it first")
        if multiprocessing.current_process().daemon or RankTeam.is_worker:
            raise RuntimeError("a worker process can't have workers of its own")
        group = join() if is_rank() else None
        if group is None:
            chosen = choose_devices(n_parallel, use_gpu, devices)
        else:
            RankTeam.check_none(group)
            chosen = choose_rank_devices(group, n_parallel, use_gpu, devices)
        check_numbers(len(chosen), master_rank, threads, timeout)
        self.ranks, self.master_rank = len(chosen), master_rank
        former, device = None, chosen[master_rank]
        if self._team is not None:
            self.rank.residents.leave()
            former = self.rank if device == self._device else None
        if former is None and self.registry.extents:
            raise ValueError(
                f"this process would compute on {device}, and resident variables lie on "
                f"{self._device}: make another pool"
            )
        cores = len(available_cores())
        each = cores // self.ranks if group is None else share_cores(group)
        settings = [
            RankSettings(
                rank,
                self.ranks,
                gpu_of(name),
                threads or max(1, each),
                precision,
                regions,
                SPIN_SECONDS if self.ranks <= cores else 0.0,
                f"worker_{rank}.prof" if profile_workers else None,
            )
            for rank, name in enumerate(chosen)
        ]
        buffers, is_host = SharedBuffers(), device == "cpu"
        if group is None:
            access = self._make_access(is_host)
        else:
            shared = share_memory(group) if is_host else group
            if group.rank != master_rank:
                serve_master(settings[group.rank], group, shared, master_rank, timeout)
            access = [shared] * self.ranks
            self._team = RankTeam(group, buffers, timeout)
        self.rank = open_rank(settings[master_rank], access[master_rank], buffers, former)
        self._device = device
        self.rank.variables = self.registry.variables
        self.registry.forget_ranks()
        for function in self._functions.values():
            function.local.forget(self.rank.gpu)
        try:
            if group is None:
                self._team = PoolWorkers(settings, master_rank, access, buffers, timeout)
                if self._end is not None:
                    self._end.detach()  # it would keep the former team
                self._end = weakref.finalize(self, self._team.close)
                self._end.atexit = False  # a team ends by itself, before others that it needs
        except BaseException:
            self.rank.residents.leave()
            raise
        self._sent_variables: set[int] = set()
        self._sent_functions: set[int] = set()
        self._pid, self._thread = os.getpid(), threading.get_ident()

    def _make_access(self, is_host: bool) -> Sequence[Access]:
        """Make what each rank is given of the team."""
        if not is_host:
            return local_groups(self.ranks)
        buffers = [
            self._memory if rank == self.master_rank else HostBuffer.create(0, f"residents {rank}")
            for rank in range(self.ranks)
        ]
        for buffer in buffers:
            buffer.resize(self._memory.nbytes)
        return [buffers] * self.ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, until `start`. Shared variables keep the master's values."""
        team, residents = self._team, self.rank.residents
        if team is None or self._pid != os.getpid():
            return
        # A GPU is of the thread that has made the pool.
        is_own = self._thread == threading.get_ident()
        if is_own and team.is_open and not team.is_busy and residents.has_opened:
            with contextlib.suppress(WorkerLost):
                self._run(team, Release())
        team.close()
        if is_own:
            residents.leave()

    def get_n_gpu(self) -> int:
        """Return the number of ranks, which in the original were GPUs."""
        self.check_open()
        return self.ranks

    # What is made in a pool

    def function(
        self,
        inputs: Sequence[TensorVariable],
        outputs: Any = None,
        bcast_inputs: Sequence[TensorVariable] | None = None,
        updates: Any = None,
        givens: Any = None,
        sliceable_shareds: Sequence[Any] | None = None,
        **kw: Any,
    ) -> Function:
        """Make a data-parallel function, as `pytensor.function` makes a serial one.

        Parameters
        ----------
        inputs : list of variable
            Scattered: each rank gets a part of the rows, the first axis. Unused ones are allowed.
        outputs : variable, (variable, op), or list of these, optional
            What ranks, and slices, return is reduced by the op: "avg" (the default), which weighs
            each by its rows; "uavg", which weighs them equally; "sum", "prod", "max", "min";
            "gather", which joins them on the first axis; None, for the master's own, of its last
            slice. A name may begin with ``c_``.
        bcast_inputs : list of variable, optional
            Inputs that every rank gets whole.
        updates : dict, or list of (shared, new) or (shared, new, op), optional
            New values of shared variables; each rank writes its own. The op, which may also be
            "inc" (the old value plus all differences), counts only where a call is sliced.
        givens : as of `pytensor.function`, optional
        sliceable_shareds : list of shared variable, or of (variable, shared), optional
            Shared variables whose rows are divided by slices and by `batch_s`; a pair also stands
            for a given.
        **kw
            `name`, `mode` (a name), `accept_inplace`, `rebuild_strict`, `no_default_updates`, as of
            `pytensor.function`.

        Raises
        ------
        RuntimeError
            The pool is closed.
        TypeError, ValueError
            An argument is not of these forms; an average of integers; a random generator among the
            shared variables, or one from which rows are drawn.
        """
        self.check_open()
        description, returns_list = describe(
            inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, kw
        )
        for variable in description.shared:
            self.registry.number_of(variable)
        made = Function(self, next(self._function_numbers), description, returns_list)
        self._functions[made.number] = made
        return made

    def shared(self, value: Any, name: str | None = None) -> TensorSharedVariable:
        """Make a resident shared variable: of fixed shape, in memory that all ranks see.

        Functions read and update it in place, and collectives need no copy.

        Parameters
        ----------
        value : array_like
            It fixes dtype and shape, and is the first value on all ranks.

        Raises
        ------
        RuntimeError
            The pool is closed.
        TypeError
            The dtype is not one of PyTorch's.
        """
        self.check_open()
        array = np.require(unmasked(value, name or "the value"), requirements="A")
        block, start = self.rank.residents.allocate(array.nbytes, array.dtype)
        variable = self._resident(Extent(start, array.dtype.str, array.shape, block), name)
        # The others get the master's value with the variable.
        variable.set_value(array)
        return variable

    def flat(
        self, shapes: Mapping[str, Sequence[int]], dtype: str, name: str | None = None
    ) -> FlatShared:
        """Make resident variables of given shapes, zero, that lie in one vector.

        Raises RuntimeError if the pool is closed.
        """
        self.check_open()
        layout = FlatLayout.of({key: tuple(shape) for key, shape in shapes.items()}, dtype)
        kind = np.dtype(dtype)
        block, start = self.rank.residents.allocate(layout.nbytes, kind)
        vector = self._resident(Extent(start, kind.str, (layout.size,), block), name)
        offsets = {key: start + first * kind.itemsize for key, first in layout.offsets.items()}
        views = {
            key: self._resident(Extent(offsets[key], kind.str, shape, block), key)
            for key, shape in layout.shapes
        }
        self.registry.add_parts(vector, views.values())
        return FlatShared(vector, views)

    def data(self, *args: Any, **named: Any) -> Data:
        """Make a `Data`, see `tandem.parallel.data`, which needs no pool."""
        return data(*args, **named)

    def _resident(self, extent: Extent, name: str | None) -> TensorSharedVariable:
        variable: TensorSharedVariable = self.rank.residents.variable(extent, name)
        self.registry.add_resident(variable, extent)
        return variable

    # Distribution

    def distribute(self) -> None:
        """Send the workers all functions that they do not have, and compile them on all ranks.

        Calls do it where it has not been done.

        Raises
        ------
        InputError
            An Op can't be sent, such as one of a class that ``__main__`` defines.
        RuntimeError
            The pool is closed.
        """
        self._distribute(self._idle_team(), list(self._functions.values()))

    def _distribute(self, team: Team, needed: Sequence[Function]) -> None:
        variables = [n for n in self.registry.variables if n not in self._sent_variables]
        functions = [f for f in needed if f.number not in self._sent_functions]
        if not variables and not functions:
            return
        sent = ArrayWriter(team.buffers)
        packed = tuple(
            f.description.pack(f.number, self.registry.number_of, sent.place) for f in functions
        )
        described = tuple(self._described(number, sent) for number in variables)
        sent.write()

        def compile_own() -> None:
            for function in functions:
                function.local.compile()

        dropped = self._sent_functions.difference(self._functions)
        blocks = self.rank.residents.blocks
        team.run(Define(described, packed, blocks, tuple(dropped)), compile_own)
        self._sent_variables.update(variables)
        self._sent_functions -= dropped
        self._sent_functions.update(f.number for f in functions)

    def _described(self, number: int, sent: ArrayWriter) -> SentVariable:
        """Describe a variable to the workers, and let them have the master's value."""
        variable, extent = self.registry.variables[number], self.registry.extents.get(number)
        value, place = variable.get_value(borrow=True), None
        if extent is None:
            for rank in range(self.ranks):
                self.registry.set_shape(number, rank, value.shape)
        if extent is None or not self.rank.residents.is_seen:
            place = sent.place(value)
        else:
            for rank in self._other_ranks:
                np.copyto(self.rank.residents.value(extent, rank), value)
        return SentVariable(number, variable.name, variable.type, extent, place)

    @property
    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.master_rank]

    # What functions and collectives need

    def check_open(self) -> None:
        """Raise RuntimeError unless this process and thread may use the pool now."""
        self._check_process()
        if self._team is None or not self._team.is_open:
            again = "fork() starts it again, start() one of your own"
            is_over = self._team is not None and not self._team.sees_memory
            raise RuntimeError(
                f"the pool is closed; {'its ranks have ended' if is_over else again}"
            )
        if threading.get_ident() != self._thread:
            raise RuntimeError("a pool is used by one thread, the one that has started it")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this pool is of another process, from which this one was forked: use it there"
            )

    def opened(self, function: Function | None = None) -> Team:
        """Return the workers, which have a function and all variables.

        Raises RuntimeError if the pool is closed, or in the middle of a call.
        """
        team = self._idle_team()
        is_sent = function is None or function.number in self._sent_functions
        if not is_sent or len(self._sent_variables) < len(self.registry.variables):
            self._distribute(team, [] if function is None else [function])
        return team

    def _idle_team(self) -> Team:
        self.check_open()
        assert self._team is not None
        if self._team.is_busy:
            raise RuntimeError("the pool is computing a call, within which it can't be used")
        return self._team

    def make_mode(self) -> Mode:
        """Make the mode of this process's functions."""
        return self.rank.make_mode()
