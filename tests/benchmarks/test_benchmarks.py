"""The benchmarks of the CPU at tiny sizes: their answers, but no times."""

import json
import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from pytensor.tensor.math import Dot

import benchmarks.__main__ as everything
import benchmarks.step as step
from benchmarks import draw, memory, plain_step, profile, run, start
from benchmarks.measure import Comparison, Figure, Measured, compare, measure, row, table
from benchmarks.roofline import step_flops
from examples.resident_step import ResidentStep, Sizes
from tandem.backend import device_mode
from tandem.ops import Conv2d, Conv2dInputGrad, Conv2dWeightGrad

TINY = Sizes(batch=2)


@pytest.fixture(autouse=True)
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (step, plain_step):
        monkeypatch.setattr(module, "cpp_compiler", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


FIGURES = {"little": 1.23412, "much": 3.0}


def measured(name: str, *seconds: float) -> Measured:
    return Measured(name, seconds)


def test_a_ratio_is_of_medians_and_its_spread_of_rounds() -> None:
    ours, peer = measured("ours", 1.0, 2.0, 4.0), measured("peer", 2.0, 2.0, 2.0)
    speed = compare("q", ours, peer, "speed", 1.0)
    assert (speed.ratio, speed.low, speed.high, speed.reached) == (1.0, 0.5, 2.0, True)
    time = compare("q", ours, peer, "time", 0.9)
    assert (time.ratio, time.low, time.high, time.reached) == (1.0, 0.5, 2.0, False)
    assert compare("q", ours, peer).reached is None


@pytest.mark.parametrize("part", [step.training, step.inference])
def test_steps_are_compared_with_every_way_of_writing_them(
    part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(contenders: step.Contenders, threads: int, rounds: int) -> list[Measured]:
        return measure({name: make() for name, make in contenders.items()}, rounds)

    monkeypatch.setattr(step, "measure_apart", together)
    found = list(part(1, TINY))
    assert [c.peer.split(",")[0] for c in found] == ["PyTorch"] * len(found)
    assert found[0].peer == "PyTorch, eager"
    assert all(c.ratio > 0 for c in found)


def test_a_run_with_its_loader_is_compared_with_data_in_memory() -> None:
    found, other = run.answer(2, replace(TINY, classes=10), pictures=8, repeats=2)
    assert (found.name, found.peer) == ("with its loader", "with data in memory")
    assert (other.name, other.peer, other.target) == (found.name, "cropping in the trainer", None)


@pytest.mark.slow
def test_the_memory_of_a_trainer_is_a_ratio_and_a_growth() -> None:
    ratio, growth = memory.answer(1, TINY, TINY, steady=3)
    assert ratio.unit == "x"
    assert ratio.value > 0.3
    assert growth.value < 50


@pytest.mark.slow
def test_a_start_is_timed_until_the_first_step() -> None:
    settings = ["--batch_size", "2", "--crop_size", "67", "--width", "0.05"]
    (found,) = start.answer(1, stored=72, settings=settings)
    assert 1 < found.value < 300


def test_a_profile_counts_all_operations_and_all_time() -> None:
    *parts, whole = profile.answer(2, TINY, side=64)
    assert whole.name == "all"
    assert {part.name for part in parts} == {*profile.KINDS.values(), profile.OTHER}
    assert sum(part.seconds for part in parts) == pytest.approx(whole.seconds)
    assert whole.operations == sum(part.operations for part in parts)
    net = TINY.network()
    biases = TINY.batch * sum(prod(net.shapes[layer.name]) for layer in net.convolutions)
    assert whole.operations == step_flops(net, TINY.batch) + biases


def test_the_gradient_of_the_first_layers_images_is_not_computed() -> None:
    nodes = ResidentStep(device_mode("cpu"), TINY).functions[0].maker.fgraph.apply_nodes
    count = {kind: sum(isinstance(node.op, kind) for node in nodes) for kind in KINDS}
    assert count == {Conv2d: 5, Conv2dWeightGrad: 5, Conv2dInputGrad: 4, Dot: 3 + 3 + 3}


KINDS = (Conv2d, Conv2dWeightGrad, Conv2dInputGrad, Dot)


def test_everything_is_written_down_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row(compare("q", measured("ours", 1.0, 1.1), measured("peer", 2.0, 2.2), "speed", 1.5)),
        row(compare("q", measured("ours", 1.0), measured("other", 2.0), "time", 0.4)),
        row(Figure("m", "size", 390.0, "MB", 400.0)),
        *(row(part) for part in profile.answer(1, TINY, side=64)),
    ]
    monkeypatch.setattr(everything, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(everything, "ask", lambda question: rows)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert everything.main(["--only", "step"]) == 0
    printed = capsys.readouterr().out
    heading = printed.splitlines()[0]
    limits = "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2"
    assert heading.endswith(f" cores, AVX2, emulated by {limits}")
    assert "ours  2.00 x the speed of  peer" in printed
    assert "at most 0.4: NO" in printed
    assert "390 MB" in printed
    (lines,), (picture,) = (list((tmp_path / "results").glob(f"*{s}")) for s in (".jsonl", ".png"))
    first, *others = map(json.loads, lines.read_text().splitlines())
    assert first["cores"] == len(os.sched_getaffinity(0))
    assert first["capability"] == "AVX2"
    assert first["steering"] == {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert others == rows
    assert picture.stat().st_size > 10_000
    assert draw.main([str(lines), str(tmp_path / "again.svg")]) == 0


def test_tables_have_a_block_for_each_question() -> None:
    comparison = Comparison("why", "a", "b", "time", 0.5, 0.4, 0.6, None, 1.0, 2.0, 3)
    figures = [row(Figure("how", name, value, "MB", 2.0)) for name, value in FIGURES.items()]
    lines = table([row(comparison), *figures]).splitlines()
    assert lines[0] == "why"
    assert lines[1].split() == ["a", "0.50", "x", "the", "time", "of", "b", "(0.40", "to", "0.60)"]
    assert lines[2] == "how"
    assert lines[3].split() == ["little", "1.234", "MB", "at", "most", "2", "MB:", "yes"]
    assert lines[4].split() == ["much", "3", "MB", "at", "most", "2", "MB:", "NO"]
