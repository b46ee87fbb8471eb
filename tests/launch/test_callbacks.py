"""Which methods of callbacks are called when, and what follows when one fails."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tandem.artifacts.checkpoint import RunState
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, to_json
from tandem.artifacts.run_folder import list_checkpoints
from tandem.callbacks import METHODS, Callback
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.launch import callbacks, programs
from tandem.launch.local import Launcher
from tandem.launch.prepare import prepare_run
from tandem.processes.messages import Failed
from tandem.processes.supervisor import Outcome, ProgressReporter
from tandem.training.messages import Continuation, EpochEnded
from tandem.training.run_spec import RunSpec
from tests.support.ranks import need_ranks, run_ranks
from tests.support.tiny import ROOT, run_program, save_weights, settings

HERE = "tests.support.callbacks"
DEATH = Failed("trainer 0", "death", "was killed", "")


class FakeLauncher(Launcher):
    """Reports epochs, a few at each launch, then gives the outcome."""

    def __init__(self, *runs: tuple[tuple[int, ...], Outcome]) -> None:
        self.runs, self.specs = [*runs], list[RunSpec]()

    def launch(self, spec: RunSpec, reporter: ProgressReporter, *_: Any) -> Outcome:
        self.specs.append(spec)
        epochs, outcome = self.runs.pop(0)
        reporter.begin(SimpleNamespace(), {})  # type: ignore[arg-type]
        for epoch in epochs:
            for loss in (3.0, 2.0):
                reporter.report(TrainRecord(epoch, 1, loss, 0.5, 0.1 / loss, 10.0, 1.0, 0.0, 0.0))
            reporter.report(ValidationRecord(epoch, 4, 1.5, 0.25, 0.125, 7))
            answer = reporter.report(EpochEnded(epoch)) if spec.waits else None
            if reporter.failure is not None:
                assert answer == Continuation(ends=True)
                return Outcome(1, reporter.failure)
            if answer == Continuation(ends=True):
                return Outcome(0)
        return outcome


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_TEST_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Config:
    return Config(
        data_folder=str(data),
        batch_size=2,
        weights_dir=str(tmp_path / "run"),
        crop_size=67,
        width=0.05,
        devices=("cpu",),
        n_epochs=2,
        exact=False,
        callbacks=(f"{HERE}:Log",),
    )


def train(launcher: Launcher, config: Config, **changes: Any) -> int:
    lock: Any = None
    return programs.execute_training(config.model_copy(update=changes), lock, launcher).status


def read(calls: Path) -> list[list[Any]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_a_run_may_end_at_its_beginning(config: Config) -> None:
    """As where a callback has missed the epoch's end that it answers so."""
    beginning = SimpleNamespace(on_train_begin=lambda settings: True)
    spec = prepare_run(config.model_copy(update={"callbacks": ()}))
    assert callbacks.Callbacks([beginning]).begin(spec) == Outcome(0)


def test_a_run_calls_each_method_at_its_time(config: Config, calls: Path) -> None:
    assert train(FakeLauncher(((1, 2), Outcome(0))), config) == 0
    begin, *others = read(calls)
    assert begin[0] == "on_train_begin"
    assert (begin[1]["batch_size"], begin[1]["loader_threads"]) == (2, 1)
    assert begin[1].keys() == Config.model_fields.keys()  # also of what config.yaml leaves out
    record = {
        "step": 4,
        "loss": 1.5,
        "top1_error": 0.25,
        "top5_error": 0.125,
        "images": 7,
        "train_loss": 2.5,
        "train_top1_error": 0.5,
        "images_per_second": 10.0,
        "learning_rate": 0.05,
    }
    assert others == [
        ["on_epoch_begin", 1],
        ["on_epoch_end", 1, {"epoch": 1, **record}],
        ["on_epoch_begin", 2],
        ["on_epoch_end", 2, {"epoch": 2, **record}],
        ["on_train_end", {"status": 0, "weights": None, "record": {"epoch": 2, **record}}],
    ]


def test_an_epoch_without_reports_has_no_means() -> None:
    validation = ValidationRecord(1, 4, 1.5, 0.25, 0.125, 7)
    found = callbacks.summarised(validation, [])
    assert {key for key, value in found.items() if value is None} == {
        *("train_loss", "train_top1_error", "images_per_second", "learning_rate")
    }
    measured = replace(validation, metrics={"f1": 0.5})
    assert callbacks.summarised(measured, []) == found | {"f1": 0.5}
    unknown = TrainRecord(1, 1, 3.0, None, 0.1, 10.0, 1.0, 0.0, 0.0)
    assert callbacks.summarised(validation, [unknown])["train_top1_error"] is None


