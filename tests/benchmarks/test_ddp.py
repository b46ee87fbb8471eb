"""The benchmark against DistributedDataParallel, on a tiny network."""

from pathlib import Path

import pytest

from benchmarks import ddp
from benchmarks.measure import row
from tandem.errors import InputError

TINY = ddp.Sizes(batch=2, crop=67, stored=70, classes=3, width=0.1)


@pytest.mark.slow
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


def test_a_run_that_does_not_start_is_reported(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    with (
        ddp.training_run(nothing, tmp_path / "run", ddp.settings(TINY, "average")) as program,
        pytest.raises(InputError, match=r"made no step 1:\n(.*\n)*error: .*nothing"),
    ):
        program.seconds_per_step(1)
