"""docs/parallel.md: its blocks are one program, which checks itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import code_blocks
from tests.support.tiny import ROOT, python_path

PAGE = ROOT / "docs" / "parallel.md"


@pytest.mark.slow
def test_the_blocks_are_a_program(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(code_blocks(PAGE, "python")))
    result = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout
    assert re.search(r"^Times\(excerpt=[\d.]+, .*calls=\d+\)$", result.stdout, re.MULTILINE)
