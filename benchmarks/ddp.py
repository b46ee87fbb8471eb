"""Is `train.py` with two trainers as fast as PyTorch's DistributedDataParallel over gloo?

    python -m benchmarks.ddp

Both have two processes of one thread, 32 pictures of 227 pixels each, and the whole network. Ours
is the program as users start it: loaders read, crop and mirror pictures from batch files. DDP's
minibatches are in memory, already cropped and converted. All processes stay alive, six of them with
a network, and those that are not measured stand still.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from benchmarks.measure import Comparison, Step, compare, in_turn, run, seconds_per_call
from benchmarks.pictures import write_data_folder
from benchmarks.team import Team, gloo_ranks, program, serve
from tandem.errors import InputError

# torch is imported in the processes that are measured.

PROGRAM = Path(__file__).parents[1] / "train.py"
PROCESSES = 2
EXCHANGES = ("average", "gradients")
TARGETS = {"DDP, eager": 1.5, "DDP, channels-last, fused SGD": 1.3}  # of `exchange: average`
RATE = 1e-4
PATIENCE = 300.0  # seconds for a step, the start of a run included
POLL_SECONDS = 0.005
_STEP = b'"event": "train"'


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step: pictures of one process, cropped and stored side, classes, network width."""

    batch: int = 32
    crop: int = 227
    stored: int = 256
    classes: int = 1000
    width: float = 1.0


class TrainingRun:
    """A program that makes steps when asked, and is stopped by a signal otherwise.

    It ends with the context.

    Parameters
    ----------
    command : sequence of str
        The program, whose run folder is ``run`` in `folder`. A step is a line of training in its
        record.
    folder : Path
        A new folder.

    Attributes
    ----------
    group : int
        Process group of the run.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        folder.mkdir()
        self._errors, self._record = folder / "errors.txt", folder / "run" / "record.jsonl"
        self._ending = ExitStack()
        with self._errors.open("w") as errors:
            self._process = self._ending.enter_context(program(command, errors))
        self.group = self._process.pid

    def seconds_per_step(self, steps: int) -> float:
        """Continue, make a step that does not count, then these; stop, and return their time."""
        os.killpg(self.group, signal.SIGCONT)
        first, begun = self._wait(self._steps() + 1)
        last, ended = self._wait(first + steps)
        os.killpg(self.group, signal.SIGSTOP)
        return (ended - begun) / (last - first)

    def _wait(self, steps: int) -> tuple[int, float]:
        """Wait until at least `steps` steps are recorded; return their number and the time."""
        deadline = time.perf_counter() + PATIENCE
        while (done := self._steps()) < steps:
            if self._process.poll() is not None or time.perf_counter() > deadline:
                raise InputError(f"the program made no step {steps}:\n{self._errors.read_text()}")
            time.sleep(POLL_SECONDS)
        return done, time.perf_counter()

    def _steps(self) -> int:
        return self._record.read_bytes().count(_STEP) if self._record.exists() else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.close()


def answer(rounds: int, sizes: Sizes = Sizes(), steps: int = 3) -> Iterator[Comparison]:
    """Let each make `steps` steps in turn, after one that does not count; compare."""
    ours = [f"train.py, exchange: {exchange}" for exchange in EXCHANGES]
    turns: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        made = (rounds + 1) * (steps + 1) + 2  # in the first epoch, before any validation
        pictures = made * PROCESSES * sizes.batch
        data = write_data_folder(folder / "data", pictures, sizes.stored, sizes.classes)
        team = stack.enter_context(ddp_team(folder / "store", sizes, steps))
        for label, exchange in zip(ours, EXCHANGES, strict=True):
            program = training_run(data, folder / exchange, settings(sizes, exchange))
            stack.enter_context(program).seconds_per_step(1)
            turns[label] = partial(program.seconds_per_step, steps)
        for label in TARGETS:
            turns[label] = partial(team.slowest, label)
        found = in_turn(turns, rounds)
    question = f"two processes of one thread, {sizes.batch} pictures of {sizes.crop} pixels each"
    for label in ours:
        for peer, target in TARGETS.items():
            wanted = target if label == ours[0] else None
            yield compare(question, found[label], found[peer], "speed", wanted)


def training_run(data: Path, folder: Path, settings: Sequence[str]) -> TrainingRun:
    """A run of `train.py` on a data folder, with further settings of the command line."""
    command = [sys.executable, str(PROGRAM), "--data_folder", str(data)]
    command += ["--weights_dir", str(folder / "run"), *settings]
    command += ["--print_freq", "1", "--tensorboard", "false", "--snapshot_minutes", "0"]
    command += ["--peer_timeout_seconds", "86400"]  # trainers that are stopped give no sign
    return TrainingRun(command, folder)


def settings(sizes: Sizes, exchange: str) -> list[str]:
    """Return a run's settings for the command line."""
    words = f"--devices {'cpu ' * PROCESSES}--threads 1 --exchange {exchange}"
    words += f" --batch_size {sizes.batch} --crop_size {sizes.crop} --width {sizes.width}"
    words += f" --learning_rate {RATE}"  # which leaves the loss of noise finite
    return words.split()


def ddp_team(store: Path, sizes: Sizes, steps: int) -> Team:
    """Ranks of DistributedDataParallel, which find each other by a file."""
    return Team(ddp_rank, [(rank, store, sizes, steps) for rank in range(PROCESSES)])


def ddp_rank(rank: int, store: Path, sizes: Sizes, steps: int, pipe: Connection) -> None:
    """Serve as the process of one rank; a task's reply is the seconds of a step."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from alex_net import AlexNet
    from benchmarks.plain_alexnet import ddp_step

    torch.set_num_threads(1)
    net = AlexNet(sizes.crop, sizes.classes, sizes.width)

    def seconds(step: Step) -> float:
        step()
        return seconds_per_call(step, steps)

    with gloo_ranks(store, rank, PROCESSES):
        variants = (ddp_step(net, sizes.batch, tuned) for tuned in (False, True))
        serve(pipe, {n: partial(seconds, s) for n, s in zip(TARGETS, variants, strict=True)})


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=7))
