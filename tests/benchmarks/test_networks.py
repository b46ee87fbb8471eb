"""Networks exist on both sides of a comparison, and the fastest peer is the one that counts."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import networks
from benchmarks.measure import Comparison, Figure, Found
from benchmarks.networks import CASES, DEEP, OURS, Case
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


def test_only_the_fastest_peer_has_the_target() -> None:
    def sleep(seconds: float) -> networks.Step:
        return lambda: time.sleep(seconds)

    rows = compared(
        networks._speed(
            "step",
            3,
            {"tiny": TINY},
            lambda case: sleep(0.002),
            lambda case: {"slow": sleep(0.02), "fast": sleep(0.006), "slower": sleep(0.03)},
        )
    )
    assert {peer: row.target for peer, row in rows.items()} == {
        "slow": None,
        "fast": networks.SPEED,
        "slower": None,
    }
    assert rows["fast"].name == OURS
    assert rows["fast"].reached
    assert rows["fast"].question == "step of tiny, batch 2, 8"


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


def test_one_network_or_one_part_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    parts = {
        name: lambda rounds, cases, name=name: iter(asked.append((name, rounds, [*cases])) or ())
        for name in networks.PARTS
    }
    monkeypatch.setattr(networks, "PARTS", parts)
    assert networks.main(["--only", "memory", "--network", "ResNet-50", "--rounds", "2"]) == 0
    assert asked == [("memory", 2, ["ResNet-50"])]
    asked.clear()
    assert networks.main([]) == 0
    assert asked == [(name, 7, [*CASES]) for name in parts]
