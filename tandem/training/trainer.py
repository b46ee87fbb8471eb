"""A trainer process: gradients, exchange, update, validation, checkpoints.

Importing this module is cheap; PyTensor and PyTorch are imported when a trainer starts to work.
"""

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np

from tandem.artifacts.checkpoint import (
    Checkpoint,
    RunState,
    initial_weights,
    read_checkpoint,
)
from tandem.artifacts.metrics import MetricSums, Pending, Seconds
from tandem.artifacts.metrics_log import NotFiniteRecord, Record, TrainRecord, ValidationRecord
from tandem.artifacts.run_folder import RunFolder
from tandem.artifacts.run_lock import FolderLock
from tandem.data.augment import Mode
from tandem.data.manifest import read_manifest
from tandem.data.mean_image import read_mean
from tandem.data.minibatch import MinibatchRequest
from tandem.data.order import epoch_order, global_minibatch, minibatch_count, trainer_rows
from tandem.distributed import ExchangeSettings, Group, PeerLost, make_exchange
from tandem.errors import InputError
from tandem.layers.network import build_network
from tandem.memory import HostSlots
from tandem.memory.cuda import CudaSlots
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.optim import OPTIMIZERS
from tandem.optim.parameter_groups import check_layers, learned_rates
from tandem.processes.child import describe
from tandem.processes.heartbeat import Activity, StatusSlot
from tandem.training.input_pipeline import InputPipeline, LoaderError
from tandem.training.learning_rate import learning_rate
from tandem.training.memory import open_loader, open_memory
from tandem.training.messages import (
    CheckpointBegun,
    CheckpointWritten,
    Diverged,
    Failed,
    Finished,
    Notice,
    Progress,
    Ready,
    StepVote,
    Stop,
)
from tandem.training.run_spec import RunSpec
from tandem.training.sample_predictions import SamplePredictions

if TYPE_CHECKING:
    from tandem.training.compiled_network import CompiledNetwork

log = logging.getLogger(__name__)

MOST_SKIPS = 10  # minibatches in a row


@dataclass(frozen=True)
class WorkerArguments:
    """What a trainer process is given when it starts.

    Attributes
    ----------
    rank : int
        Which trainer this is, from 0.
    group : Group
        All trainers.
    loader : Connection or None
        To its loader process; None where the trainer loads by itself.
    slots : HostSlots or CudaSlots
        What its loader fills.
    sign : StatusSlot
        Where it shows what it is doing.
    lock : FolderLock or None
        On the run folder, which stays locked as long as a trainer is there.
    """

    rank: int
    group: Group
    loader: Connection | None
    slots: HostSlots | CudaSlots
    sign: StatusSlot
    lock: FolderLock | None = None


class NotFinite(Exception):
    """The trainers have agreed that a loss or a gradient is not finite, and that the run ends.

    Parameters
    ----------
    message : str
        For the user.
    epoch, minibatch : int
        Where, both from 0.
    """

    def __init__(self, message: str, epoch: int, minibatch: int) -> None:
        super().__init__(message)
        self.epoch, self.minibatch = epoch, minibatch


class StopAgreed(Exception):
    """All trainers have agreed to stop after the step that they have just made."""


class LauncherLost(Exception):
    """The launcher has ended; so must this trainer."""


def serve(spec: RunSpec, arguments: WorkerArguments, launcher: Connection) -> None:
    """Work as a trainer; the target of the process. Exits non-zero when it fails.

    Parameters
    ----------
    spec : RunSpec
        The run.
    arguments : WorkerArguments
        What this trainer is given.
    launcher : Connection
        Reports go there, and a request to stop comes from there.
    """
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    try:
        _work(spec, arguments, launcher)
        launcher.send(Finished(arguments.rank))
    except (LauncherLost, BrokenPipeError):
        raise SystemExit(1) from None
    except BaseException as error:
        _report_failure(arguments, launcher, error)
        raise SystemExit(1) from None


