"""docs/fine-tuning.md: its commands are understood, and its worked example does what it says."""

import re
import shlex
from pathlib import Path

import pytest

from tandem.config.command_line import load_config
from tests.support.pages import code_blocks, copy_project, in_shell
from tests.support.tiny import ROOT, read_record

BLOCKS = code_blocks(ROOT / "docs" / "fine-tuning.md")
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
    copy = copy_project(tmp_path)
    demo, pictures, training, classification = BLOCKS[:4]
    assert demo == "make demo"
    short = "--n_epochs 6 --learning_rate 0.02 --lr_policy step --lr_step 4 --snapshot_freq 6"
    demo = f"demo/prepare.sh && python train.py --config demo/config.yaml {short}"
    results = [in_shell(copy, command) for command in (demo, pictures, training, classification)]
    record = read_record(copy / "runs" / "parity")
    errors = [line["top1_error"] for line in record if line["event"] == "validation"]
    assert len(errors) == 4
    assert errors[-1] <= 0.3  # of 0.5 by chance
    named = re.findall(r"^ +([\d.]+) %  (odd|even)$", results[-1], re.MULTILINE)
    best = [name for share, name in named if float(share) >= 50]
    assert len(best) == 50
    assert best.count("odd") >= 35
