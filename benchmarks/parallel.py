"""How fast are data-parallel functions, and against whom?

    python -m benchmarks.parallel
    python -m benchmarks.parallel --only calls

- calls: an empty call, of two processes, beside those of other libraries.
- products: two workers of one thread against a serial program of one thread.
- passed: rows in shared memory and the order in which they are wanted, against pickled rows.
- steps: AlexNet's training step, against those of `train.py`, of one process with two threads, and
  of PyTorch's DistributedDataParallel. No step waits for a loader.
- ablations: those of Stooke and Abbeel 2017 (arXiv 1710.04162): a fixed and a scaled batch,
  shuffled rows, no all-reduce.
- times: where AlexNet's functions spend their time, the paper's Table 1.

Each contender is a program of its own, `benchmarks.parallel_contenders`, whose other processes
wait while others are measured.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks import ddp, trainers
from benchmarks.measure import (
    Comparison,
    Figure,
    Found,
    Measured,
    Part,
    compare,
    in_turn,
    run,
    seconds_per_call,
)
from benchmarks.parallel_contenders import WORKERS, Sizes
from tandem.distributed.mpi import find_mpirun
from tandem.errors import InputError

OURS = "tandem.parallel"
LIBRARIES = ("multiprocessing.Pool", "joblib", "mpi4py", "torch.distributed")
REPEATS = 2  # steps in a row: the first one after others' finds none of its data in the cache
EMPTY_MICROSECONDS = 100
PARTS = ("calls", "products", "passed", "steps", "ablations", "times")


class Contender:
    """A program that does tasks when asked, and says how long they took. It ends with the context.

    Raises InputError if it does not start, or ends before it is told to.
    """

    def __init__(self, name: str, sizes: Sizes) -> None:
        command = [sys.executable, "-m", "benchmarks.parallel_contenders", name]
        if name == "mpi4py":
            command = [find_mpirun() or "mpirun", "-n", str(WORKERS), *command]
        self._name = name
        self._process = subprocess.Popen(
            [*command, *sizes.arguments()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.tasks = self._answer()

    def do(self, task: str, times: int = 1) -> Any:
        """Do a task so many times; return the seconds of one, or what else it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([task, times]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InputError(f"the processes of {self._name} have ended")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()


def answer(
    rounds: int,
    sizes: Sizes = Sizes(),  # noqa: B008
    calls: int = 300,
    only: str | None = None,
) -> Iterator[Found]:
    """Answer each of `PARTS`, or one; `calls` are empty ones in a row."""
    if only in (None, "calls"):
        yield from _empty_calls(rounds, sizes, calls)
    if only in (None, "products"):
        yield _products(rounds, sizes)
    if only in (None, "passed"):
        yield _passed_rows(rounds, sizes)
    if only in (None, "steps"):
        yield from _steps(rounds, sizes)
    if only in (None, "ablations"):
        yield from _ablations(rounds, sizes)
    if only in (None, "times"):
        yield from _times(rounds, sizes)


def _empty_calls(rounds: int, sizes: Sizes, calls: int) -> Iterator[Found]:
    def one_that_stays_awake(name: str) -> float:
        """Time a program only started for its turn, since it costs the others their cores."""
        with Contender(name, sizes) as program:
            program.do("empty", calls)
            return float(program.do("empty", calls))

    with ExitStack() as stack:
        quiet = [name for name in (OURS, *LIBRARIES) if name != "mpi4py"]
        programs = {name: stack.enter_context(Contender(name, sizes)) for name in quiet}
        turns: dict[str, Callable[[], float]] = {
            name: partial(one.do, "empty", calls) for name, one in programs.items()
        }
        turns["mpi4py"] = partial(one_that_stays_awake, "mpi4py")
        found = in_turn(turns, rounds)
    question = "empty call of two processes"
    microseconds = 1e6 * found[OURS].median
    yield Figure(question, OURS, microseconds, "microseconds", EMPTY_MICROSECONDS)
    for name in LIBRARIES:
        yield compare(question, found[OURS], found[name], target=1.0)


def _products(rounds: int, sizes: Sizes) -> Comparison:
    found = _together("products", {OURS: OURS, "one process": "serial"}, rounds, sizes)
    question = f"products of {sizes.rows} rows of {sizes.units}, two workers of one thread"
    return compare(question, *found, target=1.85)


def _passed_rows(rounds: int, sizes: Sizes) -> Comparison:
    name = "multiprocessing.Pool"
    found = _together("passed rows", {OURS: OURS, f"{name}, pickled": name}, rounds, sizes)
    megabytes = 4e-6 * sizes.passed * sizes.columns
    question = f"sums of {megabytes:.0f} MB of shuffled rows, two workers"
    return compare(question, *found, target=5.0)


def _together(
    task: str, programs: Mapping[str, str], rounds: int, sizes: Sizes
) -> Iterable[Measured]:
    """Measure a task of several programs, of which the labels are the keys."""
    with ExitStack() as stack:
        started = {
            label: stack.enter_context(Contender(name, sizes)) for label, name in programs.items()
        }
        turns = {label: partial(one.do, task, REPEATS) for label, one in started.items()}
        return in_turn(turns, rounds).values()


def _steps(rounds: int, sizes: Sizes) -> Iterator[Comparison]:
    step = sizes.step
    ddp_sizes = ddp.Sizes(step.batch // WORKERS, step.crop, step.crop, step.classes, step.width)
    peers = {
        "train.py's trainers, exchange: gradients": 0.97,
        "one process of two threads": 0.95,
        **dict.fromkeys(ddp.TARGETS, 1.0),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ours = stack.enter_context(Contender("AlexNet, two workers", sizes))
        two = stack.enter_context(trainers.trainers_team(WORKERS, 1, step))
        one = stack.enter_context(trainers.trainers_team(1, WORKERS, step))
        ranks = stack.enter_context(ddp.ddp_team(Path(folder) / "store", ddp_sizes, REPEATS - 1))
        first, second, *variants = peers
        turns: dict[str, Callable[[], float]] = {
            OURS: partial(ours.do, "slices", REPEATS),
            first: partial(seconds_per_call, partial(two.do, "gradients"), REPEATS),
            second: partial(seconds_per_call, partial(one.do, "average"), REPEATS),
        }
        for name in variants:  # whose ranks make one step more than they count
            turns[name] = lambda name=name: seconds_per_call(lambda: ranks.do(name)) / REPEATS
        found = in_turn(turns, rounds)
    question = f"AlexNet's step, two workers, {step.batch} pictures of {step.crop} pixels in all"
    for name, target in peers.items():
        yield compare(question, found[OURS], found[name], target=target)


def _ablations(rounds: int, sizes: Sizes) -> Iterator[Comparison]:
    tasks = {
        "two workers": ("AlexNet, two workers", "slices"),
        "two workers, shuffled rows": ("AlexNet, two workers", "shuffled"),
        "two workers, no all-reduce": ("AlexNet, two workers", "without all-reduce"),
        "one worker": ("AlexNet, one worker", "slices"),
        "one worker, half the batch": ("AlexNet, one worker", "slices of half"),
    }
    with ExitStack() as stack:
        names = dict.fromkeys(name for name, _ in tasks.values())
        programs = {name: stack.enter_context(Contender(name, sizes)) for name in names}
        turns = {
            label: partial(programs[name].do, task, REPEATS)
            for label, (name, task) in tasks.items()
        }
        found = in_turn(turns, rounds)
    two, shuffled, alone, one, half = found.values()
    question = f"data-parallel AlexNet, pictures per second, batch {sizes.step.batch}"
    yield compare(question, two, one)  # fixed batch: each worker has half of it
    yield compare(question, two, half.scaled(WORKERS))  # scaled: each has what one had
    yield compare(question, shuffled, two)
    yield compare(question, alone, two)


def _times(rounds: int, sizes: Sizes) -> Iterator[Part]:
    """Yield the parts of each function's call, by the medians of rounds of one step."""
    with Contender("AlexNet, two workers", sizes) as ours:
        ours.do("slices")
        steps = [ours.do("times") for _ in range(rounds)]
    for function, parts in steps[0].items():
        medians = {
            part: statistics.median(step[function][part] for step in steps) for part in parts
        }
        for part, took in medians.items():
            yield Part(
                f"AlexNet's {function}, two workers", part, took, sum(medians.values()), 0, 1.0
            )


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=7, only=PARTS))
