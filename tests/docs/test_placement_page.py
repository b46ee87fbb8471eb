"""docs/placement.md: its blocks are a program, and what it shows is what is computed."""

import re
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from tandem.placement.conversions import find_kind
from tandem.placement.placements import Partial, Placement, Replicate, Shard, Single
from tandem.placement_program import DividedNetwork, PlacementOptions
from tests.support.pages import code_blocks
from tests.support.tiny import ROOT

PAGE = ROOT / "docs" / "placement.md"
PLACEMENTS: dict[str, Placement] = {
    "`Replicate`": Replicate(),
    "`Shard`": Shard(0),
    "`Shard(i)`": Shard(0),
    "`Shard(j)`": Shard(1),
    "`Partial`": Partial(),
    "`Single`": Single(),
}


def test_the_blocks_are_a_program_that_prints_what_the_page_shows() -> None:
    names: dict[str, Any] = {}
    output = StringIO()
    with redirect_stdout(output):
        exec("\n".join(code_blocks(PAGE, "python")), names)
    assert output.getvalue().rstrip() == "\n".join(code_blocks(PAGE, "text"))
    net = names["Mine"]
    assert [*net.placements(None, "sharded")] == ["head.weight", "head.bias"]


def test_the_table_names_each_conversion() -> None:
    rows = re.findall(r"^\| (`\S+`) to (`\S+`) \| ([\w-]+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 9
    for source, target, name in rows:
        kind = find_kind(PLACEMENTS[source], PLACEMENTS[target])
        assert kind is not None
        assert kind.name == name


def test_the_bytes_of_two_trainers() -> None:
    (row,) = re.findall(r"^\| 2 \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    found = []
    for kind in ("sharded", "single"):
        divided = DividedNetwork.of(PlacementOptions(ranks=2, fully_connected=kind))
        received = divided.received(divided.partitioned())
        each = [f"{(nbytes + divided.exchanged()) / 1e6:.1f}" for nbytes in received]
        found.append(" / ".join(dict.fromkeys(each) if kind == "sharded" else each))
    replicated = [divided.exchanged_if_replicated(each) for each in ("average", "gradients")]
    assert row.split(" | ") == [*(f"{nbytes / 1e6:.1f}" for nbytes in replicated), *found]
