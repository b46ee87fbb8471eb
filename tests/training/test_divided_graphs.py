"""Trainers that divide one graph compute what one trainer does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.training.compiled_network import CROPS
from tests.support.divided import Together
from tests.support.trainer_memory import noise_slot

ROWS = 12  # of a global minibatch

slow = pytest.mark.slow


def assert_equal_states(found: Any, expected: Any) -> None:
    """Compare weights and optimizer states relative to the largest value of each."""
    assert list(found[1]) == list(expected[1])
    groups = zip((found[0], *found[1].values()), (expected[0], *expected[1].values()), strict=True)
    for left, right in groups:
        assert list(left) == list(right)
        for name, value in right.items():
            atol = 1e-9 * np.abs(value).max()
            np.testing.assert_allclose(left[name], value, 0, atol, err_msg=name)


def compare(trainers: int, one: Together, **settings: Any) -> Together:
    """Train and validate with several trainers and with one; compare all that is kept."""
    several = Together(trainers, ROWS // trainers, type(one.network), **settings)
    for seed, rows in enumerate((12, 7, 12, 1)):
        whole = noise_slot(one.network, ROWS, rows, seed)
        for each in (several, one):
            each.step(whole, rows, epoch=seed)
    assert_equal_states(several.state(), one.state())
    for crops in (1, CROPS):
        for rows in (12, 5):
            slots = [noise_slot(one.network, ROWS, rows, rows + crop) for crop in range(crops)]
            for slot in slots:
                slot.labels[...] = slots[0].labels
            for each in (several, one):
                each.validate(slots, rows)
    for mode in ("train", "validation"):
        found, expected = several.sums(mode), one.sums(mode)
        assert found.loss == pytest.approx(expected.loss, rel=1e-9)
        assert replace(found, loss=0.0) == replace(expected, loss=0.0)
    assert several.models[0].read_scores().shape == (ROWS // trainers, one.network.classes)
    return several


@pytest.mark.parametrize(
    ("trainers", "kind"),
    [
        (2, "sharded"),
        (3, "single"),
        *(pytest.param(n, kind, marks=slow) for n in (2, 3, 4) for kind in ("sharded", "single")),
    ],
)
def test_the_number_of_trainers_does_not_change_what_is_computed(trainers: int, kind: str) -> None:
    """Minibatches with dropout, of which two are short: some trainers have no row of the last."""
    compare(trainers, Together(1, ROWS, fully_connected=kind), fully_connected=kind)