def test_after_a_restart_the_same_objects_go_on(config: Config, calls: Path) -> None:
    launcher = FakeLauncher(((1,), Outcome(1, DEATH)), ((2,), Outcome(0)))
    names = [call[0] for call in read_after(launcher, config, calls, restarts=1)]
    one = ["on_epoch_begin", "on_epoch_end"]
    # Without a checkpoint the first epoch begins again.
    assert names == ["on_train_begin", *one, "on_epoch_begin", *one, "on_train_end"]


def read_after(launcher: Launcher, config: Config, calls: Path, **changes: Any) -> list[list[Any]]:
    train(launcher, config, **changes)
    return read(calls)


def test_a_resumed_run_begins_with_its_epoch(config: Config, calls: Path) -> None:
    config.weights_path.mkdir()
    path = config.weights_path / "epoch-0001.safetensors"
    save_weights(path, None, 3, width=0.05, state=RunState(1))
    launcher = FakeLauncher(((2,), Outcome(143, stopped=True)))
    found = read_after(launcher, config, calls, resume_train=True)
    assert found[1] == ["on_epoch_begin", 2]
    assert found[-1][1]["status"] == 143
    assert found[-1][1]["weights"] == str(path)


def test_the_means_of_a_continued_epoch_are_of_all_its_reports(config: Config, calls: Path) -> None:
    config.weights_path.mkdir()
    state = RunState(1, step_in_epoch=2, step=5)
    save_weights(
        config.weights_path / "epoch-0001-step-000005.safetensors", None, 3, width=0.05, state=state
    )
    places = [(1, 3, 9.0), (2, 5, 4.0), (2, 6, 9.0)]  # the last lies after the checkpoint
    reports = [TrainRecord(e, s, loss, 0.5, 0.1, 10.0, 1.0, 0.0, 0.0) for e, s, loss in places]
    lines = [to_json(report) + "\n" for report in reports]
    (config.weights_path / "record.jsonl").write_text("".join(lines))
    launcher = FakeLauncher(((2,), Outcome(0)))
    found = read_after(launcher, config, calls, resume_train=True)
    (record,) = [call[2] for call in found if call[0] == "on_epoch_end"]
    assert record["train_loss"] == (4.0 + 3.0 + 2.0) / 3


def test_a_run_that_is_complete_begins_and_ends(config: Config, calls: Path) -> None:
    config.weights_path.mkdir()
    path = config.weights_path / "epoch-0002.safetensors"
    save_weights(path, None, 3, width=0.05, state=RunState(2))
    found = read_after(FakeLauncher(), config, calls, resume_train=True)
    result = {"status": 0, "weights": str(path), "record": None}
    assert [found[0][0], *found[1:]] == ["on_train_begin", ["on_train_end", result]]


def test_no_epoch_begins_after_training_has_ended_early(config: Config, calls: Path) -> None:
    """By the epochs of the checkpoint that was resumed as well."""
    config.weights_path.mkdir()
    state = RunState(1, history=({"validation_loss": 1.0},))
    path = config.weights_path / "epoch-0001.safetensors"
    save_weights(path, None, 3, width=0.05, state=state)
    changes = {"resume_train": True, "n_epochs": 4, "stop_patience": 2}
    launcher = FakeLauncher(((2, 3), Outcome(0)))
    found = read_after(launcher, config, calls, **changes)
    assert [number for name, number, *_ in found if name == "on_epoch_begin"] == [2, 3]


class Ends(Callback):
    """Ends training after an epoch; keeps what it is called with."""

    def __init__(self, epoch: int, answer: Any = True) -> None:
        self.epoch, self.answer, self.seen = epoch, answer, list[Any]()

    def on_epoch_begin(self, epoch: int) -> None:
        self.seen.append(epoch)

    def on_epoch_end(self, epoch: int, record: Any) -> Any:
        self.seen.append(dict(record.logs))
        return epoch == self.epoch and self.answer


def test_objects_of_a_caller_are_called_first_and_may_end_training(
    config: Config, calls: Path
) -> None:
    """All are called at the end of the epoch, and none at the begin of the next."""
    mine = Ends(1)
    shown: list[RunSpec] = []

    def make_reporter(spec: RunSpec) -> ProgressReporter:
        shown.append(spec)
        return ProgressReporter()

    launcher, lock = FakeLauncher(((1, 2), Outcome(1, DEATH))), Path()
    own = callbacks.Callbacks([mine])
    outcome = programs.execute_training(config, lock, launcher, own, make_reporter)  # type: ignore[arg-type]
    assert outcome == Outcome(0)
    logs = {"loss": 2.5, "val_loss": 1.5, "learning_rate": 0.05}
    assert mine.seen == [1, logs]
    assert [call[0] for call in read(calls)] == [
        *("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")
    ]
    assert shown == launcher.specs


