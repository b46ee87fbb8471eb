"""A trainer: gradients, exchange, update, validation, checkpoints.

Importing this module is cheap; PyTensor and PyTorch are imported when a trainer starts to work.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from tandem.artifacts.checkpoint import Checkpoint
from tandem.artifacts.metrics import Pending, Seconds, Sums
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.data.augment import Mode
from tandem.data.order import minibatch_count
from tandem.distributed import TreeSum
from tandem.layers.choices import evaluate_metrics, metrics_of
from tandem.memory import Slot
from tandem.optim import optimizer_of
from tandem.processes.messages import Ready, describe
from tandem.training.agreement import Agreement
from tandem.training.early_end import reason_to_end
from tandem.training.global_rows import GlobalRows
from tandem.training.learning_rate import learning_rate
from tandem.training.messages import Activity, StepVote
from tandem.training.not_finite import Position, Refusals
from tandem.training.predictions import PredictionCollector, Predictions
from tandem.training.reports import Reports
from tandem.training.run_spec import RunSpec
from tandem.training.setup import set_up, sums_by_rank
from tandem.training.step_timer import StepTimer
from tandem.training.steps_ahead import StepsAhead

if TYPE_CHECKING:
    from tandem.training.shards import State
    from tandem.training.worker import WorkerArguments


_COMPILING = {
    "gradients": Activity.COMPILING_GRADIENT,
    "update": Activity.COMPILING_UPDATE,
    "step": Activity.COMPILING_STEP,
    "validation": Activity.COMPILING_VALIDATION,
    "crop": Activity.COMPILING_VALIDATION,
}

log = logging.getLogger(__name__)


class StopAgreed(Exception):
    """All trainers have agreed to stop after the step that they have just made."""


class Trainer:
    """One trainer of a run: trains, validates, saves, in agreement with the others."""

    def __init__(self, spec: RunSpec, arguments: "WorkerArguments", launcher: Connection) -> None:
        setup = set_up(spec, arguments)
        self.spec = spec = setup.spec
        self.config = spec.config
        self.rank, self.group, self.status = arguments.rank, arguments.group, arguments.status
        self.memory, self.model, self.state = setup.memory, setup.model, setup.state
        self.exchange, self.pipeline = setup.exchange, setup.pipeline
        self.channel = setup.channel
        self.gathering = setup.gathering
        self.steps = spec.steps("train")
        self._whole_steps = minibatch_count(spec.train.size, spec.global_batch)  # of an epoch
        self._rates = spec.rates  # of this epoch's steps; empty: by the configuration
        self.rows = GlobalRows(spec)
        self.timer = StepTimer(self.status)
        self.untrained = setup.untrained
        self._metrics = metrics_of(self.config.metrics)
        self._seconds = self.state.pending.seconds if self.rank == 0 else Seconds()
        # Of training by all trainers, by rank, since the last report, as their votes tell: what a
        # survivor saves. Empty where it does not.
        self._sums = list(sums_by_rank(self.state, spec.trainers)) if spec.votes_sums else []
        self._is_first_step = True
        self._check_equal()
        self.reports = Reports(spec, arguments, self.state, launcher, setup.checkpoint_nbytes)
        self.agreement = Agreement(self.group, launcher, self.reports.snapshot_is_due)
        self.refusals = Refusals(
            self.config, self.rank, self.group, self.reports, self.exchange.is_synchronous
        )
        alone = spec.trainers == 1 and self.memory.records
        self.model.functions.on_compile = self._show_compiling
        runs_ahead = alone and not optimizer_of(dict(self.config)).numbers(0)
        self.ahead = StepsAhead(self.model, self.refusals) if runs_ahead else None
        launcher.send(Ready())

    def train(self) -> None:
        """Train from `state` until ``n_epochs`` are done, or `reason_to_end` finds a reason.

        Raises
        ------
        StopAgreed
            The launcher has asked for it; a checkpoint has been written.
        NotFinite
            A loss or a gradient is not finite, and `on_nan` ends the run.
        """
        for epoch in range(self.state.epoch, self.config.n_epochs):
            if reason := reason_to_end(self.config, self.state.history):
                self.reports.notice(reason)
                break
            for step in range(self.state.step_in_epoch, self.steps):
                if (epoch, step) in self.state.skipped:
                    self._pass_over(epoch, step)
                else:
                    self._train_step(epoch, step)
            if self._is_kept(epoch + 1):
                self.reports.prepare_checkpoint()  # during the validation
            with self.exchange.consensus_weights():
                record = self._validate(epoch)
            if self._finish_epoch(epoch, record):
                break
        self.reports.check_written(wait=True)

    def validate_only(self) -> None:
        """Validate the loaded weights, and report."""
        collector = PredictionCollector(self.spec) if self.spec.predicts else None
        self.reports.result(self._validate(self.state.epoch - 1, collector))
        if collector is not None:
            parts = self.group.all_gather_object(collector.taken())
            self.reports.result(Predictions.joined([part for part in parts if part is not None]))

    def finish(self) -> None:
        """End the exchange and the loader, and release the memory. Collective."""
        self.exchange.leave()
        if self.channel is not None:
            self.channel.close()
        self.pipeline.close()
        self.memory.close()

    def close(self) -> None:
        """Finish what is being written."""
        self.reports.close()

    def rescue(self) -> None:
        """Save the state after the last whole step, when another process of the run is lost.

        That is what all have computed, if no exchange was changing it; of several survivors the
        first saves. Trouble is reported, and the run ends as it would have.
        """
        if not self.spec.survives or self.state.step == 0:
            return
        try:
            self._catch_up()
            sums = self._known_sums() or (self.model.read_sums("train"),)
            self.reports.rescue(self._checkpoint(self.model.state(), sums))
        except Exception as error:
            log.warning("the last step could not be saved: %s", describe(error))

    def _train_step(self, epoch: int, step: int) -> None:
        self.timer.begin(Activity.WAITING)
        at, rate = Position(epoch, step, self.state.step), self._rate(epoch, step)
        if self.ahead is not None:
            slot = self.memory.slots[next(self.pipeline)]
            self.timer.enter(Activity.COMPUTING)
            self._count_updates(self.ahead.start(slot, at, rate, self.pipeline.indices))
            self._seconds += self.timer.end()
            votes = self.agreement.vote()
        else:
            votes = self._step_together(at, rate)
        self._finish_step(epoch, step, rate, votes)
        self.reports.progress("train", epoch, step + 1, self.steps)

    def _step_together(self, at: Position, rate: float) -> Sequence[StepVote]:
        """Make a step with the other trainers: they agree on it before any weight changes."""
        timer, shares = self.timer, self._shares(at.minibatch)
        self.exchange.before_gradients(shares)
        bad: tuple[int, ...] = ()
        counts = TreeSum[Sums]()
        passes = self.rows.passes("train", at.minibatch, self.rank)
        for rows in passes:
            timer.enter(Activity.WAITING)
            slot = self.memory.slots[next(self.pipeline)]
            timer.enter(Activity.COMPUTING)
            bad += self._compute(slot, at)
            if summed := self.config.summed_rows:
                number = rows.start // summed
                counts.push(self.model.read_sums("last"), 0, number)
                self.exchange.after_gradients(number, rows.stop - rows.start, rows == passes[-1])

        timer.enter(Activity.EXCHANGING)
        votes = self._vote(bad)
        refused = [*dict.fromkeys(index for vote in votes for index in vote.not_finite)]
        if refused:
            self.refusals.refuse(at, rate, refused)
        elif self.exchange.is_synchronous or shares[self.rank] > 0:
            self.refusals.in_a_row = 0
            if self.config.summed_rows:
                self.model.put_sums("last", self._total(counts))
            self.exchange.before_update(shares)
            timer.enter(Activity.COMPUTING)
            self.model.update(rate, self.state.updates)
            self._count_updates(1)
            self._sums = [s + v.sums for s, v in zip(self._sums, votes, strict=False) if v.sums]
            timer.enter(Activity.EXCHANGING)
            self.exchange.after_update(shares)
            self._seconds += timer.end()
        return votes

    def _compute(self, slot: Slot, at: Position) -> tuple[int, ...]:
        """Compute the gradients of a slot; return its pictures if something is not finite."""
        if self._is_first_step:
            self._compile_step(at)
        own = self.pipeline.indices
        global_rows = None
        if self.model.division is not None:  # by whose graph all find the same pictures
            own = global_rows = self.rows.train(at.epoch, at.minibatch)
        rows, total = len(self.pipeline.indices), self.rows.count("train", at.minibatch)
        self.model.compute_gradients(slot, at.epoch, rows, global_rows, total)
        return () if self.model.is_finite() else tuple(own.tolist())

    def _total(self, counts: TreeSum[Sums]) -> Sums:
        """Add up what all trainers have counted in their groups of rows of a step. Collective."""
        whole = TreeSum[Sums]()
        for nodes, terms in self.group.all_gather_object((counts.nodes, counts.terms)):
            for node, term in zip(nodes, terms, strict=True):
                whole.push(term, *node)
        return whole.total()

    def _compile_step(self, at: Position) -> None:
        """Compile what the first step takes, where functions are not recorded over the slots."""
        self._is_first_step = False
        if not self.memory.records:
            own = self.model.division is None
            indices = self.pipeline.indices if own else self.rows.train(at.epoch, at.minibatch)
            self.model.compile_step(len(indices))
            self.reports.stage(Activity.FIRST_STEP)

    def _show_compiling(self, name: str) -> None:
        """Report that a function is compiled, by the activity of its name."""
        self.reports.stage(_COMPILING[name.split()[-1]])

    def _shares(self, step: int) -> Sequence[float]:
        """Return what each trainer's gradients are multiplied by in their sum, by rank."""
        if self.model.division is not None:
            return (1.0,) * self.spec.trainers  # they are terms already
        return self.rows.shares(step)

    def _count_updates(self, made: int) -> None:
        self.state = replace(self.state, updates=self.state.updates + made)

    def _pass_over(self, epoch: int, step: int) -> None:
        """Leave out a minibatch for which the run has gone back to a checkpoint."""
        self._catch_up()
        pictures = self.rows.train(epoch, step).tolist()
        self.refusals.record(Position(epoch, step, self.state.step), "rollback", pictures)
        self._finish_step(epoch, step, self._rate(epoch, step))

    def _finish_step(
        self, epoch: int, step: int, rate: float, votes: Sequence[StepVote] = ()
    ) -> None:
        """Count a step, check and report when it is time, then act on the votes."""
        self.state = replace(self.state, step_in_epoch=step + 1, step=self.state.step + 1)
        every = self.config.check_every
        checks = every and self.state.step % every == 0
        ends_epoch = step + 1 == self.steps
        reports = self.state.step % self.config.print_freq == 0
        reports |= ends_epoch and self.config.reports_epochs
        stop = any(vote.stop for vote in votes)
        saves = stop or any(vote.snapshot for vote in votes)
        if checks or reports or saves or ends_epoch:
            self._catch_up()
        if reports:  # first: it is part of the step, also if a trainer is found to be lost
            self._report_training(epoch, rate)
        if checks:
            self._check_equal()
        if saves:
            self._save()
        if stop:
            self._stop()

    def _catch_up(self) -> None:
        """Wait for the device and complete the last step: what follows reads or keeps its state."""
        self.timer.begin(Activity.COMPUTING)
        if self.ahead is not None:
            self._count_updates(self.ahead.complete())
        self.memory.wait()
        self._seconds += self.timer.end()

    def _validate(
        self, epoch: int, collector: PredictionCollector | None = None
    ) -> ValidationRecord:
        self.model.take_sums("validation")
        steps = self.spec.steps("validation", epoch)
        for step in range(steps):
            self._validate_step(step, collector)
            self.reports.progress("validation", epoch, step + 1, steps)
            if self.spec.job == "train" and any(vote.stop for vote in self.agreement.vote()):
                self._save()
                self._stop()
        if steps:
            self.reports.show_samples(self.state.step)
        sums = self._gather_sums("validation")
        return ValidationRecord(
            epoch=epoch + 1,
            step=self.state.step,
            loss=sums.mean_loss,
            top1_error=sums.error(1),
            top5_error=sums.error(5),
            images=sums.images,
            metrics=evaluate_metrics(self._metrics, sums.images, sums.values),
            crops=self.spec.crops,
        )

    def _validate_step(self, step: int, collector: PredictionCollector | None = None) -> None:
        """Validate a minibatch, by one crop of each picture or by several."""
        global_rows = self.rows.count("validation", step)
        summed, counts = self.config.summed_rows, TreeSum[Sums]()
        before = self.model.take_sums("validation") if summed else Sums()
        for rows in self.rows.passes("validation", step, self.rank):
            for crop in range(self.spec.crops):
                self.status.show(Activity.WAITING)
                slot = self.memory.slots[next(self.pipeline)]
                self.status.show(Activity.VALIDATING)
                if self.spec.crops == 1:
                    self.model.validate(slot, global_rows)
                else:
                    self.model.validate_crop(slot, crop, global_rows)
            if collector is not None and len(self.pipeline.indices):
                if self.spec.crops == 1:
                    probabilities = self.model.read_predictions()
                else:
                    probabilities = self.model.read_probabilities()
                collector.add(self.pipeline.indices, probabilities)
            if self.reports.samples is not None and rows.start == 0:
                self.reports.samples.collect(step, self.model.read_predictions)
            if summed:
                counts.push(self.model.take_sums("validation"), 0, rows.start // summed)
        if summed:
            self.model.put_sums("validation", before + self._total(counts))

    def _finish_epoch(self, epoch: int, record: ValidationRecord) -> bool:
        """Count an epoch, report and save it; whether callbacks end training."""
        self.state = replace(
            self.state,
            epoch=epoch + 1,
            step_in_epoch=0,
            validation_errors=(*self.state.validation_errors, record.top1_error),
            history=(*self.state.history, record.monitored),
        )
        self.reports.record(record)
        saves = self._is_kept(epoch + 1) or bool(reason_to_end(self.config, self.state.history))
        if saves:
            self._save()
        if not self.spec.waits:
            return False
        self.status.show(Activity.AWAITING_CALLBACKS)
        votes = self.agreement.vote(awaits_launcher=self.reports.ended(epoch + 1))
        stop, ends = any(vote.stop for vote in votes), any(vote.ends for vote in votes)
        self._rates = next((vote.rates for vote in votes if vote.rates), self._rates)
        if (stop or ends) and not saves:
            self._save()
        if stop:
            self._stop()
        return ends

    def _is_kept(self, done: int) -> bool:
        """Return whether a checkpoint is written after so many whole epochs."""
        return done % self.config.snapshot_freq == 0 or done == self.config.n_epochs

    def _save(self) -> None:
        """Save a checkpoint. Collective: while trainer 0 copies, the next step waits for it."""
        self.status.show(Activity.SAVING)
        sums = self._known_sums() or self.group.all_gather_object(self.model.read_sums("train"))
        self.reports.begin_save()
        with self.exchange.consensus_weights():
            state = self.model.state()
            if self.rank == 0:
                whole = state if self.gathering is None else self.gathering.whole(state)
                self.reports.save(self._checkpoint(whole, sums))
            elif self.gathering is not None:
                self.gathering.send(state)

    def _known_sums(self) -> tuple[Sums, ...]:
        """The sums of all trainers that this one has; empty where it has its own alone."""
        summed = self.config.summed_rows
        return (self.model.read_sums("train"),) if summed else tuple(self._sums)

    def _checkpoint(self, state: "State", sums: tuple[Sums, ...]) -> Checkpoint:
        return Checkpoint(
            *state,
            self.spec.description,
            replace(self.state, pending=Pending(sums, self._seconds)),
            self.config.model_dump(mode="json"),
            self.spec.conditions,
            untrained=self.untrained,
        )

    def _stop(self) -> NoReturn:
        self.reports.check_written(wait=True)
        raise StopAgreed

    def _rate(self, epoch: int, step: int) -> float:
        if self._rates:
            return self._rates[min(step, len(self._rates) - 1)]
        return learning_rate(self.config, epoch, step, self._whole_steps, self.state.history)

    def _vote(self, not_finite: tuple[int, ...]) -> Sequence[StepVote]:
        """Vote on a step; trainers that are not in step do so only now and then."""
        if self.exchange.is_synchronous:
            sums = self.model.read_sums("last") if self._sums else None
            return self.agreement.vote(not_finite, sums=sums)
        if not self.exchange.votes_after(self.state.step + 1, self.config.print_freq):
            return (StepVote(not_finite=not_finite),)
        votes = self.agreement.vote()
        own = StepVote(any(v.stop for v in votes), any(v.snapshot for v in votes), not_finite)
        return (own,)

    def _gather_sums(self, mode: Mode) -> Sums:
        if mode == "train" and self._sums:
            found, self._sums = tuple(self._sums), [Sums()] * len(self._sums)
        elif self.config.summed_rows:  # each has those of all
            return self.model.take_sums(mode)
        else:
            found = self.group.all_gather_object(self.model.take_sums(mode))
        return sum(found[1:], found[0])

    def _check_equal(self) -> None:
        """Raise RuntimeError if the parameters of two trainers differ in a bit."""
        if self.group.size == 1:
            return
        sums = self.group.all_gather_object(self.memory.checksum())
        if len(set(sums)) > 1:
            raise RuntimeError(
                f"the parameters of the trainers differ after step {self.state.step}: "
                f"checksums by rank {[f'{s:08x}' for s in sums]}"
            )

    def _report_training(self, epoch: int, rate: float) -> None:
        sums, seconds = self._gather_sums("train"), self._seconds
        self._seconds = Seconds()
        if sums.images == 0:  # all minibatches since the last line were left out
            return
        error = sums.error(1) if self.config.print_train_error else math.nan
        self.reports.record(
            TrainRecord(
                epoch=epoch + 1,
                step=self.state.step,
                loss=sums.loss / sums.images,
                top1_error=None if math.isnan(error) else error,
                learning_rate=rate,
                # Of ranks that are not in step, this one may have made none.
                images_per_second=sums.images / seconds.steps if seconds.steps else 0.0,
                compute_seconds=seconds.compute,
                load_wait_seconds=seconds.load_wait,
                exchange_seconds=seconds.exchange,
                metrics=evaluate_metrics(self._metrics, sums.images, sums.values)
                if self.config.print_train_error
                else {},
                images=sums.images if self.config.reports_epochs else 0,
            )
        )
