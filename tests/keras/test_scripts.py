"""Scripts that use Keras's models as users start them: without a guard, killed, over ranks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.artifacts.run_folder import list_checkpoints
from tests.support.ranks import Starter, command, need_ranks
from tests.support.tiny import ROOT, finish, is_gone, python_path, start, wait_until

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "tests" / "support" / "keras_script.py"


def started(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    return start(command, folder, stderr=subprocess.STDOUT, env=environment)


def run(command: list[str], folder: Path) -> str:
    return finish(started(command, folder), timeout=400)[0]


def script(folder: Path, devices: str = "cpu", epochs: int = 3) -> list[str]:
    return [sys.executable, str(SCRIPT), str(folder / "run"), devices, str(epochs)]


def totals(output: str) -> list[float]:
    """The sum of all weights that each rank shows."""
    return [float(found) for found in re.findall(r"last 2 (\S+)", output)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The weights of a script that has trained with one trainer."""
    folder = tmp_path_factory.mktemp("one")
    output = run(script(folder), folder)
    assert "32 rows a step by 1 trainer: 32, in groups of 8" in output
    return totals(output)[0]


def test_three_trainers_learn_what_one_does(one: float, tmp_path: Path) -> None:
    """It is read from standard input, as a notebook's cells are: there is no file of it."""
    arguments = script(tmp_path, "cpu,cpu,cpu")
    line = f"{sys.executable} - {' '.join(arguments[2:])} < {SCRIPT}"
    output = run(["bash", "-c", line], tmp_path)
    assert "32 rows a step by 3 trainers: 16, 8, 8" in output
    assert totals(output) == [pytest.approx(one, rel=1e-9)]


@pytest.mark.parametrize("starter", ["mpirun", "torchrun"])
def test_ranks_learn_what_one_process_does(one: float, tmp_path: Path, starter: Starter) -> None:
    need_ranks(starter)
    output = run([*command(2, starter), *script(tmp_path)[1:]], tmp_path)
    assert totals(output) == [pytest.approx(one, rel=1e-9)] * 2


def test_a_killed_script_ends_with_the_same_bits(one: float, tmp_path: Path) -> None:
    """Also the rates that a callback has decided, and those of the second fit."""
    process = started(script(tmp_path), tmp_path)
    wait_until(lambda: len(list_checkpoints(tmp_path / "run")) >= 3, 200)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert is_gone(process.pid, 20)
    assert not (tmp_path / "run-2").exists()
    assert totals(run(script(tmp_path), tmp_path)) == [one]


INTERRUPTED = """
import numpy as np, tandem.keras, keras
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
tandem.keras.distribute(model, devices=["cpu"], run="run")
before = model.get_weights()[0]
say = keras.callbacks.LambdaCallback(on_epoch_end=lambda *a: print("epoch", flush=True))
try:
    model.fit(np.ones((64, 4)), np.ones(64), 8, 100_000, callbacks=[say], verbose=0)
except KeyboardInterrupt:
    from tandem.artifacts.checkpoint import read_checkpoint
    from tandem.artifacts.run_folder import list_checkpoints
    kept = read_checkpoint(list_checkpoints("run")[-1]).weights["dense.weight"]
    now = model.get_weights()[0]
    print("kept", np.array_equal(kept, now), not np.array_equal(before, now))
"""


def test_an_interrupted_fit_keeps_the_weights(tmp_path: Path) -> None:
    process = started([sys.executable, "-c", INTERRUPTED], tmp_path)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line != "epoch\n":
        pass
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert "kept True True" in output, output


def test_numbers_that_are_not_finite_end_a_fit(tmp_path: Path) -> None:
    """Well with Keras's callback, and as a failure of the run without."""
    import tandem.keras
    from tandem.errors import RunError
    from tests.support.keras_models import keras

    x, y = [[1.0]] * 8, [1.0] * 8
    for number, callbacks in enumerate([[keras.callbacks.TerminateOnNaN()], []]):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e30), "mse")
        tandem.keras.distribute(model, ["cpu"], tmp_path / f"{number}")
        if callbacks:
            assert model.fit(x, y, epochs=9, callbacks=callbacks, verbose=0).epoch != [*range(9)]
        else:
            with pytest.raises(RunError, match="not finite"):
                model.fit(x, y, epochs=9, verbose=0)
