"""The floor of a step: its operations are PyTorch's count, its bytes are counted by hand."""

import pytest
import torch

from benchmarks.plain_alexnet import PlainAlexNet
from benchmarks.roofline import (
    Operation,
    Rates,
    floor_seconds,
    measure_rates,
    operations,
    step_flops,
)
from examples.resident_step import PAPER, Sizes

H200 = Rates(989.4e12, 4.8e12)  # by its data sheet


@pytest.mark.parametrize("sizes", [Sizes(batch=3), Sizes(2, 99, 100, 7, 0.3)])
def test_operations_are_counted_as_pytorch_counts_them(sizes: Sizes) -> None:
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    net = sizes.network()
    model = PlainAlexNet(net, "slices")
    images = torch.randn(sizes.batch, 3, sizes.crop, sizes.crop)
    counts = []
    for part in (model, model[0]):
        # Of the backward pass it counts grouped convolutions wrongly (PyTorch 2.13).
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            part(images)
        counts.append(counter.get_total_flops())
    forward, first = counts
    assert step_flops(net, sizes.batch) == 3 * forward - first


def test_an_operation_waits_for_products_or_for_memory() -> None:
    rates = Rates(products=10.0, memory=2.0)
    assert Operation("large product", 100, 4).seconds(rates) == 10
    assert Operation("copy", 0, 4).seconds(rates) == 2


def test_bytes_are_each_operand_once() -> None:
    found = {operation.name: operation.nbytes for operation in operations(PAPER.network(), 2, 2)}
    assert found["crop"] == 2 * 3 * 227 * 227 * 3
    assert found["conv2"] == 2 * (2 * 96 * 27 * 27 + 256 * 48 * 5 * 5 + 2 * 256 * 27 * 27)
    assert found["fc8, weights"] == 2 * 2 * (4096 + 1000) + 4 * 4096 * 1000
    assert found["pool5"] == 2 * 2 * (256 * 13 * 13 + 256 * 6 * 6) + 2 * 256 * 6 * 6
    assert found["update"] == 22 * 60_965_224
    assert "conv1, input" not in found


def test_the_floor_of_an_h200_is_some_hundred_thousand_images() -> None:
    rate = 256 / floor_seconds(PAPER.network(), 256, "bfloat16", H200)
    assert 117_000 < rate < 170_000
    in_float32 = floor_seconds(PAPER.network(), 256, "float32", Rates(66.9e12, 4.8e12))
    assert 256 / in_float32 < rate / 5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rates_are_of_this_machine(precision: str) -> None:
    found = measure_rates("cpu", precision, lambda: None, side=32, nbytes=1000)
    assert found.products > 0
    assert found.memory > 0
