"""A worker process: it does what the master's messages ask for, one after another."""

import contextlib
import cProfile
import os
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from tandem.distributed import PeerLost
from tandem.garbage import uncollected
from tandem.memory import HostBuffer
from tandem.parallel.buffers import ReceivedBuffers
from tandem.parallel.messages import (
    Answer,
    ArrayLocation,
    Call,
    Close,
    Define,
    Fault,
    Message,
    Open,
    Publish,
    Put,
    Reduce,
    Release,
    Task,
    repeated,
)
from tandem.parallel.waiting import Waiter
from tandem.processes.messages import Finished, describe

if TYPE_CHECKING:
    from tandem.backend import Precision
    from tandem.parallel.gpu import Gpu
    from tandem.parallel.rank import Rank
    from tandem.parallel.residents import Access

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class RankSettings:
    """The first message to a rank."""

    rank: int
    ranks: int
    gpu: "Gpu | None"  # None: the CPU
    threads: int
    precision: "Precision"
    regions: bool
    spin: float  # seconds for which a rank that waits for a message stays awake
    profile: str | None = None  # file to which a profile of the worker's work is written


def serve(
    settings: RankSettings,
    access: "Access",
    results: HostBuffer,
    master: Connection,
) -> None:
    """Work until the master closes the pool or is gone."""
    try:
        work(settings, access, PipeLink(results, master, settings.spin))
    except PeerLost:
        # Another has ended. So does whoever waits for this one in turn.
        raise SystemExit(1) from None


def work(settings: RankSettings, access: "Access", link: "Link") -> None:
    """Do what comes by a link until the master closes the pool or is gone."""
    with _profiled(settings.profile):
        _Worker(settings, access, link).work()


class Link(ABC):
    """The way of a worker's tasks and answers; where the master is gone, it ends the process."""

    buffers: Any  # the arrays of the last task, by their places

    @abstractmethod
    def receive(self) -> Task:
        """Wait for a task."""

    @abstractmethod
    def send(self, answer: Answer | Fault) -> None:
        """Answer it."""

    @abstractmethod
    def stored(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the answer of a call has of its results, arrays or None."""

    def published(self, rank: "Rank", task: Publish) -> Answer:
        """Let the master have variables."""
        rank.do(task)
        return Answer()

    @abstractmethod
    def finish(self) -> None:
        """Tell the master of this worker's end."""


class PipeLink(Link):
    """A pipe to the master, with whom memory is shared."""

    def __init__(self, results: HostBuffer, master: Connection, spin: float) -> None:
        self._results, self._master = results, master
        self._waiter = Waiter([master.fileno()], spin)
        self.buffers = ReceivedBuffers()
        self._repeated: Task = Close()  # what an empty message means
        self._answered: Answer | Fault | None = None

    def receive(self) -> Task:
        self._waiter.wait()
        try:
            if not (data := self._master.recv_bytes()):
                return self._repeated
            message: Message = pickle.loads(data)
            for number in message.new:
                descriptor = reduction.recv_handle(self._master)
                os.set_inheritable(descriptor, False)
                self.buffers.add(number, HostBuffer(descriptor, "parallel"))
        except (EOFError, OSError):
            raise SystemExit(1) from None  # the master is gone
        for number in message.dropped:
            self.buffers.drop(number)
        self._repeated = message.task
        return message.task

    def send(self, answer: Answer | Fault) -> None:
        data = repeated(answer, self._answered)
        self._answered = answer
        try:
            self._master.send_bytes(data or pickle.dumps(answer))
        except OSError:
            raise SystemExit(1) from None  # the master is gone

    def stored(self, results: Sequence[Any]) -> tuple[ArrayLocation | None, ...]:
        places: list[ArrayLocation | None] = []
        end = 0
        for value in results:
            if value is None:
                places.append(None)
                continue
            places.append(ArrayLocation(0, value.dtype.str, value.shape, end))
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._results.nbytes:
            self._results.resize(end)
        for value, place in zip(results, places, strict=True):
            if value is not None and place is not None:
                self._results.array(place.shape, value.dtype, place.offset)[...] = value
        return tuple(places)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._master.send(Finished())


class _Worker:
    def __init__(self, settings: RankSettings, access: "Access", link: Link) -> None:
        self._settings, self._access, self._link = settings, access, link
        self._rank: Rank | None = None

    def work(self) -> None:
        while True:
            task = self._link.receive()
            if isinstance(task, Close):
                if self._rank is not None:
                    self._rank.residents.leave()
                self._link.finish()
                return
            try:
                answer: Answer | Fault = self._do(task)
            except PeerLost:
                raise  # of which the master is not told: nobody hears anybody
            except Exception as error:
                answer = fault_of(error)
            self._link.send(answer)

    def _do(self, task: Task) -> Answer:
        if self._rank is None:
            with uncollected():
                from tandem.parallel.rank import open_rank

                self._rank = open_rank(self._settings, self._access, self._link.buffers)
        rank = self._rank
        match task:
            case Define():
                rank.define(task)
            case Call():
                return self._call(rank, task)
            case Publish():
                return self._link.published(rank, task)
            case Put() | Reduce() | Open() | Release():
                rank.do(task)
        return Answer()

    def _call(self, rank: "Rank", task: Call) -> Answer:
        folds = rank.call(task)
        function = rank.functions[task.function]
        results = None
        if folds is not None:
            values = rank.as_arrays([None if fold.op is None else fold.value() for fold in folds])
            results = self._link.stored(values)
        # Last: from then on the master is taken to know them.
        shapes = rank.changed_shapes(function.description.updates)
        return Answer(results, shapes, function.excerpt, function.function)


def fault_of(error: Exception) -> Fault:
    """Describe an exception to the master, with the exception itself where it can be sent."""
    forms = error, _Bare(error)
    sent: Any = next((form for form in forms if _arrives_as(form, type(error))), None)
    return Fault(sent, describe(error), "".join(traceback.format_exception(error)))


class _Bare:
    """Pickles an exception so that it is made without `__init__`, which may take other arguments.

    An exception is pickled as a call of its class with `args`, the arguments of `Exception`.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_bare, (type(self._error), self._error.args, vars(self._error))


def _made_bare(kind: type[Exception], args: Sequence[Any], state: Mapping[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


def _arrives_as(form: Any, kind: type[Exception]) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(form))) is kind
    except Exception:
        return False


@contextlib.contextmanager
def _profiled(path: str | None) -> Iterator[None]:
    """Context manager: write a profile of what is done within to a file."""
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        profile.dump_stats(path)
