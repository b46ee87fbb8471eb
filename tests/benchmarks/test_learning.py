"""The benchmark of what exchanges learn: its commands and its figure, without training."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning import BATCH, Case, CifarAlexNet, are_equal, cases, draw, row
from tandem.artifacts.metrics_log import ValidationRecord
from tandem.config.command_line import load_config
from tandem.config.hardware import RankInfo
from tandem.config.resolve import resolve
from tandem.plot import Run

RANK = RankInfo(0, (0,), (), (), "a processor", (), "mpirun")
RUN = Run("", (), tuple(ValidationRecord(n, 390 * n, 2.0, 0.9 / n, 0.5, 100) for n in (1, 2)))


@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.name)
def test_every_case_has_settings_that_the_program_accepts(case: Case, tmp_path: Path) -> None:
    command = case.command(tmp_path, tmp_path / case.name, 5, 0.25)
    config = load_config(command[command.index("train.py") + 1 :])
    ranks = [RANK] * case.trainers if case.by_mpi else ()
    resolved = resolve(config, ranks)
    assert (resolved.global_batch or resolved.batch_size * case.trainers) == BATCH
    assert len(resolved.devices) == case.trainers


def test_the_network_has_the_layers_of_the_keras_example() -> None:
    shapes = [v.type.shape for v in CifarAlexNet(32, 10, 1.0, "float32").parameters.values()]
    taps = 27 * 64 + 9 * (64 * 192 + 192 * 384 + 384 * 256 + 256 * 256)
    units = 4 * 256 * 4096 + 4096 * 4096 + 4096 * 10
    biases = 64 + 192 + 384 + 256 + 256 + 4096 + 4096 + 10
    assert sum(map(math.prod, shapes)) == taps + units + biases


def test_bytes_are_those_of_all_steps() -> None:
    found = {case.name: row(case, RUN, 1000)["received_bytes"] for case in cases()}
    assert found["average-1"] == 0
    # Of four shares three are others', which are received, and their sums.
    assert found["gradients"] == found["shared"] == 780 * 2 * 3 / 4 * 4000
    assert found["average"] == 2 * found["gradients"] == 4 * found["asa16"]
    assert found["easgd-8"] == 780 * 4000 / 8


def test_weights_are_compared_with_those_of_every_run() -> None:
    one, other = ({"w": np.array([1.0, last])} for last in (2.0, 2.0 + 1e-15))
    assert are_equal([])
    assert are_equal([one, one, one])
    assert not are_equal([one, one, other])


@pytest.mark.parametrize("only", [None, "gosgd"])
def test_a_figure_is_drawn(only: str | None, tmp_path: Path) -> None:
    runs = [(case, RUN) for case in cases() if only in (None, case.name)]
    draw(runs, 1000, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").read_bytes()[1:4] == b"PNG"
