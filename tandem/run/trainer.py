"""A trainer process: gradients, exchange, update, validation, checkpoints.

Importing this module is cheap; PyTensor and PyTorch are imported when a trainer starts to work.
"""

import importlib
import logging
import os
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tandem.data.augment import Mode
from tandem.data.fill import FillRequest
from tandem.data.order import epoch_order, global_minibatch, minibatch_count, trainer_rows
from tandem.errors import InputError
from tandem.exchange import AverageGradients, AverageParameters, Exchange, Meeting, PeerLost
from tandem.memory import HostBuffer, Slot, SlotLayout
from tandem.run.checkpoint import (
    Checkpoint,
    NetworkDescription,
    RunState,
    initial_weights,
    read_checkpoint,
    write_checkpoint,
)
from tandem.run.feed import Feed, InProcessLoader, LoaderError, ProcessLoader
from tandem.run.messages import CheckpointWritten, Failed, Finished, Progress, Ready, Remark, Stop
from tandem.run.plan import Plan, read_mean
from tandem.run.process import describe, settle
from tandem.run.record import TrainRecord, ValidationRecord
from tandem.run.schedules import learning_rate

if TYPE_CHECKING:
    from tandem.run.model import Model, Sums

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """What a trainer process is given when it starts.

    Attributes
    ----------
    plan : Plan
        The run.
    rank : int
        Which trainer this is, from 0.
    meeting : Meeting
        Where it meets the others.
    loader : Connection or None
        To its loader process; None where the trainer loads by itself.
    slots : SlotLayout
        Of the two slots.
    slot_buffers : tuple of two HostBuffer
        Where the loader puts minibatches.
    parameters, gradients : tuple of HostBuffer
        Every trainer's flat vectors, by rank. Each trainer sizes its own.
    """

    plan: Plan
    rank: int
    meeting: Meeting
    loader: Connection | None
    slots: SlotLayout
    slot_buffers: tuple[HostBuffer, HostBuffer]
    parameters: tuple[HostBuffer, ...]
    gradients: tuple[HostBuffer, ...]


class StopAgreed(Exception):
    """All trainers have agreed to stop after the step that they have just made."""


class LauncherLost(Exception):
    """The launcher has ended; so must this trainer."""


def serve(seat: Seat, launcher: Connection) -> None:
    """Work as a trainer; the target of the process. Exits non-zero when it fails.

    Parameters
    ----------
    seat : Seat
        What this trainer is given.
    launcher : Connection
        Reports go there, and a request to stop comes from there.
    """
    settle()
    os.environ["OMP_NUM_THREADS"] = str(seat.plan.threads)
    try:
        _work(seat, launcher)
        launcher.send(Finished(seat.rank))
    except (LauncherLost, BrokenPipeError):
        raise SystemExit(1) from None
    except BaseException as error:
        _report_failure(seat, launcher, error)
        raise SystemExit(1) from None


def _work(seat: Seat, launcher: Connection) -> None:
    """Do the plan's job, to its end or until all trainers agree to stop."""
    trainer = Trainer(seat, launcher)
    try:
        trainer.validate_only() if seat.plan.job == "validate" else trainer.train()
    except StopAgreed:
        return
    finally:
        trainer.close()


def _report_failure(seat: Seat, launcher: Connection, error: BaseException) -> None:
    kind: Literal["input", "fault", "consequence"] = "fault"
    if isinstance(error, InputError):
        kind = "input"
    elif isinstance(error, PeerLost | LoaderError):
        kind = "consequence"
    text = traceback.format_exc()
    try:
        launcher.send(Failed(f"trainer {seat.rank}", kind, describe(error), text))
    except OSError:
        log.exception("trainer %d failed and could not tell the launcher", seat.rank)


def requests(plan: Plan, rank: int, begin: RunState) -> Iterator[FillRequest]:
    """Every minibatch of the rest of a run, the rows of each that are one trainer's, in order.

    Parameters
    ----------
    plan : Plan
        The run.
    rank : int
        Which trainer, from 0.
    begin : RunState
        Where the run begins.

    Yields
    ------
    FillRequest
        For the two slots in turn. A request may be for no pictures, when a last minibatch has
        too few for all trainers.
    """
    config, number = plan.config, 0
    for epoch in range(begin.epoch, config.n_epochs) if plan.job == "train" else range(1):
        parts: list[tuple[Mode, np.ndarray, int]] = []
        if plan.job == "train":
            order = epoch_order(plan.train.counts, config.shuffle, config.seed, epoch)
            first = begin.step_in_epoch if epoch == begin.epoch else 0
            parts.append(("train", order, first))
        parts.append(("validation", np.arange(plan.validation.size), 0))
        for mode, order, first in parts:
            for k in range(first, minibatch_count(len(order), plan.global_batch)):
                rows = global_minibatch(order, k, plan.global_batch)
                mine = trainer_rows(rows, rank, config.batch_size)
                yield FillRequest(number % 2, mode, epoch, k, mine)
                number += 1


@dataclass
class Clock:
    """Seconds of one trainer since they were last taken."""

    compute: float = 0.0
    load_wait: float = 0.0
    exchange: float = 0.0
    steps: float = 0.0  # whole training steps, the others included


