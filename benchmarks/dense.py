"""Are AlexNet's fully connected layers, sharded over two processes, as fast as DTensor's?

    python -m benchmarks.dense

Both sides have two processes of one thread, 128 rows of pool5 each, weights sharded by their units,
and compute forward, backward with the gradient of pool5, and an update with momentum, without
dropout. Ours passes tensors through shared memory, DTensor over gloo.
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from benchmarks.measure import Comparison, compare, in_turn, run, seconds_per_call
from benchmarks.team import Team, gloo_ranks, serve

if TYPE_CHECKING:  # torch is imported in the processes that are measured
    from tandem.distributed import LocalGroup
    from tandem.placement import Partitioned

PROCESSES = 2
RATE, MOMENTUM = 1e-3, 0.9
OURS, PEER = "tandem.placement", "DTensor over gloo"


@dataclass(frozen=True)
class Sizes:
    """Rows of a process, and the lengths of the layers, the input's first."""

    rows: int = 128
    units: tuple[int, ...] = (9216, 4096, 4096, 1000)
    repeats: int = 3  # steps of a round

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the layers' weights, (in, out)."""
        return list(itertools.pairwise(self.units))


def compare_dense(rounds: int, sizes: Sizes = Sizes()) -> Iterator[Comparison]:
    """Let both make steps in turn, after a round that does not count; compare."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Team.of_group(dense_rank, PROCESSES, Path(folder) / "store", sizes) as team,
    ):
        found = in_turn({name: partial(team.slowest, name) for name in (OURS, PEER)}, rounds)
    rows = sizes.rows * PROCESSES
    question = f"fully connected layers of {rows} rows, sharded over two processes of one thread"
    yield compare(question, *found.values(), target=1.0)


def dense_rank(group: "LocalGroup", store: Path, sizes: Sizes, pipe: Connection) -> None:
    """Serve as the process of one rank; a task's reply is the seconds of a step."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from tandem.backend import set_threads

    set_threads(1)
    with gloo_ranks(store, group.rank, group.size):
        steps = {OURS: our_step(sizes, group), PEER: dtensor_step(sizes, group.rank)}
        tasks: dict[str, Callable[[], float]] = {f"{name} loss": steps[name] for name in steps}
        tasks |= {n: partial(seconds_per_call, step, sizes.repeats) for n, step in steps.items()}
        serve(pipe, tasks)


