"""What the GPU benchmark measures, as far as a CPU can tell; and its sums and its table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from alex_net import AlexNet
from benchmarks.gpu import (
    copy_row,
    our_steps,
    peak_flops,
    run_rates,
    run_row,
    step_row,
    table,
)
from benchmarks.measure import Measured, measure
from benchmarks.plain_alexnet import PlainAlexNet, plain_step, step_flops
from examples.resident_step import PAPER, Sizes
from tandem.errors import InputError
from tests.support import tiny

SMALL = Sizes(batch=3)


def test_plain_pytorch_has_the_papers_parameters() -> None:
    with torch.device("meta"):
        model = PlainAlexNet(PAPER.network(), "module")
    assert sum(p.numel() for p in model.parameters()) == 60_965_224


def test_the_two_ways_of_normalising_are_one() -> None:
    net = AlexNet(67, 5, 0.2)
    torch.manual_seed(0)
    images = 60 * torch.randn(2, 3, 67, 67)
    plain, sliced = (PlainAlexNet(net, norm).eval() for norm in ("module", "slices"))
    sliced.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(images), sliced(images))


@pytest.mark.parametrize("sizes", [SMALL, Sizes(2, 99, 100, 7, 0.3)])
def test_operations_are_counted_as_pytorch_counts_them(sizes: Sizes) -> None:
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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_plain_step_learns(precision: str) -> None:
    for norm in ("module", "slices"):
        step = plain_step(SMALL.network(), SMALL.batch, "cpu", norm, precision)
        step()
        step()


def test_our_steps_run() -> None:
    steps = our_steps(SMALL, "bfloat16", None, ["ours", "ours, captured"])
    found, _ = measure(steps, rounds=3, repeats=2, synchronize=lambda: None)
    assert len(found.seconds) == 3
    row = step_row(found, SMALL, peak=1e11)
    assert row["images_per_second"] > 0
    assert 0 < row["share_of_peak"] < 1


def test_contenders_run_in_turn_and_warming_up_does_not_count() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    found = measure(steps, 2, 2, lambda: calls.append("wait"), warmups=1)
    assert calls == 3 * ["wait", "a", "a", "wait", "wait", "b", "b", "wait"]
    assert [(m.name, len(m.seconds)) for m in found] == [("a", 2), ("b", 2)]


def test_peaks_are_of_the_device_and_precision() -> None:
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert peak_flops("A device to come", "float32") is None


def test_the_table_has_a_block_for_each_kind() -> None:
    measured = Measured("plain", (0.5, 0.25, 1.0))
    rows = [step_row(measured, SMALL, None), copy_row(measured, 10**9), run_row("run", [1.0, 3.0])]
    lines = table(rows).splitlines()
    assert lines[0].split()[:2] == ["name", "images_per_second"]
    assert lines[1].startswith("plain  6.0")
    assert lines[1].endswith("3       -")
    assert "2.0" in lines[4]
    assert lines[-1].startswith("run   2.0")
    assert all(json.dumps(row) for row in rows)


@pytest.mark.slow
def test_rates_are_read_from_a_run(tmp_path: Path) -> None:
    data = tiny.prepare(tmp_path / "data")
    settings = tiny.settings(data, tmp_path / "unused")
    kept = settings[: settings.index("--print_freq")] + settings[settings.index("--threads") :]
    extra = kept[4 : kept.index("--devices")]
    rates = run_rates(data, ["cpu"], 1, extra, skip=2)
    assert len(rates) == 7 - 2
    assert all(rate > 0 for rate in rates)
    with pytest.raises(InputError, match="train for longer"):
        run_rates(data, ["cpu"], 1, extra, skip=7)
    with pytest.raises(InputError, match="has failed"):
        run_rates(tmp_path, ["cpu"], 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: this benchmark needs a GPU: no GPU was found\n"
