"""The training steps of a run against the same steps in plain PyTorch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.against_pytorch import main
from tests.support.runs import train
from tests.support.tiny import ROOT, prepare

STEPS = 8  # two epochs of 13 pictures, four a step: the last of each epoch is of one picture
ALONE = {"devices": ["cpu"], "batch_size": 4, "para_load": False}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    changes = {**ALONE, "n_epochs": 2, "precision": "float32"}
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


@pytest.mark.slow
def test_every_step_has_the_loss_of_plain_pytorch(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(run) == 0
    *steps, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert summary["steps"] == STEPS
    assert summary["largest_difference"] < 1e-5


@pytest.mark.slow
def test_another_loss_is_found(run: Path) -> None:
    rewrite_record(run, 3, loss=2.5)
    assert compare(run) == 1
    assert compare(run, steps=2) == 0
    rewrite_record(run, 3, step=STEPS + 1)
    assert compare(run) == 2  # not all are recorded


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["use_momentum: false", "precision: bfloat16", "loss: mse"],
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


@pytest.mark.slow
def test_every_epoch_has_the_error_of_plain_pytorch(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--epochs", "2"]) == 0
    first, second, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for number, found in enumerate((first, second), start=1):
        assert found["epoch"] == number
        assert found["ours"] == found["plain"]
    assert summary == {"epochs": 2, "last_difference": 0}
    assert main([str(run), "--epochs", "2", "--points", "-1"]) == 1


@pytest.mark.slow
def test_a_resnet_normalises_the_groups_of_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups of 2 rows in minibatches of 8 over two trainers; the last minibatch has 5."""
    network = {"network": "tandem.models.resnet:ResNet20", "crop_size": 16, "norm_rows": 2}
    changes = {"devices": ["cpu", "cpu"], "batch_size": 4, "n_epochs": 2, "precision": "float64"}
    folder = train(
        prepare(tmp_path / "data", train=21), tmp_path / "run", **network | changes, width=1.0
    )
    monkeypatch.chdir(ROOT)
    assert compare(folder, steps=6) == 0
    *_, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert summary["largest_difference"] < 1e-7
    assert main([str(folder), "--epochs", "2", "--points", "0"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trial_on_cifar_runs_as_its_page_says(tmp_path: Path) -> None:
    """On a few pictures of noise."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    settings = {"PYTHON": sys.executable, "EPOCHS": "1", "STEPS": "3", "BATCH": "4"}
    result = subprocess.run(
        ["benchmarks/cifar.sh", tmp_path / "pictures", tmp_path / "out"],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode in (0, 1), result.stderr  # a picture more or less is 17 %
    for name, count in (("steps", 3), ("epochs", 1)):
        assert len((tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()) == count + 1
