"""A run as data, resolved and checked."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tandem.artifacts.checkpoint import CheckpointHeader
from tandem.artifacts.reproducibility import Conditions
from tandem.config.resolve import divided_by
from tandem.config.schema import Config
from tandem.data.augment import Augmentation, Mode
from tandem.data.colour import Basis
from tandem.data.dataset import Dataset, StoredPictures
from tandem.data.minibatch import MinibatchBuilder
from tandem.data.order import minibatch_count, trainer_shares
from tandem.distributed import RULES
from tandem.layers.network import NetworkDescription
from tandem.memory import CLASS_LABEL, PICTURE_DTYPE, RowType, SlotLayout
from tandem.optim import optimizer_of
from tandem.training.early_end import reason_to_end

Job = Literal["train", "validate"]


@dataclass(frozen=True)
class RunSpec:
    """A checked run. Small, and sent to every process when it starts."""

    job: Job
    config: Config  # every ``auto`` is resolved, but for ``data_on_gpu`` on GPUs
    wnids: tuple[str, ...] | None  # the classes, in order; None: targets without names
    train: Dataset
    validation: Dataset  # the same as `train` in a validation
    conditions: Conditions  # what else the bits depend on
    resumed: Path | None = None  # the checkpoint to continue
    weights: Path | None = None  # otherwise the checkpoint to start from, or to validate
    header: CheckpointHeader | None = None  # of `resumed` or `weights`
    # Epoch and global minibatch, from 0, of minibatches to skip, beside the checkpoint's own:
    skipped: tuple[tuple[int, int], ...] = ()
    colour_basis: Basis = ()  # of the colour noise; empty: there is none
    waits: bool = False  # for callbacks, at the end of each epoch
    most_steps: int | None = None  # of an epoch's training, and of its validation; None: all
    epoch_steps: int | None = None  # of an epoch's training alone; None: all
    unvalidated: frozenset[int] = frozenset()  # epochs, from 0, that end without a validation
    rates: tuple[float, ...] = ()  # of the first epoch's steps; see `Continuation`
    own_code: bytes = b""  # the user's functions, by value; loaded where the network is made
    crops: Literal[1, 10] = 1  # of each picture that a validation alone averages over
    predicts: bool = False  # whether a validation reports what it predicts of each picture
    begun: float = field(default=0.0, compare=False)  # the command, by `time.monotonic`; 0: unknown

    @property
    def is_complete(self) -> bool:
        """Test if the checkpoint to continue has all epochs, or training has ended before."""
        return self.reason_complete is not None

    @property
    def reason_complete(self) -> str | None:
        """Why nothing is left to train; None if something is."""
        if self.resumed is None or self.header is None:
            return None
        if self.header.state.epoch >= self.config.n_epochs:
            return f"all {self.config.n_epochs} epochs are done already"
        return reason_to_end(self.config, self.header.state.history)

    @property
    def survives(self) -> bool:
        """Return whether a trainer has the state after the last whole step when others are lost.

        Parameters that are averaged, or that trainers share or divide, may be half changed then.
        """
        config = self.config
        whole = config.exchange == "gradients" and RULES[config.rule].is_synchronous
        return self.job == "train" and (self.trainers == 1 or (whole and not divided_by(config)))

    @property
    def votes_sums(self) -> bool:
        """Return whether trainers tell each other in their votes what they count."""
        return self.survives and self.trainers > 1 and not self.config.summed_rows

    @property
    def continues_optimizer(self) -> bool:
        """Return whether the checkpoint's optimizer states are of the optimizer that is configured.

        A checkpoint whose settings name none is of SGD.
        """
        if self.header is None:
            return self.config.optimizer == "sgd"
        before, states = self.header.config.get("optimizer", "sgd"), {*self.header.states}
        is_same = not states or states == {*optimizer_of(dict(self.config)).states}
        return before == self.config.optimizer and is_same

    @property
    def classes(self) -> int:
        """Number of classes, or of values of a target: what the network has as outputs."""
        target = self.train.target
        return math.prod(target.shape) if target != CLASS_LABEL else len(self.wnids or ())

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a row as the network gets it: images with the channel first."""
        if self.train.pictures is not None:
            return (3, self.config.crop_size, self.config.crop_size)
        *rows, last = self.train.row.shape
        return (last, *rows) if len(rows) == 2 else self.train.row.shape

    @property
    def description(self) -> NetworkDescription:
        config, pictures = self.config, self.train.pictures or StoredPictures()
        return NetworkDescription(
            None if self.train.pictures is None else config.crop_size,
            self.classes,
            config.width,
            self.wnids,
            network=config.network,
            options=config.options,
            resize=pictures.resize,
            pad=pictures.pad,
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each trainer, by rank."""
        return tuple(self.config.devices)

    @property
    def trainers(self) -> int:
        return len(self.devices)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def threads(self) -> int:
        return int(self.config.threads)

    @property
    def device_crops(self) -> bool:
        """Return whether slots hold whole images, which the device crops."""
        return bool(self.config.use_data_layer)

    @property
    def picture_size(self) -> int:
        """Rows and columns of the images in a slot."""
        return self.train.image_size if self.device_crops else self.config.crop_size

    @property
    def slot_layout(self) -> SlotLayout:
        """The layout of a trainer's slots, where its device keeps no pictures."""
        row = self.train.row
        if self.train.pictures is not None:
            row = RowType(PICTURE_DTYPE, (self.picture_size, self.picture_size, 3))
        coloured = bool(self.colour_basis)
        return SlotLayout(self.config.pass_rows, row, self.train.target, coloured)

    @property
    def global_batch(self) -> int:
        """Images per step over all trainers."""
        return self.config.global_batch or self.config.batch_size * self.trainers

    @property
    def shares(self) -> list[slice]:
        """Each trainer's rows of a global minibatch, by rank."""
        group = self.config.group_rows if self.config.global_batch else self.config.batch_size
        group = self.config.summed_rows or group or self.config.batch_size
        return trainer_shares(self.global_batch, self.trainers, group)

    def passes(self, rows: int, rank: int) -> list[slice]:
        """A trainer's passes over a global minibatch of `rows` rows: its rows of each pass.

        There is one, or one for each of its groups of `sum_rows`, perhaps none.
        """
        own, each = self.shares[rank], self.config.summed_rows
        if each is None:
            return [own]
        end = min(own.stop, rows)
        return [slice(start, min(start + each, end)) for start in range(own.start, end, each)]

    def of_rank(self, rank: int) -> "RunSpec":
        """The run as a trainer sees it: `batch_size` is of its own rows, but with `sum_rows`."""
        if self.config.summed_rows:
            return self
        own = self.shares[rank]
        size = (own.stop - own.start) or self.config.group_rows or 1  # a slot is never empty
        return replace(self, config=self.config.model_copy(update={"batch_size": size}))

    def steps(self, mode: Mode, epoch: int = -1) -> int:
        """Steps of an epoch's training, or of its validation, by all trainers together.

        Without `epoch` they are those of one that is validated.
        """
        if mode == "validation" and epoch in self.unvalidated:
            return 0
        split = self.train if mode == "train" else self.validation
        most = self.epoch_steps if mode == "train" else None
        limits = (minibatch_count(split.size, self.global_batch), self.most_steps, most)
        return min(limit for limit in limits if limit is not None)

    def minibatch_builder(self) -> MinibatchBuilder:
        """Make the builder of minibatches, for a loader process or a trainer without one."""
        config = self.config
        augmentation = Augmentation(
            crop_size=config.crop_size,
            rand_crop=config.rand_crop,
            rand_mirror=config.rand_mirror,
            batch_crop_mirror=config.batch_crop_mirror,
            seed=config.seed,
            colour_basis=self.colour_basis,
        )
        return MinibatchBuilder(
            self.train,
            self.validation,
            None if self.train.pictures is None else augmentation,
            crop_here=not self.device_crops,
            threads=int(config.loader_threads),
        )
