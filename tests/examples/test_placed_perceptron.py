"""The example of a partitioned graph over ranks: one rank, and several by both launchers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.placed_perceptron import main, train
from tandem.distributed import local_groups
from tests.support.tiny import ROOT


def test_one_rank_learns(capsys: pytest.CaptureFixture[str]) -> None:
    losses = train(local_groups(1)[0], steps=100)
    assert losses[-1] < losses[0] / 3
    assert "0 conversions" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_two_ranks_learn_the_same(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    expected = capsys.readouterr().out.splitlines()[-1]
    python = Path(sys.executable)
    command = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    if launcher == "mpirun":
        command = [str(shutil.which("mpirun", path=python.parent)), "-n", "2", str(python)]
    result = subprocess.run(
        [*command, "-m", "examples.placed_perceptron"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert re.search(r"0  all-reduce .* 512\n1 conversion,", result.stdout)
    assert result.stdout.splitlines()[-1] == expected
