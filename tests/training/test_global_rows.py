"""What every trainer knows of the rows of a global minibatch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.data.order import epoch_order, global_minibatch, trainer_shares
from tandem.training.global_rows import GlobalRows
from tandem.training.run_spec import RunSpec
from tandem.training.trainer import Trainer


@pytest.fixture
def rows() -> GlobalRows:
    """Of three trainers of two rows: 10 rows of training, 7 of validation."""
    return GlobalRows(a_spec())


def a_spec() -> RunSpec:
    spec: Any = SimpleNamespace(
        config=SimpleNamespace(batch_size=2, shuffle="images", seed=5, summed_rows=None),
        train=SimpleNamespace(size=10, counts=(10,)),
        validation=SimpleNamespace(size=7, counts=(7,)),
        trainers=3,
        global_batch=6,
        shares=trainer_shares(6, 3, 2),
        crops=1,
        passes=lambda rows, rank: trainer_shares(6, 3, 2)[rank : rank + 1],
    )
    return spec  # type: ignore[no-any-return]


def test_rows_are_those_of_the_epochs_order(rows: GlobalRows) -> None:
    for epoch, step in ((0, 0), (0, 1), (1, 0), (0, 1)):
        expected = global_minibatch(epoch_order((10,), "images", 5, epoch), step, 6)
        np.testing.assert_array_equal(rows.train(epoch, step), expected)


def test_the_last_minibatch_is_short(rows: GlobalRows) -> None:
    assert [rows.count("train", step) for step in (0, 1)] == [6, 4]
    assert [rows.count("validation", step) for step in (0, 1)] == [6, 1]
    assert list(rows.shares(0)) == [1 / 3] * 3
    assert list(rows.shares(1)) == [0.5, 0.5, 0.0]


class Divided(Trainer):
    """Trainer 1 of three that divide a graph, of which the last two find a loss not finite."""

    def __init__(self, division: Any, finite: bool) -> None:
        self.rank, self.spec = 1, a_spec()
        self.config, self.rows = self.spec.config, GlobalRows(self.spec)
        quiet: Any = SimpleNamespace(enter=lambda *_: None, end=lambda: 0, show=lambda *_: None)
        self.timer = self.status = quiet
        self.calls: list[Any] = []
        self.memory: Any = SimpleNamespace(slots=["slot"])
        self.pipeline: Any = Rows()
        self.model: Any = SimpleNamespace(
            division=division,
            compute_gradients=lambda *given: self.calls.append(given),
            validate=lambda *given: self.calls.append(given),
            is_finite=lambda: finite,
        )
        self.exchange: Any = SimpleNamespace(before_gradients=self.calls.append)
        self.reports: Any = SimpleNamespace(samples=None)
        self._is_first_step = False
        self.refusals: Any = SimpleNamespace(refuse=lambda *given: self.calls.append(given))
        self._seconds: Any = 0

    def _vote(self, not_finite: tuple[int, ...]) -> Any:
        both = SimpleNamespace(not_finite=not_finite)
        return [SimpleNamespace(not_finite=()), both, both]


class Rows:
    """One slot, with the rows of a trainer."""

    indices = np.array([3, 4])

    def __next__(self) -> int:
        return 0


def test_trainers_that_divide_a_graph_add_up_terms() -> None:
    """Each passes the whole minibatch, which is refused as one; its gradients have no weight."""
    trainer = Divided("division", finite=False)
    at: Any = SimpleNamespace(epoch=0, minibatch=1)
    trainer._step_together(at, 0.1)
    shares, (slot, epoch, count, global_rows, _), (_, rate, refused) = trainer.calls
    assert shares == (1.0, 1.0, 1.0)
    assert (slot, epoch, count, rate) == ("slot", 0, 2, 0.1)
    assert global_rows.tolist() == refused == trainer.rows.train(0, 1).tolist()
    trainer.calls.clear()
    trainer._validate_step(1)
    assert trainer.calls == [("slot", 1)]


def test_others_have_a_share_of_the_rows() -> None:
    trainer = Divided(None, finite=False)
    at: Any = SimpleNamespace(epoch=0, minibatch=1)
    trainer._step_together(at, 0.1)
    shares, (*_, global_rows, total), (*_, refused) = trainer.calls
    assert (shares, global_rows, refused) == ([0.5, 0.5, 0.0], None, [3, 4])
    assert total == len(trainer.rows.train(0, 1))
    trainer.calls.clear()
    trainer._validate_step(0)
    assert trainer.calls == [("slot", trainer.rows.count("validation", 0))]