class Trainer:
    """One trainer: its model, its loader, its place among the others.

    Parameters
    ----------
    seat : Seat
        What the launcher gave it.
    launcher : Connection
        To the launcher.
    """

    def __init__(self, seat: Seat, launcher: Connection) -> None:
        self.launcher = launcher
        self.seat, self.plan, self.config = seat, seat.plan, seat.plan.config
        self.rank, self.trainers = seat.rank, seat.plan.trainers
        self.network = self._build_network()
        self.model, self._vector = self._build_model()
        self.state = self._load_weights()
        self.exchange = self._build_exchange()
        self.slots = [Slot.on(buffer, seat.slots) for buffer in seat.slot_buffers]
        self.feed = Feed(requests(self.plan, self.rank, self.state), self._connect_loader())
        self._clock = Clock()
        self._check_equal()
        launcher.send(Ready(seat.rank))

    # What a trainer is made of

    def _build_network(self) -> Any:
        module, _, name = self.plan.network.partition(":")
        network = getattr(importlib.import_module(module), name)
        try:
            return network(
                crop_size=self.config.crop_size,
                classes=self.plan.classes,
                width=self.config.width,
                dtype=self.config.precision,
            )
        except ValueError as error:
            raise InputError(f"crop_size, width: {error}") from error

    def _build_model(self) -> tuple["Model", np.ndarray]:
        from tandem.device import keep_freed_memory, set_threads
        from tandem.run.model import Model, layout_of

        set_threads(self.plan.threads)
        keep_freed_memory()
        layout = layout_of(self.network)
        own = self.seat.parameters[self.rank], self.seat.gradients[self.rank]
        for buffer, vectors in zip(own, (2, 1), strict=True):
            buffer.resize(vectors * layout.nbytes)
        # The others may map these buffers only once they have their size.
        self.seat.meeting.meet()
        parameters = own[0].array((2 * layout.size,), layout.dtype)
        model = Model(
            self.network,
            self.config,
            read_mean(self.config.mean_path, self.plan.train.image_size),
            parameters,
            own[1].array((layout.size,), layout.dtype),
            device=self.plan.devices[self.rank],
            compile=bool(self.config.compile),
            device_crops=self.plan.device_crops,
        )
        return model, parameters

    def _build_exchange(self) -> Exchange:
        if self.config.exchange == "gradients":
            return AverageGradients(self.seat.meeting, self._vectors(self.seat.gradients))
        return AverageParameters(self.seat.meeting, self._vectors(self.seat.parameters))

    def _vectors(self, buffers: Sequence[HostBuffer]) -> list[np.ndarray]:
        dtype = np.dtype(self.config.precision)
        return [buffer.array((buffer.nbytes // dtype.itemsize,), dtype) for buffer in buffers]

    def _load_weights(self) -> RunState:
        path, config = self.plan.weights, self.config
        shapes = {name: v.type.shape for name, v in self.network.parameters.items()}
        begin = RunState(global_batch=self.plan.global_batch, train_pictures=self.plan.train.size)
        if path is not None and (self.plan.job == "validate" or config.resume_train):
            checkpoint = read_checkpoint(path, shapes)
            self.model.load(checkpoint.weights, checkpoint.momentum or {})
            return replace(
                checkpoint.state,
                global_batch=begin.global_batch,
                train_pictures=begin.train_pictures,
            )
        for name, value in self.network.initial_values(config.seed):
            self.model.load({name: value}, {})
        if path is not None:
            weights, afresh = initial_weights(path, shapes)
            self.model.load(weights, {})
            if afresh and self.rank == 0:
                names = ", ".join(afresh)
                self.launcher.send(Remark(f"{path}: of another shape, begin afresh: {names}"))
        return begin

    def _connect_loader(self) -> ProcessLoader | InProcessLoader:
        if self.seat.loader is not None:
            return ProcessLoader(self.seat.loader)
        return InProcessLoader(self.plan.filler(), self.slots)

    def close(self) -> None:
        """Let the loader go."""
        self.feed.close()

    # What it does

    def train(self) -> None:
        """Train until ``n_epochs`` are done, from where the state says.

        Raises
        ------
        StopAgreed
            The launcher has asked for it; a checkpoint has been written.
        """
        steps = minibatch_count(self.plan.train.size, self.plan.global_batch)
        for epoch in range(self.state.epoch, self.config.n_epochs):
            for step in range(self.state.step_in_epoch, steps):
                self._train_step(epoch, step, steps)
                self._stop_if_asked()
            self._finish_epoch(epoch, self._validate(epoch))

    def validate_only(self) -> None:
        """Validate the loaded weights, and report."""
        record = self._validate(self.state.epoch - 1)
        if self.rank == 0:
            self.launcher.send(record)

    def _train_step(self, epoch: int, step: int, steps: int) -> None:
        begun = time.perf_counter()
        slot = self.slots[next(self.feed)]
        self._clock.load_wait += self.feed.take_wait_seconds()
        shares = self._shares(step)
        history = self.state.validation_errors
        rate = learning_rate(self.config, epoch, step, steps, history)
        clock, marks = self._clock, [time.perf_counter()]
        self.model.compute_gradients(slot, epoch)
        marks.append(time.perf_counter())
        self.exchange.before_update(shares)
        marks.append(time.perf_counter())
        self.model.update(rate)
        marks.append(time.perf_counter())
        self.exchange.after_update(shares)
        marks.append(time.perf_counter())
        clock.compute += marks[1] - marks[0] + marks[3] - marks[2]
        clock.exchange += marks[2] - marks[1] + marks[4] - marks[3]
        self.state = replace(self.state, step_in_epoch=step + 1, step=self.state.step + 1)
        every = self.config.check_every
        if every and self.state.step % every == 0:
            self._check_equal()
        clock.steps += time.perf_counter() - begun
        if self.state.step % self.config.print_freq == 0:
            self._report_training(epoch, rate)
        self._report_progress("train", epoch, step + 1, steps)

    def _validate(self, epoch: int) -> ValidationRecord:
        self.model.take_sums("validation")
        steps = minibatch_count(self.plan.validation.size, self.plan.global_batch)
        for step in range(steps):
            self.model.validate(self.slots[next(self.feed)])
            self._report_progress("validation", epoch, step + 1, steps)
            if self.plan.job == "train":
                self._stop_if_asked()
        self.feed.take_wait_seconds()
        sums = self._gather_sums("validation")
        return ValidationRecord(
            epoch=epoch + 1,
            step=self.state.step,
            loss=sums.loss / sums.images,
            top1_error=sums.top1_errors / sums.images,
            top5_error=sums.top5_errors / sums.images,
            images=sums.images,
        )

    def _finish_epoch(self, epoch: int, record: ValidationRecord) -> None:
        history = (*self.state.validation_errors, record.top1_error)
        self.state = replace(
            self.state, epoch=epoch + 1, step_in_epoch=0, validation_errors=history
        )
        done = epoch + 1
        if self.rank == 0:
            self.launcher.send(record)
        if done % self.config.snapshot_freq == 0 or done == self.config.n_epochs:
            self._write_checkpoint()

    # What the trainers do together

    def _shares(self, step: int) -> Sequence[float]:
        """Each trainer's part of the pictures of global minibatch `step`."""
        batch = self.config.batch_size
        rows = min(self.plan.train.size - step * self.plan.global_batch, self.plan.global_batch)
        counts = [min(max(rows - r * batch, 0), batch) for r in range(self.trainers)]
        return [count / rows for count in counts]

    def _gather_sums(self, mode: Mode) -> "Sums":
        first, *others = self.seat.meeting.gather(self.model.take_sums(mode))
        for sums in others:
            first = first + sums
        return first

    def _check_equal(self) -> None:
        """Refuse to go on when the parameters of two trainers differ in a bit."""
        sums = self.seat.meeting.gather(zlib.crc32(self._vector.data))
        if len(set(sums)) > 1:
            raise RuntimeError(
                f"the parameters of the trainers differ after step {self.state.step}: "
                f"checksums by rank {[f'{s:08x}' for s in sums]}"
            )

    def _stop_if_asked(self) -> None:
        """Stop with the others, after a checkpoint, when the launcher has asked any of them."""
        asked = False
        try:
            while self.launcher.poll():
                asked |= isinstance(self.launcher.recv(), Stop)
        except (EOFError, OSError):
            raise LauncherLost from None
        if any(self.seat.meeting.gather(asked)):
            self._write_checkpoint()
            raise StopAgreed

    # What it reports

    def _report_training(self, epoch: int, rate: float) -> None:
        sums, clock = self._gather_sums("train"), self._clock
        self._clock = Clock()
        record = TrainRecord(
            epoch=epoch + 1,
            step=self.state.step,
            loss=sums.loss / sums.images,
            top1_error=sums.top1_errors / sums.images if self.config.print_train_error else None,
            learning_rate=rate,
            images_per_second=sums.images / clock.steps,
            compute_seconds=clock.compute,
            load_wait_seconds=clock.load_wait,
            exchange_seconds=clock.exchange,
        )
        if self.rank == 0:
            self.launcher.send(record)

    def _report_progress(
        self, mode: Literal["train", "validation"], epoch: int, step: int, steps: int
    ) -> None:
        if self.rank == 0:
            self.launcher.send(Progress(mode, epoch + 1, step, steps))

    def _write_checkpoint(self) -> None:
        """Trainer 0 writes; the others can't overtake it, since the next exchange waits for it."""
        if self.rank != 0:
            return
        arrays = (self.model.weights, self.model.momenta)
        weights, momentum = (
            {name: variable.get_value(borrow=True) for name, variable in variables.items()}
            for variables in arrays
        )
        config = self.config
        network = NetworkDescription(
            config.crop_size, self.plan.classes, config.width, self.plan.wnids
        )
        path = write_checkpoint(
            config.weights_dir,
            Checkpoint(weights, momentum, network, self.state, config.model_dump(mode="json")),
        )
        self.launcher.send(CheckpointWritten(str(path)))
