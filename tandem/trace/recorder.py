"""Records what one process does when: spans, counters, and flows between processes."""

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from tandem.trace.chrome import Event, Header, Trace, names, tids, write_trace

FLUSH_SECONDS = 5.0
CAPACITY = 1 << 18  # events
_THREADS = ("trainer", "loader", "buckets", "checkpoint")  # in the order in which they are shown
_FLUSH_SHARE = 0.005  # largest share of the time that is spent on writing

clock = time.perf_counter_ns  # CLOCK_MONOTONIC: common to the processes of a machine


class Recorder:
    """The trace of one process, written to a file at intervals and after the last step.

    The newest `capacity` events are kept. Threads may record at the same time. Steps are counted
    from 0 at the start of the process, so that a resumed run is traced as well.

    Parameters
    ----------
    process : str
        Kind and rank, such as ``trainer 0`` or ``loader 0``.
    number : int
        The process's number in the trace: 2 * rank of a trainer, 2 * rank + 1 of its loader.
    path : Path
        The file, which is replaced if it exists.
    steps : tuple of int
        The first step that is recorded, and the first thereafter that is not.
    about : Mapping
        What the run is: network, batch_size, precision, ...; values that JSON can hold.
    capacity : int
        Events that are kept.

    Attributes
    ----------
    recording : bool
        Whether calls are recorded now.
    step : int
        Number of the current step; -1 before the first.
    clock_offset_ns : int
        What to add to this process's clock for that of rank 0; 0 until it is set.
    """

    def __init__(
        self,
        process: str,
        number: int,
        path: Path,
        steps: tuple[int, int],
        about: Mapping[str, Any],
        capacity: int = CAPACITY,
    ) -> None:
        self.path = path
        self.recording = False
        self.step = -1
        self.clock_offset_ns = 0
        self._process, self._number, self._steps, self._about = process, number, steps, about
        # Number, phase, thread, name, time, end of a span or number of a flow, and arguments.
        self._events: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self._numbers = itertools.count()  # of events: next() is atomic, += is not
        self._next_flush = 0  # time, ns
        self._flushed = -1  # number of the last event in the file

    def begin_step(self) -> None:
        """Count a step; recording is on in the steps that were asked for."""
        self.step += 1
        first, end = self._steps
        recording = first <= self.step < end
        if recording and not self.recording:
            self._next_flush = clock() + int(FLUSH_SECONDS * 1e9)
        self.recording = recording

    def end_step(self) -> None:
        """Write the file if this was the last step to record, or if it is time for it."""
        is_last = self.step + 1 == self._steps[1]
        if self.recording and (is_last or clock() >= self._next_flush):
            self.recording = not is_last
            self.flush()

    def wrap(
        self,
        call: Callable[..., Any],
        name: str,
        args: Mapping[str, Any] | None = None,
        within: Callable[[], object] | None = None,
        thread: str | None = None,
    ) -> Callable[..., Any]:
        """Return a function that calls `call`, and records a span of each call while recording.

        `within` is called at the beginning of each span: `flow` belongs there. An exception ends a
        span as a return does.
        """

        @wraps(call)
        def recorded(*arguments: Any, **keywords: Any) -> Any:
            if not self.recording:
                return call(*arguments, **keywords)
            begin = clock()
            try:
                if within is not None:
                    within()
                return call(*arguments, **keywords)
            finally:
                self.add(name, begin, clock(), args, thread)

        return recorded

    def record_calls(self, owner: object, **spans: str) -> None:
        """Record calls of methods of this object, not of its class: ``method="span"``."""
        for method, span in spans.items():
            object.__setattr__(owner, method, self.wrap(getattr(owner, method), span))

    def add(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        args: Mapping[str, Any] | None = None,
        thread: str | None = None,
    ) -> None:
        """Add one complete span, by default of the current thread; times of `clock`."""
        self._add("X", name, begin_ns, end_ns, args, thread)

    def count(self, name: str, values: Mapping[str, float]) -> None:
        """Add the values that counters have now, while recording."""
        if self.recording:
            self._add("C", name, clock(), 0, values, None)

    def flow(self, number: int, begins: bool, thread: str | None = None) -> None:
        """Begin or end an arrow between two spans, each while its span is open.

        `number` identifies an arrow among those of a trainer and its loader.
        """
        if self.recording:
            self._add("s" if begins else "f", "flow", clock(), number, None, thread)

    def flush(self) -> None:
        """Write all events that are kept, whole or not at all. Raises `OSError`."""
        begin = clock()
        kept = self._events.copy()  # other threads go on adding
        try:
            header, events = self._content(kept)
            write_trace(self.path, Trace([header], events))
            self._flushed = kept[-1][0] if kept else -1
        finally:
            end = clock()
            wait = max(int(FLUSH_SECONDS * 1e9), int((end - begin) / _FLUSH_SHARE))
            self._next_flush = end + wait

    def close(self) -> None:
        """Write what has been recorded since the last flush, if anything. Raises `OSError`."""
        if self._events and self._events[-1][0] != self._flushed:
            self.flush()

    def _add(
        self,
        phase: str,
        name: str,
        time_ns: int,
        more: int,
        args: Mapping[str, Any] | None,
        thread: str | None,
    ) -> None:
        thread = thread or threading.current_thread().name
        self._events.append((next(self._numbers), phase, thread, name, time_ns, more, args))

    def _content(self, kept: deque[tuple[Any, ...]]) -> tuple[Header, list[Event]]:
        is_full = len(kept) == kept.maxlen
        dropped = max(number for number, *_ in kept) + 1 - len(kept) if is_full else 0
        rank, (first, end) = self._number // 2, self._steps
        header = Header(
            process=self._process,
            rank=rank,
            number=self._number,
            steps=self._steps,
            recorded_steps=max(0, min(self.step + 1, end) - first),
            dropped=dropped,
            clock_offset_ns=self.clock_offset_ns,
            host=socket.gethostname(),
            run=dict(self._about),
        )
        tracks = {raw: _track(raw, header.kind) for _, _, raw, *_ in kept}
        shown = sorted({*tracks.values()}, key=lambda track: (_place(track), track))
        numbers = tids(header, shown)
        events = names(header, shown)
        for _, phase, raw, name, time_ns, more, args in kept:
            event = {"ph": phase, "name": name, "ts": time_ns / 1000, "pid": self._number}
            if phase != "C":
                event["tid"] = numbers[tracks[raw]]
            if phase == "X":
                event["dur"] = (more - time_ns) / 1000
            elif phase in "sf":
                event |= {"cat": "flow", "id": (rank << 32) + more}
                event |= {"bp": "e"} if phase == "f" else {}
            if args:
                event["args"] = args
            events.append(event)
        return header, events


def _track(thread: str, kind: str) -> str:
    """Name of a thread in the trace: the main thread is that of the process's kind."""
    if thread == "MainThread":
        return kind
    name, _, number = thread.rpartition("_")  # of a ThreadPoolExecutor: checkpoint_0
    return name if name and number.isdigit() else thread


def _place(track: str) -> int:
    return _THREADS.index(track) if track in _THREADS else len(_THREADS)
