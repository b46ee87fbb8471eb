"""Processes whose calls `benchmarks.parallel` compares, one program for each library.

    python -m benchmarks.parallel_contenders joblib     reads tasks, as lines of JSON, until EOF

A task is a name and how often to do it; the answer is the seconds of one time. The work is shared
by two processes of one thread, of which the program itself is the first: it has the result. So a
library that only has workers, as joblib, has two of them.
"""

import copy
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

from benchmarks.measure import parser_of, seconds_per_call
from benchmarks.placement import RATE
from benchmarks.team import gloo_ranks
from benchmarks.trainers import Sizes as Step

WORKERS = 2
IDLE_SECONDS = 0.005  # between two looks of a rank that MPI would otherwise let wait at full speed

PARTS = ("excerpt", "function", "straggler", "reduce")  # of a call, as `Function.times` has them

Tasks = dict[str, Callable[[int], Any]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the calls."""

    rows: int = 2048  # that are multiplied, float32 (rows, units)
    units: int = 2048
    passed: int = 25_000  # rows that are passed, float32 (passed, columns): 102.4 MB
    columns: int = 1024
    step: Step = field(default_factory=Step)
    minibatches: int = 4  # from whose pictures a shuffled minibatch is taken

    def arguments(self) -> list[str]:
        """Return the sizes as arguments of the program."""
        return ["--sizes", json.dumps(asdict(self))]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the sizes of an argument."""
        values = json.loads(text)
        return cls(**values | {"step": Step(**values["step"])})


def number() -> float:
    """The work of an empty call."""
    return 1.0


def row_sums(rows: np.ndarray) -> np.ndarray:
    """The work of a call whose rows are passed."""
    return rows.sum(axis=1)


def timed(calls: dict[str, Callable[[], Any]]) -> Tasks:
    """Make tasks of calls."""
    return {name: partial(seconds_per_call, call) for name, call in calls.items()}


def passed_rows(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Rows to pass, and the order in which they are to come."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((sizes.passed, sizes.columns), np.float32)
    return rows, rng.permutation(sizes.passed)


def products(sizes: Sizes) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows to multiply, and the weights by which they are multiplied one after the other."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((sizes.rows, sizes.units), np.float32)
    shape, std = (sizes.units, sizes.units), np.float32(sizes.units**-0.5)
    return rows, [std * rng.standard_normal(shape, np.float32) for _ in range(2)]


def mean_of_products(x: Any, weights: Sequence[Any]) -> Any:
    """The mean over rows of two layers: nearly all time is in the products."""
    import pytensor.tensor as pt

    for weight in weights:
        x = pt.tanh(x @ weight)
    return x.mean(axis=0)


# Contenders


@contextmanager
def tandem(sizes: Sizes) -> Iterator[Tasks]:
    """Data-parallel functions: an empty one, one of products, and one whose rows are passed."""
    import pytensor.tensor as pt

    import tandem.parallel as synk

    synk.fork(WORKERS, use_gpu=False, threads=1)
    values, weights = products(sizes)
    rows, order = passed_rows(sizes)
    x = pt.fmatrix("x")
    empty = synk.function([], synk.shared(np.float32(number()), "number"))
    layers = [synk.shared(weight, f"weight{i}") for i, weight in enumerate(weights)]
    multiply = synk.function([x], mean_of_products(x, layers))
    add = synk.function([x], (x.sum(axis=1), "gather"))
    synk.distribute()
    many, passed = synk.data(values), synk.data(rows)
    yield timed(
        {
            "empty": empty,
            "products": lambda: multiply(many),
            "passed rows": lambda: add(passed, batch=order),
        }
    )
    synk.close()


@contextmanager
def alex_net(sizes: Sizes, workers: int) -> Iterator[Tasks]:
    """AlexNet's training step, of `examples.parallel_alex_net`, at some number of workers."""
    import tandem.parallel as synk
    from alex_net import AlexNet
    from examples.parallel_alex_net import ParallelAlexNet

    sides, batch = (sizes.step.crop, sizes.step.crop), sizes.step.batch
    count, rng = sizes.minibatches * batch, np.random.default_rng(0)
    synk.fork(workers, use_gpu=False, threads=1)
    net = AlexNet(sizes.step.crop, sizes.step.classes, sizes.step.width)
    model = ParallelAlexNet(net, np.full((3, *sides), 120, np.float32), RATE)
    values = (
        rng.integers(0, 256, (count, *sides, 3), np.uint8),
        rng.integers(0, net.classes, count),
        np.zeros((count, 2), np.int64),
        np.zeros(count, np.uint8),
    )
    inputs = [synk.data(value) for value in values]
    everything, shuffled = np.arange(count), rng.permutation(count)[:batch]

    def step(rows: slice | np.ndarray, exchange: bool = True) -> None:
        model.compute(*inputs, np.int64(0), everything[rows], batch=rows)
        if exchange:
            synk.all_reduce(model.gradients.vector)
        model.update()

    calls = {
        "slices": lambda: step(slice(0, batch)),
        "slices of half": lambda: step(slice(0, batch // 2)),
        "shuffled": lambda: step(shuffled),
        "without all-reduce": lambda: step(slice(0, batch), exchange=False),
    }
    yield timed(calls) | {"times": lambda times: seconds_of_parts(model, calls["shuffled"], times)}
    synk.close()


def seconds_of_parts(
    model: Any, step: Callable[[], None], times: int
) -> dict[str, dict[str, float]]:
    """Return how long each part of a step's functions takes, the means of many steps."""
    functions = {"gradients": model.compute, "update": model.update}
    before = {name: copy.copy(function.times) for name, function in functions.items()}
    seconds_per_call(step, times)
    return {
        name: {
            part: (getattr(function.times, part) - getattr(before[name], part)) / times
            for part in PARTS
        }
        for name, function in functions.items()
    }


@contextmanager
def serial(sizes: Sizes) -> Iterator[Tasks]:
    """The same products by one PyTensor function, in this process alone."""
    import pytensor
    import pytensor.tensor as pt

    from tandem.backend import device_mode, device_shared, keep_freed_memory, set_threads

    set_threads(1)
    keep_freed_memory()
    values, weights = products(sizes)
    x = pt.fmatrix("x")
    layers = [device_shared(weight) for weight in weights]
    multiply = pytensor.function([x], mean_of_products(x, layers), mode=device_mode("cpu"))
    yield timed({"products": lambda: multiply(values)})


@contextmanager
def pool(sizes: Sizes) -> Iterator[Tasks]:
    """`multiprocessing.Pool`: of one process beside this one, and of two that get the rows."""
    rows, order = passed_rows(sizes)
    with multiprocessing.Pool(1) as one, multiprocessing.Pool(WORKERS) as two:

        def empty() -> float:
            other = one.apply_async(number)
            return (number() + other.get()) / WORKERS

        def passed() -> np.ndarray:
            return np.concatenate(two.map(row_sums, np.array_split(rows[order], WORKERS)))

        yield timed({"empty": empty, "passed rows": passed})


@contextmanager
def joblib(sizes: Sizes) -> Iterator[Tasks]:
    """joblib's own workers, loky, reused from call to call."""
    from joblib import Parallel, delayed

    with Parallel(n_jobs=WORKERS) as parallel:
        yield timed({"empty": lambda: parallel(delayed(number)() for _ in range(WORKERS))})


@contextmanager
def mpi4py(sizes: Sizes) -> Iterator[Tasks]:
    """Ranks of MPI that broadcast a small object and gather the results. Under mpirun."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def call() -> list[float] | None:
        world.bcast(("empty", 1) if world.rank == 0 else None)
        return world.gather(number())

    def together(times: int) -> float:
        for rank in range(1, world.size):
            world.send(times, rank)
        return seconds_per_call(call, times)

    if world.rank == 0:
        yield {"empty": together}
        for rank in range(1, world.size):
            world.send(0, rank)
        return
    while times := _receive(world):
        seconds_per_call(call, times)
    yield {}


def _receive(world: Any) -> int:
    """Wait for a message without MPI's busy waiting, which would slow other contenders."""
    while not world.Iprobe():
        time.sleep(IDLE_SECONDS)
    return int(world.recv())


@contextmanager
def gloo(sizes: Sizes) -> Iterator[Tasks]:
    """Ranks of torch.distributed that broadcast a small tensor and reduce the results."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        other = context.Process(target=_gloo_worker, args=(store, there), daemon=True)
        other.start()
        there.close()
        with _gloo_call(store, 0) as call:

            def together(times: int) -> float:
                here.send(times)
                return seconds_per_call(call, times)

            yield {"empty": together}
            here.close()
        other.join()


def _gloo_worker(store: Path, pipe: Connection) -> None:
    with _gloo_call(store, 1) as call, suppress(EOFError):
        while True:
            seconds_per_call(call, pipe.recv())


@contextmanager
def _gloo_call(store: Path, rank: int) -> Iterator[Callable[[], Any]]:
    """Join the other rank; yield the call that both make together."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    message, result = torch.zeros(8), torch.zeros(1)

    def call() -> None:
        distributed.broadcast(message, 0)
        result.fill_(number())
        distributed.reduce(result, 0)

    with gloo_ranks(store, rank, WORKERS):
        yield call


CONTENDERS: dict[str, Callable[[Sizes], AbstractContextManager[Tasks]]] = {
    "tandem.parallel": tandem,
    "AlexNet, one worker": partial(alex_net, workers=1),
    "AlexNet, two workers": partial(alex_net, workers=2),
    "serial": serial,
    "multiprocessing.Pool": pool,
    "joblib": joblib,
    "mpi4py": mpi4py,
    "torch.distributed": gloo,
}


def main(arguments: list[str] | None = None) -> int:
    """Do tasks until the end of the input; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--sizes", type=Sizes.parse, default=Sizes(), help="as JSON")
    options = parser.parse_args(arguments)
    with CONTENDERS[options.contender](options.sizes) as tasks:
        if not tasks:  # a rank that only helps
            return 0
        print(json.dumps(sorted(tasks)), flush=True)
        for line in sys.stdin:
            name, times = json.loads(line)
            print(json.dumps(tasks[name](times)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
