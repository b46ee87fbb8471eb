"""The benchmark of `tandem.keras` against PyTorch, on a narrow network."""

import numpy as np
import pytest

from benchmarks import front
from benchmarks.measure import row
from examples.keras_cifar import make_model

TINY = front.Sizes(pictures=16, batch=4, width=0.02)


def test_both_sides_have_the_same_network() -> None:
    """But for the scale of the pictures, which plain PyTorch's are given with."""
    import torch

    model = make_model(TINY.width)
    network = front.plain_network(TINY.width).eval()
    own = model.get_weights()
    parameters = [*network.parameters()]
    assert [p.numel() for p in parameters] == [value.size for value in own]
    pictures, _ = front.noise(3)
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 128 - 1
    with torch.no_grad():
        for number, (parameter, value) in enumerate(zip(parameters, own, strict=True)):
            if number == 10:  # of units in the order (row, column, channel)
                value = value.reshape(2, 2, -1, value.shape[1]).transpose(2, 0, 1, 3)
                value = value.reshape(-1, value.shape[-1])
            axes = (3, 2, 0, 1) if value.ndim == 4 else None
            parameter.copy_(torch.from_numpy(value.transpose(axes)))
        expected = torch.softmax(network(images), 1).numpy()
    assert np.ptp(expected) > 1e-4
    found = model.predict(pictures, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_only_the_fastest_of_pytorch_and_of_keras_have_targets() -> None:
    rows = [row(comparison) for comparison in front.answer(2, TINY)]
    names = {1: "AlexNet for CIFAR-10, 4 pictures, 1 process"}
    names[2] = names[1].replace("1 process", "2 processes")
    pydtnn = "PyDTNN, by 0.38 of eager PyTorch's"
    expected = [(names[n], peer) for n in (1, 2) for kinds in front.PEERS[n] for peer in kinds]
    expected.insert(4, (names[1], pydtnn))
    assert [(r["question"], r["peer"]) for r in rows] == expected
    for processes, targets in front.TARGETS.items():
        for kinds, target in zip(front.PEERS[processes], targets, strict=True):
            of = [r for r in rows if r["question"] == names[processes] and r["peer"] in kinds]
            fastest = min(of, key=lambda r: r["peer_seconds"])
            assert [r["target"] for r in of] == [target if r is fastest else None for r in of]
    assert all(r["name"] == "tandem.keras" and r["rounds"] == 2 and r["ratio"] > 0 for r in rows)
    assert rows[4]["target"] == front.OVER_PYDTNN
    assert rows[4]["peer_seconds"] == pytest.approx(rows[0]["peer_seconds"] / 0.38, rel=1e-2)
