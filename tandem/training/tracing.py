"""The trace of a run: parts of its trainers' steps, and the work of their loaders.

A run that is not traced calls nothing of this. In one that is, methods of single objects, private
ones too, are replaced by ones that record each call. All that is recorded is listed here and
nowhere else, except single Ops (`tandem.training.op_tracing`).
"""

import contextlib
import logging
import mmap
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.memory.parameters import HostMemory
from tandem.trace.merge import trace_file
from tandem.trace.recorder import Recorder, clock

if TYPE_CHECKING:
    from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
    from tandem.distributed import Exchange, Group
    from tandem.memory import Slot
    from tandem.memory.parameters import CudaMemory
    from tandem.training.input_pipeline import Loader
    from tandem.training.run_spec import RunSpec
    from tandem.training.trainer import Trainer

log = logging.getLogger(__name__)

ROUNDS = 9  # in which ranks compare their clocks


def clock_offset_ns(group: "Group") -> int:
    """Return what to add to this process's clock for that of rank 0, in nanoseconds. Collective.

    Processes of a machine have the same clock. Those of another compare theirs as they leave a
    barrier together, several times; the result is the median, and as accurate as a barrier.
    """
    local = group.local
    if local.size == group.size:
        return 0
    differences = []
    for _ in range(ROUNDS):
        group.barrier()
        times = group.all_gather_object(clock())
        differences.append(times[0] - times[group.rank])
    first, offset = local.all_gather_object((group.rank, int(statistics.median(differences))))[0]
    return 0 if first == 0 else offset


def trace_trainer(trainer: "Trainer") -> None:
    """Record what a trainer does from now on. Collective."""
    recorder = recorder_maker(trainer.spec, trainer.rank)()
    recorder.clock_offset_ns = clock_offset_ns(trainer.group)
    _record_steps(trainer, recorder)
    _record_parts(trainer, recorder)
    _record_exchange(trainer.exchange, recorder)
    _record_loader(trainer.pipeline.loader, recorder)
    if (folder := trainer.reports.folder) is not None:
        recorder.record_calls(folder, _write="write")
    if trainer.config.trace == "ops":
        from tandem.training.op_tracing import record_ops

        record_ops(trainer.model.functions, recorder)


class TracedBuilder:
    """A builder of minibatches that records each filling, for a loader process."""

    def __init__(self, builder: "MinibatchBuilder", make_recorder: Callable[[], Recorder]) -> None:
        self._builder, self._make_recorder = builder, make_recorder
        self._place: tuple[int, int] | None = None  # epoch and minibatch of the last step

    @cached_property
    def _recorder(self) -> Recorder:
        return self._make_recorder()

    @cached_property
    def _fill(self) -> Callable[..., None]:
        return traced_fill(self._builder, self._recorder)

    def fill(self, slot: "Slot", request: "MinibatchRequest") -> None:
        """Read a minibatch, see `MinibatchBuilder.fill`. One of training is a step of the trace."""
        place = (request.epoch, request.minibatch) if request.mode == "train" else None
        if place != self._place:  # and no further pass of its step
            if self._place is not None:
                written(self._recorder.end_step, self._recorder.path)
            if place is not None:
                self._recorder.begin_step()
            self._place = place
        self._fill(slot, request)

    def close(self) -> None:
        """Close the builder, and write what has been recorded."""
        self._builder.close()
        written(self._recorder.close, self._recorder.path)


def traced_builder(builder: "MinibatchBuilder", spec: "RunSpec", rank: int) -> TracedBuilder:
    """Make the builder for the loader process of a trainer that is traced."""
    return TracedBuilder(builder, recorder_maker(spec, rank, of_loader=True))


def recorder_maker(spec: "RunSpec", rank: int, of_loader: bool = False) -> Callable[[], Recorder]:
    """Return a function that makes the recorder of a trainer or its loader, in its process."""
    first, end = spec.config.trace_steps
    return partial(
        _make_recorder,
        f"{'loader' if of_loader else 'trainer'} {rank}",
        2 * rank + of_loader,
        spec.config.weights_path / trace_file(rank, of_loader),
        (first, end),
        describe(spec),
    )


def _make_recorder(
    process: str, number: int, path: Path, steps: tuple[int, int], about: Mapping[str, Any]
) -> Recorder:
    with contextlib.suppress(OSError):  # reported when the file is written
        path.parent.mkdir(parents=True, exist_ok=True)  # missing where a rank has its own disk
    return Recorder(process, number, path, steps, about)


def describe(spec: "RunSpec") -> dict[str, Any]:
    """Return what a trace is of: the network and the settings that steps depend on."""
    names = "network batch_size threads precision convolutions optimizer exchange rule collective"
    names += " bucket_mb fully_connected trace"
    settings = {name: dict(spec.config)[name] for name in names.split()}
    network = spec.description
    if spec.config.global_batch and not spec.config.summed_rows:
        settings["batch_size"] = spec.shares[0].stop  # of each trainer its own
    return settings | {
        "sum_rows": spec.config.summed_rows,
        # A trainer whose network has averages has resolved auto, its loader has not.
        "norm_rows": spec.config.group_rows or "global",
        "network_options": dict(network.options),
        "crop_size": network.crop_size,
        "classes": network.classes,
        "width": network.width,
        "trainers": spec.trainers,
        "processor": spec.conditions["processor"],
        "devices": spec.conditions["devices"],
    }


