"""The trainer's side of double buffering: the next minibatch is loaded while one is in use."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.memory import Slot
from tandem.processes.messages import Stop
from tandem.training.messages import MinibatchReady

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tandem.memory.cuda import CudaSlot, Stream

_END_SECONDS = 5.0  # for a loader to finish what it is doing
_LOOK_SECONDS = 1.0  # the longest that a single look into the pipe may take


class LoaderError(Exception):
    """The loader process has ended: a consequence, whose cause the launcher hears from it."""


class Loader(Protocol):
    """What fills slots when asked, one request after another."""

    def request(self, request: MinibatchRequest) -> None:
        """Ask for a slot to be filled. Returns at once."""
        ...

    def wait(self) -> int:
        """Wait until the oldest request has been carried out; return the number of its slot."""
        ...

    def close(self) -> None:
        """Let the loader go. May be called twice."""
        ...


class ProcessLoader:
    """A loader process, as its trainer sees it.

    Parameters
    ----------
    connection : Connection
        To the loader. The other end must be open in the loader alone, so that its death shows.

    Raises
    ------
    LoaderError
        From `request` and `wait`: the loader has ended.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def request(self, request: MinibatchRequest) -> None:
        """Ask for a slot to be filled. Returns at once."""
        try:
            self._connection.send(request)
        except OSError:
            raise LoaderError("its loader has ended") from None

    def wait(self) -> int:
        """Wait until the oldest request has been carried out; return the number of its slot.

        Reading a file may take any time, so no time is too long; the loader's end ends the wait.
        """
        while not self._connection.poll(_LOOK_SECONDS):
            pass
        return self._receive()

    def close(self) -> None:
        """Tell the loader to stop, and wait for its end as long as it should take."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError, EOFError):
            self._connection.send(Stop())
            # What it has opened it gives up before its trainer does.
            while self._connection.poll(_END_SECONDS):
                self._connection.recv()
        self._connection.close()

    def _receive(self) -> int:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise LoaderError("its loader has ended") from None
        if not isinstance(message, MinibatchReady):
            raise TypeError(f"a loader sent {type(message).__name__}, expected MinibatchReady")
        return message.slot


class SlotArea(Protocol):
    """Slots, as whoever fills them sees them."""

    def fill(self, number: int, fill: Callable[[Slot], None]) -> None:
        """Have a slot filled by a function that is given one on the host."""
        ...

    def close(self) -> None:
        """Give the slots up."""
        ...


class InProcessLoader:
    """A loader in the trainer itself, for `para_load: false`: a slot is filled when waited for.

    Exceptions are those of `MinibatchBuilder.fill`, as they are.

    Parameters
    ----------
    filler : MinibatchBuilder
        What a minibatch is made by.
    slots : SlotArea
        Where it goes.
    """

    def __init__(self, filler: MinibatchBuilder, slots: SlotArea) -> None:
        self._filler, self._slots = filler, slots
        self._requests: deque[MinibatchRequest] = deque()

    def request(self, request: MinibatchRequest) -> None:
        """Note that a slot is to be filled."""
        self._requests.append(request)

    def wait(self) -> int:
        """Fill the slot of the oldest request and return its number."""
        request = self._requests.popleft()
        self._slots.fill(request.slot, lambda slot: self._filler.fill(slot, request))
        return request.slot

    def close(self) -> None:
        """Close the batch files, and give the slots up."""
        self._filler.close()
        self._slots.close()


class OrderedLoader:
    """A loader of slots on a GPU, in order with the trainer's work on them.

    Parameters
    ----------
    loader : Loader
        Fills the slots.
    slots : sequence of CudaSlot
        By number.
    stream : Stream
        On which the trainer works.
    """

    def __init__(self, loader: Loader, slots: "Sequence[CudaSlot]", stream: "Stream") -> None:
        self._loader, self._slots, self._stream = loader, slots, stream

    def request(self, request: MinibatchRequest) -> None:
        """Ask for a slot to be filled, after all work on it so far. Returns at once."""
        self._slots[request.slot].end_reading(self._stream)
        self._loader.request(request)

    def wait(self) -> int:
        """Wait for the oldest request; later work on the slot comes after the copy into it."""
        slot = self._loader.wait()
        self._slots[slot].begin_reading(self._stream)
        return slot

    def close(self) -> None:
        """Finish the work on the slots, then let the loader go."""
        self._stream.synchronize()
        self._loader.close()


class InputPipeline(Iterator[int]):
    """MinibatchReady slots, one after another, while the loader works one ahead.

    ``next(feed)`` gives the number of a slot that holds the next minibatch, having asked the loader
    for the one after it. The slot is the consumer's until it asks for the next; on a device its
    work on the slot must have completed by then, since the slot is filled again thereafter. The
    first minibatch is asked for when the feed is made, so that it loads while graphs are compiled.

    Parameters
    ----------
    requests : iterable of MinibatchRequest
        What is wanted, in order, in slots by turns. Taken one ahead of what is given out.
    loader : Loader
        What fills the slots. It is the feed's to close.

    Attributes
    ----------
    indices : int64 (n,)
        Dataset indices of the minibatch that was given out last.
    load_wait_seconds : float
        How long the consumer has waited for the loader since `take_wait_seconds`.
    """

    def __init__(self, requests: Iterable[MinibatchRequest], loader: Loader) -> None:
        self._requests, self._loader = iter(requests), loader
        self._asked: MinibatchRequest | None = None
        self.indices: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.load_wait_seconds = 0.0
        self._ask()

    def __next__(self) -> int:
        """The number of the next filled slot.

        Raises
        ------
        StopIteration
            All requests have been given out.
        LoaderError
            The loader has failed or ended.
        """
        if self._asked is None:
            raise StopIteration
        slot = self._wait()
        if slot != self._asked.slot:
            raise RuntimeError(f"the loader filled slot {slot}, expected {self._asked.slot}")
        self.indices = self._asked.indices
        self._ask()
        if self._asked is not None and self._asked.slot == slot:
            raise ValueError(f"two requests in a row are for slot {slot}, which is in use")
        return slot

    def take_wait_seconds(self) -> float:
        """Give `load_wait_seconds` and set it to zero."""
        seconds, self.load_wait_seconds = self.load_wait_seconds, 0.0
        return seconds

    def close(self) -> None:
        """Let the loader go."""
        self._loader.close()

    def _wait(self) -> int:
        start = time.perf_counter()
        try:
            return self._loader.wait()
        finally:
            self.load_wait_seconds += time.perf_counter() - start

    def _ask(self) -> None:
        self._asked = next(self._requests, None)
        if self._asked is not None:
            self._loader.request(self._asked)
