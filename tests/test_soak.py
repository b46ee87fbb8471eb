"""Faults at random moments, resumed each time: a short form of `make soak`, on tiny data."""

from pathlib import Path

import pytest
from soak import Broken, compare, soak
from tiny import prepare


@pytest.mark.timeout(600)
def test_after_every_kind_of_end_the_bits_are_as_if_nothing_had_happened(tmp_path: Path) -> None:
    data = prepare(tmp_path / "data", train=241)
    soak(
        data,
        tmp_path,
        count=3,
        seed=3,
        devices=["cpu", "cpu"],
        batch_size=8,
        n_epochs=24,
        shuffle="images",
        print_freq=5,
    )
    # The comparison can fail.
    line = (tmp_path / "parts" / "record.jsonl").read_text().splitlines()[3]
    (tmp_path / "parts" / "record.jsonl").write_text(line + "\n")
    with pytest.raises(Broken, match="differ"):
        compare(tmp_path / "parts", tmp_path / "whole")
