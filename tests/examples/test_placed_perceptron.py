"""The example of a partitioned graph over ranks: one rank, and several by both launchers."""

import re

import pytest

from examples.placed_perceptron import main, train
from tandem.distributed import local_groups
from tests.support.ranks import Starter, need_ranks, run_ranks


def test_one_rank_learns(capsys: pytest.CaptureFixture[str]) -> None:
    losses = train(local_groups(1)[0], steps=100)
    assert losses[-1] < losses[0] / 3
    assert "0 conversions" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_two_ranks_learn_the_same(launcher: Starter, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    expected = capsys.readouterr().out.splitlines()[-1]
    need_ranks(launcher)
    result = run_ranks(2, "-m", ["examples.placed_perceptron"], by=launcher)
    assert result.returncode == 0, result.stderr
    assert re.search(r"0  all-reduce .* 512\n1 conversion,", result.stdout)
    assert result.stdout.splitlines()[-1] == expected