def values(sizes: Sizes, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's rows of pool5 and labels."""
    rng = np.random.default_rng(rank)
    x = np.maximum(rng.standard_normal((sizes.rows, sizes.units[0])), 0).astype(np.float32)
    return x, rng.integers(0, sizes.units[-1], sizes.rows)


def initial_weights(sizes: Sizes) -> list[np.ndarray]:
    """Whole weights, equal at all ranks."""
    rng = np.random.default_rng(99)
    return [
        (rng.standard_normal(shape, np.float32) / np.sqrt(shape[0])).astype(np.float32)
        for shape in sizes.shapes
    ]


@dataclass
class DenseGraph:
    """The layers of all rows, with loss and update.

    `parameters` are weights and biases, then their velocities, each with its whole value and its
    value after a step; they are divided along their last axis.
    """

    x: Any
    labels: Any
    parameters: list[tuple[Any, np.ndarray]]
    updated: list[Any]
    loss: Any
    of_x: Any  # gradient

    @classmethod
    def of(cls, sizes: Sizes, ranks: int) -> "DenseGraph":
        """Build the graph, as for one process."""
        import pytensor.tensor as pt

        from tandem.layers import relu
        from tandem.ops import momentum_step

        rows = sizes.rows * ranks
        x = pt.tensor("pool5", dtype="float32", shape=(rows, sizes.units[0]))
        labels = pt.tensor("labels", dtype="int64", shape=(rows,))
        y, values, weights = x, [], []
        for number, value in enumerate(initial_weights(sizes), 6):
            own = [value, np.zeros(value.shape[1], np.float32)]
            names = (f"fc{number}.weight", f"fc{number}.bias")
            weight, bias = (_tensor(n, v) for n, v in zip(names, own, strict=True))
            y = pt.dot(relu(y) if weights else y, weight) + bias
            weights += [weight, bias]
            values += own
        loss = -pt.mean(pt.special.log_softmax(y, axis=1)[pt.arange(rows), labels])
        *gradients, of_x = cast(list[Any], pt.grad(loss, [*weights, x]))
        velocities = [
            _tensor(f"{w.name} velocity", a) for w, a in zip(weights, values, strict=True)
        ]
        stepped = [
            momentum_step(w, v, g, np.float32(RATE), MOMENTUM, 0.0, False)
            for w, v, g in zip(weights, velocities, gradients, strict=True)
        ]
        pairs = [*zip(weights, values, strict=True)]
        pairs += [(v, np.zeros_like(a)) for v, a in zip(velocities, values, strict=True)]
        updated = [weight for weight, _ in stepped] + [velocity for _, velocity in stepped]
        return cls(x, labels, pairs, updated, loss, of_x)

    def partitioned(self, ranks: int, rank: int) -> "Partitioned":
        """A rank's part: its term of the loss, the gradient of its rows, its updated parameters."""
        from tandem.placement import Partial, Placement, Shard, partition

        placed: dict[Any, Placement] = {v: Shard(a.ndim - 1) for v, a in self.parameters}
        wanted: dict[Any, Placement] = {self.loss: Partial(), self.of_x: Shard(0)}
        wanted |= dict(zip(self.updated, placed.values(), strict=True))
        return partition(
            [*wanted],
            given={self.x: Shard(0), self.labels: Shard(0), **placed},
            wanted=wanted,
            ranks=ranks,
            rank=rank,
            strict=True,
            fixed=[*placed],
        )


def _tensor(name: str, value: np.ndarray) -> Any:
    import pytensor.tensor as pt

    return pt.tensor(name, dtype="float32", shape=value.shape)


def our_step(sizes: Sizes, group: "LocalGroup") -> Callable[[], float]:
    """A step of the graph that `tandem.placement` divides; it returns this rank's loss."""
    import pytensor
    from pytensor.graph.replace import graph_replace

    from tandem.backend import device_mode, device_shared
    from tandem.distributed.channel import HostChannel
    from tandem.placement import Shard, local_index

    whole = DenseGraph.of(sizes, group.size)
    parted = whole.partitioned(group.size, group.rank)

    def shared(name: str, value: np.ndarray) -> Any:
        return device_shared(value, name=name, device="cpu")

    shares = []
    for variable, value in whole.parameters:
        index = local_index(value.shape, Shard(value.ndim - 1), group.size, group.rank)
        shares.append(shared(str(variable.name), np.ascontiguousarray(value[index])))
    written = [shared("of pool5", np.zeros((sizes.rows, sizes.units[0]), np.float32)), *shares]
    locals_ = [parted.inputs[variable] for variable, _ in whole.parameters]
    ends = [v for v in (*parted.outputs, parted.token) if v is not None]
    replaced = dict(zip(locals_, shares, strict=True))
    loss, *new = cast(list[Any], graph_replace(ends, replaced, strict=False))
    written.append(shared("token", np.zeros((), np.float32)))
    function = pytensor.function(
        [parted.inputs[whole.x], parted.inputs[whole.labels]],
        [loss],
        updates=[*zip(written, new, strict=True)],
        mode=device_mode("cpu", channel=HostChannel(group.split(0))),
        trust_input=True,
    )
    own_rows = values(sizes, group.rank)
    return lambda: float(np.asarray(function(*own_rows)[0]))


def dtensor_step(sizes: Sizes, rank: int) -> Callable[[], float]:
    """A step of the same layers by DTensor; it returns this rank's term of the loss."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    by_rows = [Shard(0)]
    parameters = []
    for value in initial_weights(sizes):
        for array in (value, np.zeros(value.shape[1], np.float32)):
            divided = distribute_tensor(torch.from_numpy(array), mesh, [Shard(array.ndim - 1)])
            parameters.append(torch.nn.Parameter(divided))
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    own, classes = values(sizes, rank)
    labels = torch.from_numpy(classes)
    rows = sizes.rows * PROCESSES

    def step() -> float:
        optimizer.zero_grad()
        x = torch.from_numpy(own).requires_grad_()
        y = DTensor.from_local(x, mesh, by_rows)
        for number in range(len(sizes.shapes)):
            weight, bias = parameters[2 * number : 2 * number + 2]
            y = torch.relu(y) if number else y
            y = torch.addmm(bias, y.redistribute(mesh, [Replicate()]), weight)
        logits = y.redistribute(mesh, by_rows).to_local()
        loss = F.cross_entropy(logits, labels, reduction="sum") / rows
        loss.backward()
        assert x.grad is not None
        optimizer.step()
        return float(loss)

    return step


if __name__ == "__main__":
    raise SystemExit(run(__doc__, compare_dense, rounds=7))
