"""The examples after PyDTNN's listings, on synthetic pictures: by devices, and by ranks."""

import re
from pathlib import Path

import pytest

from examples.keras_cifar import main, make_model

# isort: split
import keras

from tests.support.ranks import Starter, need_ranks, run_ranks
from tests.support.tiny import read_record

TRIAL = ("--synthetic", "--weights_dir")


def test_the_network_has_the_sizes_of_pydtnns() -> None:
    model = make_model()
    assert model.input_shape == (None, 32, 32, 3)
    convolutions = [(3, 64), (64, 192), (192, 384), (384, 256), (256, 256)]
    dense = [(256 * 2 * 2, 4096), (4096, 4096), (4096, 10)]
    expected = sum(9 * i * o + o for i, o in convolutions) + sum(i * o + o for i, o in dense)
    assert model.count_params() == expected


@pytest.mark.slow
def test_a_second_start_only_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--devices", "cpu", "cpu", *TRIAL, str(tmp_path / "run")]
    main(arguments)
    first = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"loss [\d.]+, accuracy [\d.]+", first)
    keras.utils.clear_session()  # layers get the names that they have in a new process
    main(arguments)
    assert capsys.readouterr().out.splitlines()[-1] == first


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_ranks_train_it(tmp_path: Path, launcher: Starter) -> None:
    need_ranks(launcher)
    arguments = ["examples.keras_ranks", *TRIAL, str(tmp_path / "run")]
    result = run_ranks(2, "-m", arguments, timeout=240, by=launcher)
    assert result.returncode == 0, result.stderr
    record = [line for line in read_record(tmp_path / "run") if line["event"] == "validation"]
    assert [line["epoch"] for line in record] == [1, 2]
