"""Faults at random moments, resumed each time: a short form of `make soak`, on tiny data."""

from pathlib import Path

import pytest

from tandem.layers.network import ALEXNET
from tests.soak import soak
from tests.support.norm_network import NETWORK
from tests.support.runs import assert_same_bits
from tests.support.tiny import prepare


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes",
    [
        {"network": ALEXNET, "exchange": "shared"},
        {"network": NETWORK, "exchange": "shared"},
        {"network": ALEXNET, "fully_connected": "sharded"},
    ],
)
def test_after_every_end_the_bits_are_as_if_nothing_had_happened(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    soak(
        prepare(tmp_path / "data", train=241),
        tmp_path,
        count=3,
        seed=3,
        kinds=["kill launcher", "stop trainer 1", "SIGTERM to all"],
        devices=["cpu", "cpu"],
        batch_size=8,
        n_epochs=24,
        shuffle="images",
        print_freq=5,
        **changes,
    )
    # The comparison can fail.
    record = tmp_path / "parts" / "record.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(tmp_path / "parts", tmp_path / "whole")
