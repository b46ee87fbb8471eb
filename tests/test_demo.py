"""The whole main job on real pictures: `demo/run.sh`, as `make demo` runs it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_digits() -> None:
    shutil.rmtree(ROOT / "runs" / "demo", ignore_errors=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["demo/run.sh"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert result.returncode == 0, result.stderr
    last = result.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"demo: top-1 error ([\d.]+) %, top-5 error ([\d.]+) % of 360 .*", last)
    assert found, last
    assert float(found[1]) <= 5
    names = {path.name for path in (ROOT / "runs" / "demo").iterdir()}
    assert {"record.jsonl", "curves.png", "config.yaml", "epoch-0016.safetensors"} <= names