def _work(spec: RunSpec, arguments: WorkerArguments, launcher: Connection) -> None:
    """Do the spec's job, to its end or until all trainers agree to stop, or that it has failed."""
    trainer = Trainer(spec, arguments, launcher)
    try:
        with contextlib.suppress(StopAgreed):
            trainer.validate_only() if spec.job == "validate" else trainer.train()
        trainer.finish()
    except NotFinite:
        trainer.finish()  # for all have agreed on it
        raise
    finally:
        trainer.close()


def _report_failure(arguments: WorkerArguments, launcher: Connection, error: BaseException) -> None:
    who, text = f"trainer {arguments.rank}", traceback.format_exc()
    if isinstance(error, NotFinite):
        failed: Failed = Diverged(who, "diverged", str(error), "", error.epoch, error.minibatch)
    elif isinstance(error, InputError):
        failed = Failed(who, "input", describe(error), text)
    elif isinstance(error, PeerLost | LoaderError):
        failed = Failed(who, "consequence", describe(error), text)
    else:
        failed = Failed(who, "fault", describe(error), text)
    try:
        launcher.send(failed)
    except OSError:
        log.exception("trainer %d failed and could not tell the launcher", arguments.rank)


def requests(spec: RunSpec, rank: int, begin: RunState) -> Iterator[MinibatchRequest]:
    """Every minibatch of the rest of a run, the rows of each that are one trainer's, in order.

    Parameters
    ----------
    spec : RunSpec
        The run.
    rank : int
        Which trainer, from 0.
    begin : RunState
        Where the run begins.

    Yields
    ------
    MinibatchRequest
        For the two slots in turn. A request may be for no pictures, when a last minibatch has
        too few for all trainers. There is none for a minibatch that is passed over.
    """
    config, number = spec.config, 0
    for epoch in range(begin.epoch, config.n_epochs) if spec.job == "train" else range(1):
        parts: list[tuple[Mode, np.ndarray, int]] = []
        if spec.job == "train":
            order = epoch_order(spec.train.counts, config.shuffle, config.seed, epoch)
            first = begin.step_in_epoch if epoch == begin.epoch else 0
            parts.append(("train", order, first))
        parts.append(("validation", np.arange(spec.validation.size), 0))
        for mode, order, first in parts:
            for k in range(first, minibatch_count(len(order), spec.global_batch)):
                if mode == "train" and (epoch, k) in begin.skipped:
                    continue
                rows = global_minibatch(order, k, spec.global_batch)
                mine = trainer_rows(rows, rank, config.batch_size)
                yield MinibatchRequest(number % 2, mode, epoch, k, mine)
                number += 1


