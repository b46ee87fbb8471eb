"""docs/ten-lines.md, keras.md: their blocks are programs that check themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import code_blocks
from tests.support.tiny import ROOT, python_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(command: list[str], folder: Path) -> str:
    bin_folder = Path(sys.executable).parent
    result = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_the_tutorial_is_a_program_and_its_commands_work(tmp_path: Path) -> None:
    page = ROOT / "docs" / "ten-lines.md"
    (tmp_path / "digits.py").write_text("\n".join(code_blocks(page, "python")))
    output = run([sys.executable, "digits.py"], tmp_path)
    assert 'Model: "sequential"' in output
    assert "Epoch 6/6\n45/45 - " in output
    for block in code_blocks(page, "bash"):
        output = run(["bash", "-euc", block], tmp_path)
    assert '"event": "validation"' in output
    assert (tmp_path / "digits.onnx").exists()
    assert (tmp_path / "runs" / "digits" / "curves.png").exists()


def test_the_page_of_keras_models_is_a_program_and_its_commands_work(tmp_path: Path) -> None:
    page = ROOT / "docs" / "keras.md"
    (tmp_path / "page.py").write_text("\n".join(code_blocks(page, "python")))
    assert "32 rows a step by 2 trainers: 16, 16" in run([sys.executable, "page.py"], tmp_path)
    for block in code_blocks(page, "bash"):
        run(["bash", "-euc", block], tmp_path)
    assert (tmp_path / "again.keras").exists()