def test_only_true_ends_training(config: Config) -> None:
    """Not what a function happens to return, such as a number."""
    mine = Ends(1, 1)
    changed = config.model_copy(update={"callbacks": ()})
    lock: Any = None
    launcher = FakeLauncher(((1, 2), Outcome(0)))
    programs.execute_training(changed, lock, launcher, callbacks.Callbacks([mine]))
    assert [each for each in mine.seen if isinstance(each, int)] == [1, 2]


def test_trainers_wait_only_for_callbacks(config: Config, calls: Path) -> None:
    for names in ((), config.callbacks):
        launcher = FakeLauncher(((1, 2), Outcome(0)))
        train(launcher, config, callbacks=names)
        assert launcher.specs[0].waits == bool(names)


@pytest.mark.parametrize(("ends", "launches"), [(None, 2), (2, 1)])
def test_an_epoch_end_that_a_failure_has_swallowed_comes_after_the_restart(
    config: Config, ends: int | None, launches: int
) -> None:
    """The trainers have written the checkpoint, and ended before the callbacks were called."""

    class Failing(FakeLauncher):
        def launch(self, spec: RunSpec, reporter: ProgressReporter, *rest: Any) -> Outcome:
            outcome = super().launch(spec, reporter, *rest)
            if len(self.specs) == 1:
                folder = spec.config.weights_path
                folder.mkdir()
                save_weights(folder / "epoch-0002.safetensors", None, 3, width=0.05, state=second)
                lines = [ValidationRecord(epoch, 4, 1.5 * epoch, 0.5, 0.5, 7) for epoch in (1, 2)]
                (folder / "record.jsonl").write_text("".join(to_json(x) + "\n" for x in lines))
            return outcome

    second = RunState(2, history=({}, {}))
    mine, lock = Ends(ends or 9), Path()
    launcher = Failing(((1,), Outcome(1, DEATH)), ((3,), Outcome(0)))
    changed = config.model_copy(update={"callbacks": (), "restarts": 1, "n_epochs": 3})
    outcome = programs.execute_training(changed, lock, launcher, callbacks.Callbacks([mine]))  # type: ignore[arg-type]
    assert (outcome, len(launcher.specs)) == (Outcome(0), launches)
    losses = [each["val_loss"] for each in mine.seen if isinstance(each, dict)]
    assert losses == [1.5, 3.0, 1.5][: launches + 1]
    epochs = [each for each in mine.seen if isinstance(each, int)]
    assert epochs == [1, 2, 3][: launches + 1]


@pytest.mark.parametrize(
    ("error", "status"), [(OSError, 1), (KeyboardInterrupt, 130), (InputError, 2)]
)
def test_what_no_process_reports_ends_training_too(
    config: Config, calls: Path, error: type[BaseException], status: int
) -> None:
    """Such as processes that cannot be started, and Ctrl-C before a restart."""

    class Broken(Launcher):
        def launch(self, *_: Any) -> Outcome:
            raise error

    with pytest.raises(error):
        train(Broken(), config)
    result = {"status": status, "weights": None, "record": None}
    assert read(calls)[1:] == [["on_train_end", result]]


def test_a_run_that_is_refused_calls_nothing(config: Config, calls: Path) -> None:
    with pytest.raises(InputError):
        train(FakeLauncher(), config, crop_size=1000)
    assert not calls.exists()


@pytest.mark.parametrize(
    ("kind", "launches", "where"),
    [
        ("Broken", 1, "on_epoch_end"),
        ("BrokenBegin", 0, "on_train_begin"),
        ("BrokenEnd", 1, "on_train_end"),
    ],
)
def test_a_failure_ends_the_run_without_a_restart(
    config: Config, caplog: pytest.LogCaptureFixture, kind: str, launches: int, where: str
) -> None:
    launcher = FakeLauncher(((1, 2), Outcome(0)), ((1, 2), Outcome(0)))
    names = (f"{HERE}:{kind}", f"{HERE}:BrokenEnd")
    assert train(launcher, config, callbacks=names, restarts=3) == 1
    assert len(launcher.specs) == launches
    if kind != "Broken":  # whose failure the launcher explains
        who = f"callback {HERE}:{kind}, {where}"
        assert caplog.messages[-2].startswith(f"{who} failed:\nTraceback")
        expected = f"error: the run has ended: {who}: OSError: no connection"
        assert caplog.messages[-1] == expected