class Trainer:
    """One trainer: its model, its loader, its place among the others.

    Parameters
    ----------
    spec : RunSpec
        The run.
    arguments : WorkerArguments
        What the launcher gave it.
    launcher : Connection
        To the launcher.
    """

    def __init__(self, spec: RunSpec, arguments: WorkerArguments, launcher: Connection) -> None:
        self.launcher = launcher
        self.arguments, self.spec, self.config = arguments, spec, spec.config
        self.rank, self.trainers = arguments.rank, spec.trainers
        self.network = build_network(spec.description, spec.config.dtype)
        self.optimizer = OPTIMIZERS.make("sgd", dict(spec.config))
        self.memory = self._open_memory()
        self.model = self._build_model()
        self.state = self._load_weights()
        self._seconds = self._take_up(self.state.pending)
        settings = ExchangeSettings.of(vars(self.config))
        self.exchange = make_exchange(settings, self.memory, arguments.group)
        loader = open_loader(self.memory, arguments.loader, self.spec.filler())
        self.feed = InputPipeline(requests(self.spec, self.rank, self.state), loader)
        self.arguments.group.barrier()  # what they share is whole when everybody has loaded
        self._check_equal()
        self._folder = self._begin_folder()
        self._gallery = SamplePredictions(spec) if self._folder is not None else None
        self._last_save = time.monotonic()
        self._skips = 0
        launcher.send(Ready(arguments.rank))

    # What a trainer is made of

    def _open_memory(self) -> HostMemory | CudaMemory:
        from tandem.backend import keep_freed_memory, set_threads

        set_threads(self.spec.threads)
        keep_freed_memory()
        shapes = self._shapes()
        declared = self.network.parameters.declared
        learned = {
            name: shapes[name]
            for name in learned_rates(declared, self.config.freeze, self.config.lr_multipliers)
        }
        layout = FlatLayout.of(
            learned,
            self.config.dtype,
            channels_last=self.spec.on_gpu,
            states=self.optimizer.states,
        )
        return open_memory(self.spec, self.arguments.slots, self.arguments.group, layout)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter, frozen ones included."""
        return {name: v.type.shape for name, v in self.network.parameters.items()}

    def _checkpoint_nbytes(self) -> int:
        """Of all weights and momenta, frozen ones included."""
        layout = FlatLayout.of(self._shapes(), self.config.dtype, states=self.optimizer.states)
        return layout.parameters_nbytes

    def _build_model(self) -> "CompiledNetwork":
        from tandem.training.compiled_network import CompiledNetwork

        return CompiledNetwork(
            self.network,
            self.config,
            self.optimizer,
            read_mean(self.config.mean_path, self.spec.train.image_size),
            self.memory.vectors,
            device=self.memory.device,
            compile=bool(self.config.compile),
            device_crops=self.spec.device_crops,
            records=self.memory.records,
            updated=self.memory.updated,
            on_gradient_ready=self._hear if self.config.bucket_mb and self.trainers > 1 else None,
        )

    def _hear(self, name: str) -> None:
        """Pass on that a gradient is there."""
        self.exchange.on_gradient_ready(name)

    def _load_weights(self) -> RunState:
        spec, model, shapes = self.spec, self.model, self._shapes()
        begin = RunState(
            global_batch=spec.global_batch, train_pictures=spec.train.size, skipped=spec.skipped
        )
        whole = spec.resumed or (spec.weights if spec.job == "validate" else None)
        if whole is not None:
            checkpoint = read_checkpoint(whole, shapes)
            model.load(checkpoint.weights, checkpoint.states)
            return replace(
                checkpoint.state,
                global_batch=begin.global_batch,
                train_pictures=begin.train_pictures,
                skipped=tuple(dict.fromkeys((*checkpoint.state.skipped, *spec.skipped))),
            )
        for name, value in self.network.initial_values(self.config.seed):
            model.load({name: value})
        if spec.weights is not None:
            skipped = self.config.init_weights_skip
            check_layers("init_weights_skip", skipped, shapes)
            model.load(initial_weights(spec.weights, shapes, skipped))
        return begin

    def _take_up(self, pending: Pending) -> Seconds:
        """Go on counting where a checkpoint stands; the seconds of this trainer so far."""
        sums = list(pending.sums)
        if len(sums) != self.trainers:
            sums = [sum(sums, MetricSums())] + [MetricSums()] * (self.trainers - 1)
        self.model.put_sums("train", sums[self.rank])
        return pending.seconds if self.rank == 0 else Seconds()

    def _begin_folder(self) -> RunFolder | None:
        if self.rank != 0 or self.spec.job != "train":
            return None
        return RunFolder(self.config, self.state, self.spec.resumed)

    def close(self) -> None:
        """Finish what is being written."""
        if self._folder is not None:
            self._folder.close()
            self._tell_trouble()

    def finish(self) -> None:
        """Let the loader go, and give the memory back together with the other trainers."""
        self.exchange.leave()
        self.feed.close()
        self.memory.close()

    # What it does

    def train(self) -> None:
        """Train until ``n_epochs`` are done, from where the state says.

        Raises
        ------
        StopAgreed
            The launcher has asked for it; a checkpoint has been written.
        """
        steps = minibatch_count(self.spec.train.size, self.spec.global_batch)
        for epoch in range(self.state.epoch, self.config.n_epochs):
            for step in range(self.state.step_in_epoch, steps):
                if (epoch, step) in self.state.skipped:
                    self._pass_over(epoch, step, steps)
                else:
                    self._train_step(epoch, step, steps)
            if self._folder is not None and self._is_kept(epoch + 1):
                self._folder.prepare(self._checkpoint_nbytes())  # while the validation lasts
            with self.exchange.consensus_weights():
                record = self._validate(epoch)
            self._finish_epoch(epoch, record)
        self._tell_written(wait=True)

    def validate_only(self) -> None:
        """Validate the loaded weights, and report."""
        record = self._validate(self.state.epoch - 1)
        if self.rank == 0:
            self.launcher.send(record)

    def _train_step(self, epoch: int, step: int, steps: int) -> None:
        marks, show = [time.perf_counter()], self.arguments.sign.show
        show(Activity.WAITING)
        slot = self.memory.slots[next(self.feed)]
        load_wait = self.feed.take_wait_seconds()
        shares = self._shares(step)
        rate = learning_rate(self.config, epoch, step, steps, self.state.validation_errors)
        marks.append(time.perf_counter())
        show(Activity.COMPUTING)
        self.exchange.before_gradients(shares)
        self.model.compute_gradients(slot, epoch)
        bad = [] if self.model.is_finite() else self.feed.indices.tolist()
        marks.append(time.perf_counter())
        show(Activity.EXCHANGING)
        words = self._agree_on_step(tuple(bad))
        if any(word.not_finite for word in words):
            self._skips += 1
            self._meet_not_finite(epoch, step, rate, words)
        elif self.exchange.is_synchronous or shares[self.rank] > 0:
            self._skips = 0
            self.exchange.before_update(shares)
            marks.append(time.perf_counter())
            show(Activity.COMPUTING)
            self.model.update(rate)
            if self.trainers > 1:  # who meet anyway; it is to count as computing
                self.memory.wait()
            marks.append(time.perf_counter())
            show(Activity.EXCHANGING)
            self.exchange.after_update(shares)
            marks.append(time.perf_counter())
            self._count_seconds(load_wait, marks)
        self._finish_step(epoch, step, rate, words)
        self._report_progress("train", epoch, step + 1, steps)

    def _finish_step(
        self, epoch: int, step: int, rate: float, words: Sequence[StepVote] = ()
    ) -> None:
        """Count a step, report and check when it is time, then do what the trainers agreed on."""
        self.state = replace(self.state, step_in_epoch=step + 1, step=self.state.step + 1)
        every = self.config.check_every
        if every and self.state.step % every == 0:
            self._check_equal()
        if self.state.step % self.config.print_freq == 0:
            self._report_training(epoch, rate)
        stop = any(word.stop for word in words)
        if stop or any(word.snapshot for word in words):
            self._save()
        if stop:
            self._stop()

    def _pass_over(self, epoch: int, step: int, steps: int) -> None:
        """Leave a minibatch out that the run has gone back for."""
        order = epoch_order(self.spec.train.counts, self.config.shuffle, self.config.seed, epoch)
        pictures = global_minibatch(order, step, self.spec.global_batch).tolist()
        self._record_not_finite(epoch, step, "rollback", self._names(pictures))
        rate = learning_rate(self.config, epoch, step, steps, self.state.validation_errors)
        self._finish_step(epoch, step, rate)

    def _validate(self, epoch: int) -> ValidationRecord:
        self.model.take_sums("validation")
        steps = minibatch_count(self.spec.validation.size, self.spec.global_batch)
        for step in range(steps):
            self.arguments.sign.show(Activity.WAITING)
            slot = self.memory.slots[next(self.feed)]
            self.arguments.sign.show(Activity.VALIDATING)
            self.model.validate(slot)
            if self._gallery is not None:
                self._gallery.look(step, self.model.read_scores)
            self._report_progress("validation", epoch, step + 1, steps)
            if self.spec.job == "train" and any(word.stop for word in self._agree()):
                self._save()
                self._stop()
        self.feed.take_wait_seconds()
        if self._folder is not None and self._gallery is not None:
            draw = partial(self._gallery.draw, self._gallery.take())
            self._folder.show("predictions", self.state.step, draw)
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
        self._record(record)
        if self._is_kept(epoch + 1):
            self._save()

    def _is_kept(self, done: int) -> bool:
        """Whether a checkpoint is written after so many whole epochs."""
        return done % self.config.snapshot_freq == 0 or done == self.config.n_epochs

    def _stop(self) -> NoReturn:
        self._tell_written(wait=True)
        raise StopAgreed

    # What the trainers do together

    def _shares(self, step: int) -> Sequence[float]:
        """Each trainer's part of the pictures of global minibatch `step`."""
        batch = self.config.batch_size
        rows = min(self.spec.train.size - step * self.spec.global_batch, self.spec.global_batch)
        counts = [min(max(rows - r * batch, 0), batch) for r in range(self.trainers)]
        return [count / rows for count in counts]

    def _gather_sums(self, mode: Mode) -> "MetricSums":
        first, *others = self.arguments.group.all_gather_object(self.model.take_sums(mode))
        for sums in others:
            first = first + sums
        return first

    def _check_equal(self) -> None:
        """Refuse to go on when the parameters of two trainers differ in a bit."""
        sums = self.arguments.group.all_gather_object(self.memory.checksum())
        if len(set(sums)) > 1:
            raise RuntimeError(
                f"the parameters of the trainers differ after step {self.state.step}: "
                f"checksums by rank {[f'{s:08x}' for s in sums]}"
            )

    def _agree_on_step(self, not_finite: tuple[int, ...]) -> Sequence[StepVote]:
        """Vote on a step; trainers that are not in step do so only now and then."""
        if self.exchange.is_synchronous:
            return self._agree(not_finite)
        if not self.exchange.votes_after(self.state.step + 1, self.config.print_freq):
            return (StepVote(not_finite=not_finite),)
        words = self._agree()
        own = StepVote(any(w.stop for w in words), any(w.snapshot for w in words), not_finite)
        return (own,)

    def _agree(self, not_finite: tuple[int, ...] = ()) -> Sequence[StepVote]:
        """Hear what every trainer has to say of this step, the same everywhere."""
        return self.arguments.group.all_gather_object(
            StepVote(self._asked_to_stop(), self._snapshot_is_due(), not_finite)
        )

    def _asked_to_stop(self) -> bool:
        asked = False
        try:
            while self.launcher.poll():
                asked |= isinstance(self.launcher.recv(), Stop)
        except (EOFError, OSError):
            raise LauncherLost from None
        return asked

    def _snapshot_is_due(self) -> bool:
        """Whether trainer 0's clock says so; nobody else decides it."""
        if self._folder is None:
            return False
        self._tell_written()
        every = 60 * self.config.snapshot_minutes
        due = every > 0 and time.monotonic() - self._last_save >= every
        return due and not self._folder.busy and self._folder.prepare(self._checkpoint_nbytes())

    def _meet_not_finite(
        self, epoch: int, step: int, rate: float, words: Sequence[StepVote]
    ) -> None:
        """Do what `on_nan` says with a minibatch that no weight has seen yet.

        Raises
        ------
        NotFinite
            Unless the minibatch is to be skipped.
        """
        action = self.config.on_nan
        if action == "skip" and self._skips > MOST_SKIPS:
            action = "stop"
        bad = [index for word in words for index in word.not_finite]
        # Where nobody else has something to say, nobody else reads a million names.
        tells = self.rank == 0 or action != "skip" or not self.exchange.is_synchronous
        names = self._names(bad) if tells else []
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        text = (
            f"the loss or a gradient is not finite in step {self.state.step + 1} "
            f"(epoch {epoch + 1}, minibatch {step + 1}), at rate {rate:.3g}, "
            f"with the pictures {shown}"
        )
        if action != "rollback":  # which is recorded when the minibatch is passed over
            self._record_not_finite(epoch, step, action, names)
        if action != "skip":
            hint = "; a smaller learning_rate may help, or on_nan: skip or rollback"
            if self._skips > MOST_SKIPS:
                hint = f"; {MOST_SKIPS} minibatches before it were skipped: that does not help"
            text += hint * (action == "stop")
            if not self.exchange.is_synchronous:
                raise ArithmeticError(text)  # which the others do not know of
            # The first to raise ends the run: by now trainer 0 has recorded why.
            self.arguments.group.barrier()
            raise NotFinite(text, epoch, step)
        if self.rank == 0:
            self.launcher.send(Notice(f"{text}: skipped"))
        elif not self.exchange.is_synchronous:  # rank 0 does not know of it
            log.warning("%s: skipped", text)

    def _names(self, pictures: Sequence[int]) -> list[str]:
        """The names of training pictures. Read when they are needed: there may be a million."""
        names = read_manifest(self.config.manifest_path).splits["train"].pictures
        return [names[index] for index in pictures]

    # What it reports

    def _count_seconds(self, load_wait: float, marks: Sequence[float]) -> None:
        """Add a step, of which `marks` are the beginning of each part and the end, in seconds."""
        begun, ready, computed, exchanged, updated, ended = marks
        self._seconds += Seconds(
            compute=computed - ready + updated - exchanged,
            load_wait=load_wait,
            exchange=exchanged - computed + ended - updated,
            steps=ended - begun,
        )

    def _report_training(self, epoch: int, rate: float) -> None:
        sums, seconds = self._gather_sums("train"), self._seconds
        self._seconds = Seconds()
        if sums.images == 0:  # all minibatches since the last line were left out
            return
        self._record(
            TrainRecord(
                epoch=epoch + 1,
                step=self.state.step,
                loss=sums.loss / sums.images,
                top1_error=sums.top1_errors / sums.images
                if self.config.print_train_error
                else None,
                learning_rate=rate,
                # Of ranks that are not in step, this one may have made none.
                images_per_second=sums.images / seconds.steps if seconds.steps else 0.0,
                compute_seconds=seconds.compute,
                load_wait_seconds=seconds.load_wait,
                exchange_seconds=seconds.exchange,
            )
        )

    def _record(self, record: Record) -> None:
        """Write a line, then show it: what the user has seen is in the record."""
        if self._folder is not None:
            self._folder.append(record)
            self.launcher.send(record)

    def _record_not_finite(
        self, epoch: int, step: int, action: str, pictures: Sequence[str]
    ) -> None:
        self._record(
            NotFiniteRecord(epoch + 1, self.state.step + 1, step + 1, action, tuple(pictures))
        )

    def _report_progress(
        self, mode: Literal["train", "validation"], epoch: int, step: int, steps: int
    ) -> None:
        if self.rank == 0:
            self.launcher.send(Progress(mode, epoch + 1, step, steps))

    def _tell_written(self, wait: bool = False) -> None:
        if self._folder is not None and (path := self._folder.written(wait)):
            self.launcher.send(CheckpointWritten(str(path)))
        self._tell_trouble()

    def _tell_trouble(self) -> None:
        if self._folder is not None and (text := self._folder.take_trouble()):
            self.launcher.send(Notice(text))

    def _save(self) -> None:
        """Trainer 0 copies; the others can't overtake it, since the next step waits for it."""
        self._last_save = time.monotonic()
        self.arguments.sign.show(Activity.SAVING)
        sums = self.arguments.group.all_gather_object(self.model.read_sums("train"))
        if self._folder is not None:
            self._tell_written(wait=True)
        with self.exchange.consensus_weights():
            self._copy_to_folder(sums)

    def _copy_to_folder(self, sums: tuple[MetricSums, ...]) -> None:
        if self._folder is None:
            return
        config = self.config
        self.launcher.send(CheckpointBegun())
        self._folder.save(
            Checkpoint(
                *self.model.state(),
                self.spec.description,
                replace(self.state, pending=Pending(sums, self._seconds)),
                config.model_dump(mode="json"),
                self.spec.conditions,
            )
        )
