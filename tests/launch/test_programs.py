"""When a run is started again, and when that has an end."""

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.artifacts.checkpoint import RunState
from tandem.artifacts.run_folder import checkpoint_name
from tandem.config.resolve import resolve
from tandem.config.schema import Config
from tandem.launch import programs
from tandem.launch.local import Launcher
from tandem.processes.messages import Failed
from tandem.processes.supervisor import Outcome
from tandem.training.messages import Diverged
from tandem.training.run_spec import RunSpec
from tests.support.tiny import prepare, save_weights

NOT_FINITE = Diverged("trainer 0", "agreed", "not finite", "", 0, 3)
DEATH = Failed("trainer 0", "death", "was killed", "")
BAD = Failed("trainer 0", "input", "disk full", "")


class FakeLauncher(Launcher):
    """Notes each run, and gives the outcomes in turn, then success."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.specs: list[RunSpec] = []
        self._outcomes = [*outcomes]

    def launch(self, spec: RunSpec, *_: Any) -> Outcome:
        self.specs.append(spec)
        return self._outcomes.pop(0) if self._outcomes else Outcome(0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Settings of a run that has begun."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    return Config(
        data_folder=str(prepare(tmp_path / "data")),
        weights_dir=str(run),
        crop_size=67,
        width=0.05,
        batch_size=2,
        devices=("cpu",),
        resume_train=True,
    )


def train(launcher: FakeLauncher, config: Config, **changes: Any) -> int:
    return programs.execute_training(config.model_copy(update=changes), None, launcher).status


@pytest.mark.parametrize(("restarts", "deaths", "status"), [(0, 1, 1), (2, 2, 0), (2, 3, 1)])
def test_after_a_fault_a_run_is_started_again_so_often(
    config: Config, restarts: int, deaths: int, status: int
) -> None:
    launcher = FakeLauncher(*[Outcome(1, DEATH)] * deaths)
    assert train(launcher, config, restarts=restarts) == status
    assert len(launcher.specs) == min(restarts, deaths) + 1
    assert all(spec.config.resume_train for spec in launcher.specs[1:])


class SavingLauncher(FakeLauncher):
    """Saves a step in each run of those whose numbers are given, as survivors do."""

    def __init__(self, saves: Collection[int], *outcomes: Outcome) -> None:
        super().__init__(*outcomes)
        self._saves = saves

    def launch(self, spec: RunSpec, *given: Any) -> Outcome:
        if (number := len(self.specs)) in self._saves:
            state = RunState(0, number + 1, number + 1, global_batch=6, train_pictures=13)
            path = spec.config.weights_path / checkpoint_name(state)
            config = spec.config.model_dump(mode="json")
            save_weights(path, spec.wnids, state=state, config=config, conditions=spec.conditions)
        return super().launch(spec, *given)


@pytest.mark.parametrize(
    ("saves", "least", "deaths", "expected", "status"),
    [
        # Each step that is saved lets a new trainer take the place of the lost one ...
        ({0, 1, 2, 3}, 3, 4, "33333", 0),
        # ... which is left out if it is lost again before one.
        ({0}, 2, 3, "3332", 0),
        ((), 2, 2, "332", 0),
        ((), 2, 3, "332", 1),
        ({0}, 3, 3, "333", 1),
        ((), None, 1, "3", 1),
    ],
)
def test_a_run_goes_on_without_a_trainer_that_is_lost_twice(
    config: Config,
    saves: Collection[int],
    least: int | None,
    deaths: int,
    expected: str,
    status: int,
) -> None:
    launcher = SavingLauncher(saves, *[Outcome(1, replace(DEATH, who="loader 1"))] * deaths)
    changes = {"devices": ("cpu",) * 3, "min_trainers": least, "exchange": "gradients"}
    assert train(launcher, config, **changes) == status
    assert "".join(str(spec.trainers) for spec in launcher.specs) == expected
    assert {spec.global_batch for spec in launcher.specs} == {6}
    assert all(spec.config.exact == (spec.trainers == 3) for spec in launcher.specs)


def test_groups_of_rows_that_do_not_divide_the_whole_are_chosen_anew(tmp_path: Path) -> None:
    """32 of 100 of each of three trainers, and 300 of all; a fault is not a loss."""
    config = Config(batch_size=100, min_trainers=1, weights_dir=str(tmp_path))
    spec: Any = SimpleNamespace(
        config=config, devices=("cpu",) * 3, trainers=3, threads=1, global_batch=300, resumed=None
    )
    losses = programs.Losses()
    assert losses.changes(spec, replace(DEATH, kind="fault")) == {}
    assert "global_batch" not in losses.changes(spec, DEATH)
    found = losses.changes(spec, DEATH)
    assert (found["global_batch"], found["norm_rows"]) == (300, "auto")
    assert resolve(config.model_copy(update=found)).norm_rows == 30


@pytest.mark.parametrize(
    ("outcome", "changes"),
    [
        (Outcome(2, BAD), {}),
        (Outcome(130), {}),
        (Outcome(1, NOT_FINITE), {}),
        (Outcome(1, DEATH, stopped=True), {"on_nan": "rollback"}),
        (Outcome(1, NOT_FINITE, stopped=True), {"on_nan": "rollback"}),
    ],
)
def test_what_would_recur_or_was_requested_is_not_started_again(
    config: Config, outcome: Outcome, changes: dict[str, Any]
) -> None:
    launcher = FakeLauncher(outcome)
    assert train(launcher, config, restarts=5, **changes) == outcome.status
    assert len(launcher.specs) == 1


def test_each_rollback_passes_over_one_minibatch_more(config: Config) -> None:
    launcher = FakeLauncher(Outcome(1, NOT_FINITE), Outcome(1, replace(NOT_FINITE, minibatch=4)))
    assert train(launcher, config, on_nan="rollback") == 0
    assert [spec.skipped for spec in launcher.specs] == [(), ((0, 3),), ((0, 3), (0, 4))]


def test_going_back_again_and_again_has_an_end(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = FakeLauncher(*[Outcome(1, NOT_FINITE)] * 50)
    with caplog.at_level(logging.INFO):
        assert train(launcher, config, on_nan="rollback") == 1
    assert len(launcher.specs) == programs.MOST_ROLLBACKS + 1
    expected = "error: going back did not help: 10 minibatches after the beginning"
    assert caplog.messages[-1].startswith(expected)


def test_after_a_failure_the_newest_checkpoint_is_named(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    newest = config.weights_path / "epoch-0002.safetensors"
    expected = [f"the newest checkpoint is {newest}; continue with --resume_train true"]

    def messages(failure: Failed | None) -> list[str]:
        caplog.clear()
        train(FakeLauncher(Outcome(1 if failure else 130, failure)), config, exact=False)
        return [text for text in caplog.messages if "newest" in text]

    assert messages(DEATH) == []
    launcher = FakeLauncher()
    train(launcher, config)
    for epoch in (1, 2):
        path = newest.with_name(f"epoch-000{epoch}.safetensors")
        save_weights(path, launcher.specs[0].wnids, state=RunState(epoch))
    assert messages(DEATH) == messages(BAD) == expected
    assert messages(None) == []


def test_trainers_without_rows_are_named(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"global_batch": 4, "devices": ("cpu", "cpu")}
    for norm_rows, expected in (("auto", 1), (2, 0)):
        caplog.clear()
        assert train(FakeLauncher(), config, **changes, norm_rows=norm_rows, exact=False) == 0
        found = [text for text in caplog.messages if "1 of 2 trainers get none of the 4" in text]
        assert len(found) == expected


def test_a_resume_names_its_checkpoint_and_the_settings_that_changed(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting of the first command line that is not repeated is back at its default."""
    launcher = FakeLauncher()
    assert train(launcher, config) == 0
    first = launcher.specs[0]
    before = first.config.model_dump(mode="json") | {
        "learning_rate": 0.001,
        "rand_colour": 0.1,
        "devices": ["cpu", "cpu"],
        "print_freq": 7,
        "weights_dir": "elsewhere",
    }
    del before["seed"]  # as in a checkpoint from before a key existed
    path = config.weights_path / "epoch-0002.safetensors"
    save_weights(path, first.wnids, width=0.05, state=RunState(2), config=before)
    changes = {"exact": False, "print_freq": 9}
    with caplog.at_level(logging.INFO):
        assert train(launcher, config, **changes) == 0
    assert f"continuing from {path}" in caplog.messages
    assert (
        "settings differ from the checkpoint's: trainers was 2, now 1; "
        "learning_rate was 0.001, now 0.01; rand_colour was 0.1, now 0.0"
    ) in caplog.messages
    caplog.clear()
    same = {"learning_rate": 0.001, "rand_colour": 0.1, "devices": ("cpu", "cpu")}
    with caplog.at_level(logging.INFO):
        assert train(launcher, config, **changes, **same) == 0
    assert f"continuing from {path}" in caplog.messages
    assert "differ" not in caplog.text
