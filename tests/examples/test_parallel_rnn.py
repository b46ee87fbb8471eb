"""The recurrent network by data-parallel functions: what it computes, and that it learns."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem.parallel as synk
from examples.parallel_rnn import BATCH, SEQUENCES, initial_weights, predict, sequences, train
from tandem.backend import device_mode


def trained(workers: int) -> tuple[list[float], dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    synk.fork(workers, use_gpu=False, threads=1)
    try:
        weights = initial_weights(rng)
        errors = list(train(weights, 4, rng))
        return errors, {name: v.get_value() for name, v in weights.items()}
    finally:
        synk.close()


@pytest.mark.slow
def test_two_workers_learn_what_one_does() -> None:
    (errors, ours), (others, theirs) = trained(2), trained(1)
    np.testing.assert_allclose(errors, others, rtol=1e-9)
    for name, value in ours.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=1e-9 * scale, err_msg=name)
    first, last = (np.mean(part) for part in (errors[: SEQUENCES // BATCH], errors[-5:]))
    assert last < 0.8 * first
    assert last < 1 / 6  # of the answer 1


def test_a_sum_is_of_the_two_marked_numbers() -> None:
    x, y = sequences(np.random.default_rng(0))
    for sequence, total in zip(x[:20], y[:20], strict=True):
        marked = [number for number, mark in sequence if mark == 1]
        assert len(marked) == 2
        assert total == pytest.approx(sum(marked))


def test_the_network_is_the_recurrence_of_its_docstring() -> None:
    rng = np.random.default_rng(0)
    values = {
        "inputs": rng.normal(size=(2, 24)),
        "hidden": 0.2 * rng.normal(size=(24, 24)),
        "bias": rng.normal(size=24),
        "output": rng.normal(size=24),
    }
    x = pt.dtensor3("x")
    found = predict(x, {name: pytensor.shared(value) for name, value in values.items()})
    data, _ = sequences(rng)
    expected = []
    for sequence in data[:3]:
        h = np.zeros(24)
        for numbers in sequence:
            h = np.maximum(numbers @ values["inputs"] + h @ values["hidden"] + values["bias"], 0)
        expected.append(h @ values["output"])
    function = pytensor.function([x], found, mode=device_mode("cpu"))
    np.testing.assert_allclose(function(data[:3]), expected, rtol=1e-12)
