"""Batch normalisation in a run: groups of rows, short minibatches, auxiliary heads, resuming."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from tandem.config.schema import Config
from tandem.distributed.kernels import average_into_all
from tandem.memory import Slot
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork
from tests.support.norm_network import CROP, NormNetwork
from tests.support.trainer_memory import host_memory, noise_slot

ROWS, CLASSES = 2, 3
MEAN = np.full((3, CROP, CROP), 100, np.float32)
AVERAGES = ("conv1.norm.running_mean", "fc1.norm.running_var")


class Compiled:
    """The functions of trainers, computed one after another, and the memory that they share."""

    def __init__(
        self, batch: int, auxiliary: float = 0.0, records: bool = False, freeze: Any = ()
    ) -> None:
        changes: dict[str, Any] = {"freeze": freeze, "init_weights": "w"} if freeze else {}
        config = Config(
            crop_size=CROP,
            batch_size=batch,
            norm_rows=ROWS,
            precision="float64",
            threads=1,
            learning_rate=0.1,
            **changes,
        )
        self.batch = batch
        self.network = NormNetwork(CROP, CLASSES, 1.0, "float64", auxiliary)
        memory = host_memory(self.network, SGD(), batch, freeze)
        memory.records = records
        self.layout, self.gradients = memory.layout, memory.flat["gradients"][0]
        self.model = CompiledNetwork(self.network, config, SGD(), MEAN, memory)
        self.model.load(dict(self.network.initial_values(1)))
        self.slot_of = partial(noise_slot, self.network)

    def step(self, whole: Slot, rows: int) -> dict[str, np.ndarray]:
        """A step of as many trainers as the valid rows of a global minibatch need, and one more.

        Returns weights and the averages of statistics and gradients.
        """
        counts = [min(max(rows - first, 0), self.batch) for first in self.firsts(len(whole.labels))]
        parts = []
        for first, count in zip(self.firsts(len(whole.labels)), counts, strict=True):
            slot = self.slot_of(self.batch, count, seed=99)
            for name in ("pictures", "labels", "indices"):
                getattr(slot, name)[:count] = getattr(whole, name)[first : first + count]
            self.model.compute_gradients(slot, 0, count)
            assert self.model.is_finite()
            parts.append(self.gradients.copy())
        average_into_all(parts, [count / rows for count in counts])
        self.gradients[...] = parts[0]
        found = {f"gradient/{name}": v for name, v in self.layout.views(parts[0]).items()}
        self.model.update(0.1)
        return found | {name: value.copy() for name, value in self.model.state()[0].items()}

    def firsts(self, rows: int) -> range:
        return range(0, rows, self.batch)


@pytest.fixture(scope="module")
def trainers() -> list[Compiled]:
    """Three trainers, two, and one, of a global minibatch of twelve."""
    return [Compiled(batch) for batch in (4, 6, 12)]


def test_the_number_of_trainers_changes_nothing(trainers: list[Compiled]) -> None:
    """Whole minibatches and short ones: a trainer without rows, a group that is cut, one row."""
    for seed, rows in enumerate((12, 12, 7, 4, 12, 1)):
        whole = trainers[0].slot_of(12, 12, seed=seed)
        found = [each.step(whole, rows) for each in trainers]
        for other in found[:-1]:
            assert other.keys() == found[-1].keys()
            for name, value in found[-1].items():
                np.testing.assert_allclose(other[name], value, 1e-9, 1e-12, err_msg=name)
        assert all(np.abs(found[-1][name]).max() > 0 for name in AVERAGES)


def test_averages_are_of_groups_of_valid_rows(trainers: list[Compiled]) -> None:
    """By loops, of the input of the first normalisation: the convolution."""
    one = trainers[-1]
    images = np.random.default_rng(1).integers(0, 256, (12, CROP, CROP, 3))
    for rows in (12, 5):
        before = one.model.state()[0]["conv1.norm.running_var"].copy()
        filters = one.model.state()[0]["conv1.weight"].copy()
        whole = one.slot_of(12, 12)
        whole.pictures[...] = images
        outputs = np.zeros((12, *filters.shape[:1], 5, 5))
        for n, k, i, j in np.ndindex(outputs.shape):
            window = images[n, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].transpose(2, 0, 1) - 100.0
            outputs[n, k, i, j] = (window * filters[k]).sum()
        variances, counts = [], []
        for first in range(0, rows, ROWS):
            group = outputs[first : min(first + ROWS, rows)]
            counts.append(len(group))
            variances.append([group[:, k].var(ddof=1) for k in range(len(filters))])
        expected = np.average(variances, axis=0, weights=counts)
        found = one.step(whole, rows)
        np.testing.assert_allclose(found["gradient/conv1.norm.running_var"], expected, rtol=1e-9)
        np.testing.assert_allclose(
            found["conv1.norm.running_var"], 0.9 * before + 0.1 * expected, rtol=1e-9
        )
