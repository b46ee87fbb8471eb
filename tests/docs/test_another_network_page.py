"""docs/another-network.md: its residual network is one, and its block is short."""

import re
from pathlib import Path

import pytest
from pytensor.graph.traversal import ancestors

from tandem.layers import Training
from tandem.layers.network import NetworkDescription, build_network
from tandem.models.resnet import ResNet18
from tandem.ops import BatchNorm
from tests.support.pages import code_blocks
from tests.support.tiny import ROOT

(CODE,) = code_blocks(ROOT / "docs" / "another-network.md", "python")


def test_the_block_of_a_residual_network_has_at_most_fifteen_lines() -> None:
    (block,) = re.findall(r"^def block.*?(?=^\S)", CODE, re.DOTALL | re.MULTILINE)
    assert len(block.strip().splitlines()) <= 15


@pytest.mark.parametrize("blocks", [3, 4])
def test_the_network_is_made_by_its_name(
    blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"residual_{blocks}"
    (tmp_path / f"{module}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    description = NetworkDescription(
        32, 10, 1.0, network=f"{module}:SmallResNet", options={"blocks": blocks}
    )
    net = build_network(description)
    theirs = ResNet18(32, 10, 1.0, "float32").parameters.declared
    names = {name.replace("layer1.", "layer1.0.") for name in net.parameters if "layer1." in name}
    assert names == {name for name in theirs if name.startswith("layer1.0.")}
    import pytensor.tensor as pt

    training = Training(pt.lscalar(), pt.lscalar(), pt.lvector())
    logits = net.logits(net.images(), training)
    norms = [v for v in ancestors([logits]) if v.owner and isinstance(v.owner.op, BatchNorm)]
    assert len({v.owner for v in norms}) == 1 + 2 * blocks + (blocks - 1)
    assert len(training.statistics) == 2 * (1 + 2 * blocks + (blocks - 1))
