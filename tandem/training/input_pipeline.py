"""Double buffering: the next minibatch is loaded while the trainer uses one."""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from tandem.artifacts.checkpoint import RunState
from tandem.data.augment import Mode
from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.data.order import epoch_order, global_minibatch
from tandem.processes.messages import Stop
from tandem.training.messages import MinibatchReady
from tandem.training.run_spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tandem.memory import HostSlots
    from tandem.memory.cuda import CudaSlot, SlotUploader, Stream

_END_SECONDS = 5.0  # for a loader to finish what it is doing
_LOOK_SECONDS = 1.0  # the longest that a single look into the pipe may take


class LoaderError(Exception):
    """The loader process has ended: a consequence of a failure that it reports itself."""


class Loader(ABC):
    """Fills slots on request, one after another."""

    @abstractmethod
    def request(self, request: MinibatchRequest) -> None:
        """Request that a slot be filled. Returns at once."""

    @abstractmethod
    def wait(self) -> int:
        """Wait until the oldest request has been carried out; return the number of its slot.

        Raises LoaderError if the loader has ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the loader. May be called twice."""


class ProcessLoader(Loader):
    """A loader process; its end of the pipe must be open there alone, so that its death shows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def request(self, request: MinibatchRequest) -> None:
        try:
            self._connection.send(request)
        except OSError:
            raise LoaderError("its loader has ended") from None

    def wait(self) -> int:
        # Reading a file may take any time: only the loader's end ends the wait.
        try:
            while not self._connection.poll(_LOOK_SECONDS):
                pass
            message = self._connection.recv()
        except (EOFError, OSError):
            raise LoaderError("its loader has ended") from None
        if not isinstance(message, MinibatchReady):
            raise TypeError(f"a loader sent {type(message).__name__}, expected MinibatchReady")
        return message.slot

    def close(self) -> None:
        if self._connection.closed:
            return
        with contextlib.suppress(OSError, EOFError):
            self._connection.send(Stop())
            # It must release what it has opened before its trainer does.
            while self._connection.poll(_END_SECONDS):
                self._connection.recv()
        self._connection.close()


class InProcessLoader(Loader):
    """A loader in the trainer itself, for `para_load: false`: `wait` fills the slot.

    Exceptions are those of `MinibatchBuilder.fill`.
    """

    def __init__(self, builder: MinibatchBuilder, slots: "HostSlots | SlotUploader") -> None:
        self.builder, self._slots = builder, slots
        self._requests: deque[MinibatchRequest] = deque()

    def request(self, request: MinibatchRequest) -> None:
        self._requests.append(request)

    def wait(self) -> int:
        request = self._requests.popleft()
        self._slots.fill(request.slot, lambda slot: self.builder.fill(slot, request))
        return request.slot

    def close(self) -> None:
        self.builder.close()
        self._slots.close()


class OrderedLoader(Loader):
    """A loader of slots on a GPU, ordered with the trainer's work on them, on its stream."""

    def __init__(self, loader: Loader, slots: "Sequence[CudaSlot]", stream: "Stream") -> None:
        self.loader, self._slots, self._stream = loader, slots, stream

    def request(self, request: MinibatchRequest) -> None:
        # The slot is filled after all work on it so far.
        self._slots[request.slot].end_reading(self._stream)
        self.loader.request(request)

    def wait(self) -> int:
        slot = self.loader.wait()
        # Later work on the slot comes after the copy into it.
        self._slots[slot].begin_reading(self._stream)
        return slot

    def close(self) -> None:
        self._stream.synchronize()
        self.loader.close()


class InputPipeline(Iterator[int]):
    """Filled slots, one after another, while the loader works one ahead.

    ``next(pipeline)`` returns the number of a slot that holds the next minibatch, having requested
    the one after it, or raises LoaderError. The slot is the consumer's until it takes the next; on
    a device its work on the slot must have completed by then, since the slot is filled again
    thereafter. The first minibatch is requested at once, so that it loads while graphs are
    compiled. Requests are for two slots in turn. The pipeline closes the loader.
    """

    def __init__(self, requests: Iterable[MinibatchRequest], loader: Loader) -> None:
        self._requests, self.loader = iter(requests), loader
        self._pending: MinibatchRequest | None = None
        self.indices = np.empty(0, np.int64)  # in the dataset, of the minibatch returned last
        self._request_next()

    def __next__(self) -> int:
        if self._pending is None:
            raise StopIteration
        slot = self.loader.wait()
        if slot != self._pending.slot:
            raise RuntimeError(f"the loader filled slot {slot}, expected {self._pending.slot}")
        self.indices = self._pending.indices
        self._request_next()
        if self._pending is not None and self._pending.slot == slot:
            raise ValueError(f"two requests in a row are for slot {slot}, which is in use")
        return slot

    def close(self) -> None:
        """Stop the loader."""
        self.loader.close()

    def _request_next(self) -> None:
        self._pending = next(self._requests, None)
        if self._pending is not None:
            self.loader.request(self._pending)


def minibatch_requests(spec: RunSpec, rank: int, begin: RunState) -> Iterator[MinibatchRequest]:
    """Every minibatch of a run from `begin`, with one trainer's rows of each, in order.

    A request may be for no pictures, when a last minibatch has too few for all trainers. There is
    none for a minibatch that is passed over, and one for each pass and each of ten crops.
    """
    config, number = spec.config, 0
    crops = (None,) if spec.crops == 1 else range(spec.crops)
    for epoch in range(begin.epoch, config.n_epochs) if spec.job == "train" else range(1):
        parts: list[tuple[Mode, np.ndarray, int]] = []
        if spec.job == "train":
            order = epoch_order(spec.train.counts, config.shuffle, config.seed, epoch)
            first = begin.step_in_epoch if epoch == begin.epoch else 0
            parts.append(("train", order, first))
        parts.append(("validation", np.arange(spec.validation.size), 0))
        for mode, order, first in parts:
            for k in range(first, spec.steps(mode, epoch)):
                if mode == "train" and (epoch, k) in begin.skipped:
                    continue
                rows = global_minibatch(order, k, spec.global_batch)
                for own in spec.passes(len(rows), rank):
                    for crop in crops:
                        yield MinibatchRequest(number % 2, mode, epoch, k, rows[own], crop)
                        number += 1
