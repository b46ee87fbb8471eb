"""A column-then-row perceptron passes between ranks what it passes in PyTorch's DTensor.

`CommDebugMode` counts the collectives of DTensor, of which a fake process group needs no processes.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytensor.tensor as pt
import pytest

from tandem.placement import Partitioned, Placement, Replicate, Shard, partition

pytestmark = pytest.mark.slow  # imports of five seconds

ROWS, INPUTS, HIDDEN, OUTPUTS = 8, 16, 32, 12
KINDS = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
}

Passed = list[tuple[str, int]]
"""Kinds of collectives, in order, and the bytes that a rank receives in each."""


def received(kind: str, nbytes: int, ranks: int) -> int:
    """Bytes that a rank receives in a collective that is given `nbytes` at each rank."""
    whole = nbytes * ranks if kind == "all-gather" else nbytes
    return whole * (ranks - 1) // ranks * (2 if kind == "all-reduce" else 1)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def by_dtensor(ranks: int, rows_are_sharded: bool, backward: bool) -> Passed:
    """The collectives of DTensor, with inputs, outputs and gradients placed as ours."""
    import torch
    from torch.distributed import tensor  # a second of imports
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    passed: Passed = []

    class Recorder(CommDebugMode):
        """Beside the counts of collectives, the bytes of what each is given."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kw or {})
            kind = KINDS.get(func.name().rpartition("::")[2])
            if kind is not None and not isinstance(args[0], tensor.DTensor):
                passed.append((kind, received(kind, args[0].nbytes, ranks)))
            return result

    mesh, whole = init_device_mesh("cpu", (ranks,)), tensor.Replicate()
    rows = tensor.Shard(0) if rows_are_sharded else whole
    shapes = {
        (ROWS, INPUTS): rows,
        (INPUTS, HIDDEN): tensor.Shard(1),
        (HIDDEN, OUTPUTS): tensor.Shard(0),
    }
    x, first, second = (
        tensor.distribute_tensor(torch.randn(shape), mesh, [placement]).requires_grad_()
        for shape, placement in shapes.items()
    )
    with Recorder() as recorder:
        hidden = torch.relu(x.redistribute(mesh, [whole]) @ first)
        y = (hidden @ second).redistribute(mesh, [rows])
        if backward:
            (y * y).sum().backward()
            x.grad.redistribute(mesh, [rows])
    assert recorder.get_total_counts() == len(passed)
    return passed


def by_partition(ranks: int, rows_are_sharded: bool, backward: bool) -> Partitioned:
    x, first, second = (
        pt.tensor(name, dtype="float32", shape=shape)
        for name, shape in {
            "x": (ROWS, INPUTS),
            "first": (INPUTS, HIDDEN),
            "second": (HIDDEN, OUTPUTS),
        }.items()
    )
    y = pt.dot(pt.maximum(pt.dot(x, first), 0), second)
    rows: Placement = Shard(0) if rows_are_sharded else Replicate()
    given: dict[Any, Placement] = {x: rows, first: Shard(1), second: Shard(0)}
    wanted: dict[Any, Placement] = {y: rows}
    if backward:
        gradients = pt.grad((y * y).sum(), [*given])
        wanted |= dict(zip(gradients, given.values(), strict=True))
    return partition(
        [*wanted],
        given=given,
        wanted=wanted,
        ranks=ranks,
        rank=0,
        strict=True,
        fixed=[first, second],
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize(
    ("rows_are_sharded", "kinds"),
    [
        (False, ["all-reduce", "all-reduce"]),
        (True, ["all-gather", "reduce-scatter", "all-gather", "reduce-scatter"]),
    ],
    ids=["replicated rows", "sharded rows"],
)
def test_collectives_are_those_of_dtensor(
    ranks: int, rows_are_sharded: bool, kinds: list[str], backward: bool
) -> None:
    theirs = by_dtensor(ranks, rows_are_sharded, backward)
    ours = by_partition(ranks, rows_are_sharded, backward).conversions
    assert [(c.kind, c.received) for c in ours] == theirs
    assert [kind for kind, _ in theirs] == (kinds if backward else kinds[: len(kinds) // 2])
    sizes = [math.prod(c.shape) for c in ours]
    assert set(sizes) == (
        {ROWS * INPUTS, ROWS * OUTPUTS} if backward or rows_are_sharded else {ROWS * OUTPUTS}
    )