class Broken:
    def on_epoch_end(self, epoch: int, record: Any) -> None:
        raise OSError("no connection")


@pytest.mark.usefixtures("calls")
def test_an_object_is_named_when_it_fails(config: Config) -> None:
    lock: Any = None
    objects = callbacks.Callbacks([Broken()])
    launcher = FakeLauncher(((1,), Outcome(0)))
    failure = programs.execute_training(config, lock, launcher, objects).failure
    assert failure is not None
    assert failure.who == "callback Broken, on_epoch_end"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:Logs", "callbacks: the module .* has no class 'Logs'; did you mean .*:Log?"),
        ("nowhere:Log", "callbacks: there is no module 'nowhere' for nowhere:Log"),
        (f"{HERE}:NoCallback", "NoCallback without methods of a callback, expected at least one"),
        (f"{HERE}:WithArgument", "not made without arguments .missing a required argument: 'proj"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_start(
    config: Config, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare_run(config.model_copy(update={"callbacks": (name,)}))


def test_the_base_class_has_every_method() -> None:
    assert {name for name in vars(Callback) if name.startswith("on_")} == {*METHODS}


def recipes() -> dict[str, str]:
    """Classes of the page, by name: the code that defines each."""
    text = (ROOT / "docs" / "callbacks.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return {name: b for b in blocks for name in re.findall(r"class (\w+)\(Callback\)", b)}


@pytest.mark.parametrize("name", ["Beep", "WeightsAndBiases", "MLflow"])
def test_a_recipe_of_the_page_works_with_a_stand_in(
    config: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wandb, mlflow = MagicMock(), MagicMock()
    module: Any = ModuleType("my_callbacks")
    for key, value in {"wandb": wandb, "mlflow": mlflow, "my_callbacks": module}.items():
        monkeypatch.setitem(sys.modules, key, value)
    exec(recipes()[name], vars(module))
    launcher = FakeLauncher(((1, 2), Outcome(0)))
    assert train(launcher, config, callbacks=(f"my_callbacks:{name}",)) == 0
    if name == "WeightsAndBiases":
        assert wandb.init.call_args.kwargs["config"]["n_epochs"] == 2
        assert wandb.init.return_value.log.call_args.kwargs == {"step": 2}
        assert wandb.init.return_value.finish.call_args.kwargs == {"exit_code": 0}
    if name == "MLflow":
        assert mlflow.log_metrics.call_args.args[0]["train_loss"] == 2.5
        assert mlflow.end_run.call_args.args == ("FINISHED",)


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_processes_calls_them_in_the_launcher(
    data: Path, tmp_path: Path, calls: Path, ranks: int
) -> None:
    arguments = settings(data, tmp_path / "run", n_epochs=2, callbacks=f"{HERE}:Log")
    if ranks == 1:
        result = run_program("train.py", arguments)
    else:
        need_ranks()
        result = run_ranks(2, "train.py", arguments)
    assert result.returncode == 0, result.stderr
    found = read(calls)
    one = ["on_epoch_begin", "on_epoch_end"]
    assert [call[0] for call in found] == ["on_train_begin", *one, *one, "on_train_end"]
    assert found[-1][1]["weights"] == str(list_checkpoints(tmp_path / "run")[-1])
    assert found[-1][1]["record"] == found[-2][2]


@slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "steps"), [("Broken", "-step-"), ("BrokenEpoch", None)])
def test_a_failure_in_a_run_keeps_a_checkpoint(
    data: Path, tmp_path: Path, ranks: int, kind: str, steps: str | None
) -> None:
    changes = {"n_epochs": 5000, "callbacks": f"{HERE}:{kind}"}
    arguments = settings(data, tmp_path / "run", **changes)
    if ranks == 1:
        result = run_program("train.py", [*arguments, "--restarts", "3"])
    else:
        need_ranks()
        result = run_ranks(2, "train.py", arguments)
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("OSError: no connection") == 2  # traceback and message
    assert "Traceback (most recent call last)" in result.stderr
    found = list_checkpoints(tmp_path / "run")
    assert bool(found) == (steps is not None)
    assert all(path.name.startswith("epoch-0001") for path in found)


def test_a_validation_needs_no_callback(data: Path, tmp_path: Path) -> None:
    """Nor would one that a found file names be imported."""
    weights = save_weights(tmp_path / "w.safetensors", None, 3, width=0.05)
    changes = {"callbacks": ("nowhere:Log",), "devices": ("cpu",)}
    own = {
        "data_folder": str(data),
        "weights_dir": str(tmp_path),
        "crop_size": 67,
        "width": 0.05,
        "batch_size": 2,
    }
    prepare_run(Config(**own, **changes), "validate", weights)