def _record_steps(trainer: "Trainer", recorder: Recorder) -> None:
    """Record each step, with the memory that is in use after it, and write the trace."""
    make_step, close = trainer._train_step, trainer.close
    path, (first, end) = recorder.path, trainer.config.trace_steps

    def traced_step(epoch: int, step: int) -> None:
        recorder.begin_step()
        if not recorder.recording:
            return make_step(epoch, step)
        begin, number = clock(), trainer.state.step + 1
        try:
            make_step(epoch, step)
        finally:
            recorder.add("step", begin, clock(), {"epoch": epoch + 1, "step": number})
        recorder.count("memory", _memory(trainer.memory))
        if written(recorder.end_step, path) and not recorder.recording:
            trainer.reports.notice(f"{path}: the trace of steps {first} to {end - 1}")
        return None

    def traced_close() -> None:
        if recorder.step < first:
            with contextlib.suppress(OSError):  # the launcher may be gone
                trainer.reports.notice(
                    f"trace_steps is {[first, end]}, and the run ended after "
                    f"{recorder.step + 1} steps: no trace is written"
                )
        close()
        written(recorder.close, path)  # a checkpoint may have been written since the last step

    vars(trainer).update(_train_step=traced_step, close=traced_close)


def _record_parts(trainer: "Trainer", recorder: Recorder) -> None:
    """Record what a trainer does in and between its steps."""
    model, memory = trainer.model, trainer.memory

    def end_flow() -> None:
        recorder.flow(recorder.step, begins=False)

    for method, name in {"compute_gradients": "gradients", "step": "launch"}.items():
        vars(model)[method] = recorder.wrap(getattr(model, method), name, within=end_flow)
    recorder.record_calls(
        trainer,
        _report_training="report",
        _check_equal="check",
        _validate="validate",
        _save="save",
    )
    recorder.record_calls(model, update="update", validate="evaluate", validate_crop="evaluate")
    recorder.record_calls(trainer.pipeline, _request_next="request")
    recorder.record_calls(trainer.agreement, vote="vote")
    recorder.record_calls(trainer.reports, progress="progress")
    if memory.records:  # the GPU computes meanwhile
        recorder.record_calls(model, is_finite="synchronize")
        recorder.record_calls(memory, wait="synchronize")
    if trainer.ahead is not None:
        recorder.record_calls(trainer.ahead, complete="complete")
    if trainer.channel is not None:
        recorder.record_calls(trainer.channel, all_gather="conversion", all_to_all="conversion")


def _record_exchange(exchange: "Exchange", recorder: Recorder) -> None:
    """Record the methods that an exchange overrides; the others do nothing."""
    from tandem.distributed import Exchange
    from tandem.distributed.buckets import BucketedGradients

    spans = {"before_gradients": "begin exchange", "before_update": "exchange"}
    spans |= {"after_gradients": "exchange", "after_update": "exchange"}
    for method, name in spans.items():
        if getattr(type(exchange), method) is not getattr(Exchange, method):
            recorder.record_calls(exchange, **{method: name})
    if isinstance(exchange, BucketedGradients):
        for number, work in enumerate(exchange.work):
            args = {"bucket": number, "bytes": work.part.nbytes, "parameters": sorted(work.names)}
            average = recorder.wrap(work.average, "average", args)
            exchange.work[number] = replace(work, average=average)


def _record_loader(loader: "Loader", recorder: Recorder) -> None:
    """Record how long a trainer waits and, if it has no loader process, how long it fills."""
    from tandem.training.input_pipeline import InProcessLoader, OrderedLoader

    recorder.record_calls(loader, wait="wait")
    if isinstance(loader, OrderedLoader):
        loader = loader.loader
    if isinstance(loader, InProcessLoader):
        builder = loader.builder
        vars(builder)["fill"] = traced_fill(builder, recorder, "loader")


def traced_fill(
    builder: "MinibatchBuilder", recorder: Recorder, thread: str | None = None
) -> Callable[..., None]:
    """Return `builder.fill` as it is recorded, with an arrow to the step that uses a minibatch."""

    def begin_flow() -> None:
        recorder.flow(recorder.step, begins=True, thread=thread)

    for_steps = recorder.wrap(builder.fill, "fill", within=begin_flow, thread=thread)
    others = recorder.wrap(builder.fill, "fill", thread=thread)

    def fill(slot: "Slot", request: "MinibatchRequest") -> None:
        (for_steps if request.mode == "train" else others)(slot, request)

    return fill


def written(write: Callable[[], None], path: Path) -> bool:
    """Write a trace; return whether that succeeded. A failure is logged, and the run goes on."""
    try:
        write()
    except OSError as error:
        log.warning("%s: the trace cannot be written: %s", path, error.strerror)
        return False
    return True


def _memory(memory: "HostMemory | CudaMemory") -> Mapping[str, int]:
    """Bytes that this process has in memory, shared ones too, and that are free on its GPU."""
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):  # it is Linux's
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["resident"] = pages * mmap.PAGESIZE
    if not isinstance(memory, HostMemory):
        found["free on the GPU"] = memory.driver.free_memory()
    return found
