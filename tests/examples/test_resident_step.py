"""The training step by hand: that it learns, and that it is launched as its docstring says."""

import re

import numpy as np
import pytest

from examples.resident_step import ResidentStep, main
from tandem.backend import device_mode


def test_the_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "5"]) == 0
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) nats", capsys.readouterr().out)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_a_step_changes_every_weight_but_no_minibatch() -> None:
    step = ResidentStep(device_mode("cpu"))
    before, pictures = step.state(), step.slot["pictures"].get_value()
    step.run()
    after = step.state()
    assert all((after[name] != before[name]).any() for name in step.weights)
    np.testing.assert_array_equal(step.slot["pictures"].get_value(), pictures)
