"""The whole main job on real pictures: `demo/run.sh`, as `make demo` runs it."""

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pages import code_blocks
from tests.support.tiny import ROOT, python_path, read_record


def check_excerpt(printed: str) -> None:
    """Find each line that the README shows, but for its numbers, in order."""
    (shown,) = code_blocks(ROOT / "README.md", "text")
    lines = iter(without_numbers(printed).splitlines())
    for line in without_numbers(shown).splitlines():
        assert line == "..." or line in lines, line


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.:]*|(?<= ) +", "", text)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_digits() -> None:
    shutil.rmtree(ROOT / "runs" / "demo", ignore_errors=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["demo/run.sh"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert result.returncode == 0, result.stdout
    check_excerpt(result.stdout)
    last = result.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"demo: top-1 error ([\d.]+) %, top-5 error ([\d.]+) % of 360 .*", last)
    assert found, last
    assert float(found[1]) <= 5
    record = read_record(ROOT / "runs" / "demo")
    errors = [line["top1_error"] for line in record if line["event"] == "validation"]
    # In the last quarter nothing is unlearned; a hundredth is four pictures.
    assert max(after - before for before, after in pairwise(errors[11:])) <= 0.02, errors
    names = {path.name for path in (ROOT / "runs" / "demo").iterdir()}
    assert {"record.jsonl", "curves.png", "config.yaml", "epoch-0016.safetensors"} <= names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_of_arrays_learns_fashion_mnist(tmp_path: Path) -> None:
    """A small network on all pictures, 12 epochs, two processes: at least 91 %."""
    run = tmp_path / "run"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start() -> str:
        result = subprocess.run(
            ["demo/keras.sh", "--weights_dir", str(run)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path, "PYTHONPATH": python_path()},
        )
        if "no connection" in result.stderr:
            pytest.skip("Fashion-MNIST is not here, and there is neither apt nor a network")
        assert result.returncode == 0, result.stderr
        return result.stdout.strip().splitlines()[-1]

    last = start()
    found = re.fullmatch(r"([\d.]+) % of 10,000 test pictures are right; see (\S+)", last)
    assert found, last
    assert float(found[1]) >= 91
    assert Path(found[2]).stat().st_size > 10_000
    validation = [line for line in read_record(run) if line["event"] == "validation"]
    assert len(validation) == 12
    assert 100 * (1 - validation[-1]["top1_error"]) == pytest.approx(float(found[1]), abs=0.005)
    assert start() == last  # a finished run is not trained again
