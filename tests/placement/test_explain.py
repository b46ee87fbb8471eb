"""What a partitioned graph passes, as text."""

import pytensor.tensor as pt

from tandem.placement import Replicate, Shard, Single, explain, partition
from tests.support.unruled_network import Unruled

TEXT = """\
   conversion      of          shape   dtype    from -> to                received, bytes
0  all-gather      x           (6, 4)  float32  shard(0) -> replicate                  64
1  reduce-scatter  Dot of fc1  (6, 4)  float32  partial(sum) -> shard(0)               64
2 conversions, MB received: 0.000
Ops without a rule, computed from whole tensors: none
"""


def test_each_conversion_has_a_line() -> None:
    x = pt.tensor("x", dtype="float32", shape=(6, 4))
    w1, w2 = (pt.tensor(f"fc{n}.weight", dtype="float32", shape=(4, 4)) for n in (1, 2))
    y = pt.dot(pt.tanh(pt.dot(x, w1)), w2)
    given = {x: Shard(0), w1: Shard(1), w2: Shard(0)}
    found = partition([y], given=given, wanted={y: Shard(0)}, ranks=3, rank=1, fixed=[w1, w2])
    assert explain(found) == TEXT.replace("fc1", "fc2")


def test_bytes_that_differ_are_those_of_the_ranks() -> None:
    x = pt.tensor("x", dtype="float64", shape=(5,))
    y = pt.exp(x)
    found = partition([y], given={x: Single()}, wanted={y: Shard(0)}, ranks=2, rank=0)
    assert "0  scatter" in explain(found)
    assert explain(found, ranks=2).endswith(
        "0 at rank 0, 24 at others\n1 conversion, MB received: 0.0 at rank 0, 0.000 at others\n"
        "Ops without a rule, computed from whole tensors: none\n"
    )
    found = partition([y], given={x: Shard(0)}, wanted={}, ranks=4, rank=0)
    assert "  24 to 32\n" in explain(found, ranks=4)


def test_ops_without_a_rule_are_named_and_no_conversion_is_text_too() -> None:
    x = pt.tensor("x", dtype="float32", shape=(6,))
    y = Unruled()(x)
    found = partition([y], given={x: Shard(0)}, wanted={}, ranks=2, rank=0)
    assert explain(found).endswith("Ops without a rule, computed from whole tensors: Unruled\n")
    alone = partition([y], given={x: Replicate()}, wanted={}, ranks=1, rank=0)
    assert explain(alone, 1).startswith("0 conversions, MB received: 0.0\n")
