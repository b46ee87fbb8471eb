"""The rows of global minibatches, which every trainer knows without a message."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.data.augment import Mode
from tandem.data.order import epoch_order, global_minibatch
from tandem.training.run_spec import RunSpec


class GlobalRows:
    """The rows of the data that the global minibatches of a run have, divided among trainers."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        # Asked for in every step:
        self._sizes = {"train": spec.train.size, "validation": spec.validation.size}
        self._global_batch, self._shares = spec.global_batch, spec.shares
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # of an epoch

    def train(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Dataset indices of a minibatch of training, at most `RunSpec.global_batch`."""
        if self._order is None or self._order[0] != epoch:
            config = self._spec.config
            order = epoch_order(self._spec.train.counts, config.shuffle, config.seed, epoch)
            self._order = epoch, order
        return global_minibatch(self._order[1], step, self._global_batch)

    def count(self, mode: Mode, step: int) -> int:
        """The number of rows of a minibatch."""
        return min(self._sizes[mode] - step * self._global_batch, self._global_batch)

    def passes(self, mode: Mode, step: int, rank: int) -> list[slice]:
        """The passes of a trainer over its rows of a minibatch, see `RunSpec.passes`."""
        return self._spec.passes(self.count(mode, step), rank)

    def shares(self, step: int) -> Sequence[float]:
        """Each trainer's fraction of the rows of a minibatch of training."""
        rows = self.count("train", step)
        return [(min(own.stop, rows) - min(own.start, rows)) / rows for own in self._shares]
