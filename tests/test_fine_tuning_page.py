"""docs/fine-tuning.md: its commands are understood, and its worked example does what it says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.command_line import load_config
from tests.support.tiny import ROOT

PAGE = (ROOT / "docs" / "fine-tuning.md").read_text()
BLOCKS = [
    "\n".join(line.removeprefix(indent) for line in block.splitlines())
    for indent, block in re.findall(r"^( *)```bash\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
]
TRAINING = [
    command
    for block in BLOCKS
    for command in block.replace("\\\n", " ").splitlines()
    if command.startswith("python train.py")
]


@pytest.mark.parametrize("command", TRAINING)
def test_its_settings_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(shlex.split(re.sub(r"\$\(.*?\)", "some.safetensors", command))[2:])
    assert config.init_weights_skip == ("fc8",)
    assert config.freeze[:2] == ("conv1", "conv2")
    assert config.lr_multipliers == {"fc8": 10}


def test_there_is_an_example_and_a_case_of_ones_own() -> None:
    assert len(TRAINING) == 2
    assert len(BLOCKS) == 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_worked_example_learns_from_a_hundred_pictures(tmp_path: Path) -> None:
    """Every command of the page, in a copy of the project; the demo's weights are of 6 epochs."""
    copy = tmp_path / "project"
    ignored = shutil.ignore_patterns(".*", "data", "runs", "tests")
    shutil.copytree(ROOT, copy, ignore=ignored)
    shutil.copytree(ROOT / "tandem", copy / "tandem", dirs_exist_ok=True)  # tandem/data, too
    demo, pictures, training, classification = BLOCKS[:4]
    assert demo == "make demo"
    short = "--n_epochs 6 --lr_step 4 --snapshot_freq 6"
    demo = f"demo/prepare.sh && python train.py --config demo/config.yaml {short}"
    results = [in_shell(copy, command) for command in (demo, pictures, training, classification)]
    record = [json.loads(line) for line in (copy / "runs/parity/record.jsonl").open()]
    errors = [line["top1_error"] for line in record if line["event"] == "validation"]
    assert len(errors) == 4
    assert errors[-1] <= 0.3  # of 0.5 by chance
    named = re.findall(r"^ +([\d.]+) %  (odd|even)$", results[-1].stdout, re.MULTILINE)
    best = [name for share, name in named if float(share) >= 50]
    assert len(best) == 50
    assert best.count("odd") >= 35


def in_shell(folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result
