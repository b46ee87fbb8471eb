"""The training steps of a run against the same steps in plain PyTorch."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.against_pytorch import main
from tests.support.runs import train
from tests.support.tiny import ROOT, prepare

STEPS = 8  # two epochs of 13 pictures, four a step: the last of each epoch is of one picture


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    changes = {"devices": ["cpu", "cpu"], "batch_size": 2, "n_epochs": 2, "precision": "float32"}
    return train(prepare(folder / "data"), folder / "run", **changes)


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, to tamper with."""
    monkeypatch.chdir(ROOT)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def compare(run: Path, *options: str, steps: int = STEPS) -> int:
    return main([str(run), "--steps", str(steps), *options])


def rewrite_record(run: Path, of_step: int, **changes: object) -> None:
    """Change the training record of one step."""
    path = run / "record.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["event"] == "train" and record["step"] == of_step:
            record |= changes
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_every_step_has_the_loss_of_plain_pytorch(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(run) == 0
    *steps, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert summary["steps"] == STEPS
    assert summary["largest_difference"] < 1e-5


@pytest.mark.parametrize("loss", [2.5, None])
def test_another_loss_is_found(run: Path, loss: float | None) -> None:
    rewrite_record(run, 3, loss=loss)
    assert compare(run) == 1
    assert compare(run, steps=2) == 0


def test_the_tolerance_decides(run: Path) -> None:
    assert compare(run, "--tolerance", "-1", steps=1) == 1


@pytest.mark.parametrize(
    ("missing", "steps", "message"),
    [
        (3, STEPS, f"steps 1 to {STEPS} are not all recorded"),
        (STEPS, STEPS, f"steps 1 to {STEPS} are not all recorded"),
        (None, STEPS + 1, f"steps 1 to {STEPS + 1} are not all recorded"),
        (None, 0, "--steps is 0"),
    ],
)
def test_missing_steps_are_refused(
    run: Path, missing: int | None, steps: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing is not None:
        rewrite_record(run, missing, step=STEPS + 1)
    assert compare(run, steps=steps) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "use_momentum: false",
        "use_nesterov_momentum: true",
        "precision: bfloat16",
        "init_weights: a.safetensors",
        "freeze: [conv1]",
        "norm_before_pool: true",
        "lr_policy: auto",
        "lr_policy: plateau",
        "loss: mse",
        "label_smoothing: 0.1",
        "rand_colour: 0.1",
    ],
)
def test_what_plain_pytorch_does_not_repeat_is_refused(
    run: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = line.partition(":")[0]
    path = run / "config.yaml"
    kept = [old for old in path.read_text().splitlines() if not old.startswith(f"{key}:")]
    path.write_text("\n".join([*kept, line]) + "\n")
    assert compare(run) == 2
    assert f"{path}: {key} is " in capsys.readouterr().err


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    assert compare(tmp_path) == 2
