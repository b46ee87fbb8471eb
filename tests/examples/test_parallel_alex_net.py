"""AlexNet by data-parallel functions: the weights of `train.py`, and what it prints."""

import re
from pathlib import Path

import numpy as np
import pytest

import tandem.parallel as synk
from alex_net import AlexNet
from examples.parallel_alex_net import ParallelAlexNet, main, read, train
from tests.support.runs import train as run_train
from tests.support.runs import weights
from tests.support.tiny import prepare, read_record

EPOCHS, BATCH = 2, 4  # of 13 pictures: the last minibatch has one, so that a worker has none


@pytest.mark.slow
def test_its_weights_are_those_of_a_run(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "data")
    run = run_train(
        folder, tmp_path / "run", batch_size=BATCH, n_epochs=EPOCHS, precision="float64"
    )
    synk.fork(2, use_gpu=False, threads=1)
    try:
        data = read(folder)
        model = ParallelAlexNet(AlexNet(67, 3, 0.05, "float64"), data.mean)
        losses = list(train(model, data, EPOCHS, BATCH))
        ours = {name: v.get_value() for name, v in model.weights.views.items()}
    finally:
        synk.close()
    recorded = [line["loss"] for line in read_record(run) if line["event"] == "train"]
    np.testing.assert_allclose(losses, recorded, rtol=1e-12)
    theirs = weights(run)
    begun = dict(AlexNet(67, 3, 0.05, "float64").initial_values(seed=1))
    for name, value in ours.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=1e-12 * scale, err_msg=name)
        assert np.abs(value - begun[name]).max() > 1e-6 * scale  # it has been trained


@pytest.mark.slow
def test_it_prints_the_loss_of_each_minibatch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--epochs", "2"]) == 0
    losses = re.findall(r"^step \d+: loss ([\d.]+) nats$", capsys.readouterr().out, re.MULTILINE)
    assert len(losses) == 4
    assert all(1 < float(loss) < 2 for loss in losses)
