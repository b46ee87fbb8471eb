"""Networks exist on both sides of a comparison, and the fastest peer is the one that counts."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import networks
from benchmarks.measure import Comparison, Figure, Found
from benchmarks.networks import CASES, DEEP, Case
from examples.resident_step import Sizes

TINY = Case(
    "resnet:ResNet20",
    Sizes(batch=2, crop=8, stored=8, classes=3, width=1.0),
    "PlainCifarResNet",
    (20, 3),
)


@pytest.mark.parametrize("name", [*CASES, *DEEP])
def test_both_sides_of_a_case_have_the_same_parameters(name: str) -> None:
    import torch

    case = (CASES | DEEP)[name]
    with torch.device("meta"):
        plain = case.plain().parameters()
        theirs = sum(parameter.numel() for parameter in plain)
    declared = case.ours().parameters.declared.values()
    assert sum(np.prod(p.shape) for p in declared if p.trainable) == theirs


def compared(found: Iterator[Found]) -> dict[str, Comparison]:
    rows = [row for row in found if isinstance(row, Comparison)]
    return {row.peer: row for row in rows}


def test_the_batch_can_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def part(_: int, cases: dict[str, Case]) -> list[Found]:
        seen.extend(case.sizes.batch for case in cases.values())
        return []

    monkeypatch.setattr(networks, "PARTS", {"training": part})
    assert not [*networks.answer(1, network="VGG-11", batch="128")]
    assert not [*networks.answer(1, network="ResNet-50")]
    assert seen == [128, 16]


@pytest.mark.slow
def test_training_inference_memory_and_compile_time_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = {"tiny": TINY}
    for part in (networks.training, networks.inference):
        rows = compared(part(1, cases))
        assert len(rows) == 3
        assert sum(row.target is not None for row in rows.values()) == 1
    (peak,) = networks.peaks(1, cases)
    assert isinstance(peak, Figure)
    assert peak.value > 0.3
    monkeypatch.setattr(networks, "CASES", cases)
    monkeypatch.setattr(networks, "DEEP", {"larger": TINY, "smaller": replace(TINY)})
    (times,) = compared(networks.compile_times(1, cases)).values()
    assert (times.name, times.target) == ("larger", networks.COMPILE)
    assert 0.2 < times.ratio < 5
