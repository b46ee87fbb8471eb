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
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # of an epoch

    def train(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Dataset indices of a minibatch of training, at most `RunSpec.global_batch`."""
        if self._order is None or self._order[0] != epoch:
            config = self._spec.config
            order = epoch_order(self._spec.train.counts, config.shuffle, config.seed, epoch)
            self._order = epoch, order
        return global_minibatch(self._order[1], step, self._spec.global_batch)

    def count(self, mode: Mode, step: int) -> int:
        """The number of rows of a minibatch."""
        split = self._spec.train if mode == "train" else self._spec.validation
        return min(split.size - step * self._spec.global_batch, self._spec.global_batch)

    def shares(self, step: int) -> Sequence[float]:
        """Each trainer's fraction of the rows of a minibatch of training."""
        batch, rows = self._spec.config.batch_size, self.count("train", step)
        counts = [min(max(rows - rank * batch, 0), batch) for rank in range(self._spec.trainers)]
        return [count / rows for count in counts]
