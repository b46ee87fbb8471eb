"""The benchmark against DistributedDataParallel: what it compares, on a tiny network."""

import os
import time
from pathlib import Path

import pytest

from benchmarks import ddp
from benchmarks.measure import row
from benchmarks.pictures import write_data_folder
from tandem.errors import InputError
from tests.support.tiny import group_members, is_gone

TINY = ddp.Sizes(batch=2, crop=67, stored=70, classes=3, width=0.1)


def test_it_compares_what_it_says() -> None:
    rows = [row(comparison) for comparison in ddp.answer(2, TINY, steps=2)]
    average, gradients = (f"train.py, exchange: {name}" for name in ("average", "gradients"))
    eager, tuned = "DDP, eager", "DDP, channels-last, fused SGD"
    assert [(r["name"], r["peer"], r["target"]) for r in rows] == [
        (average, eager, 1.5),
        (average, tuned, 1.3),
        (gradients, eager, None),
        (gradients, tuned, None),
    ]
    assert all(r["kind"] == "speed" and r["rounds"] == 2 and r["ratio"] > 0 for r in rows)
