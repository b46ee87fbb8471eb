"""A process of a small traced run: python -m tests.support.traced_process KIND RANK FOLDER

A loader writes a line for each step, which its trainer reads.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tandem.trace.merge import trace_file
from tandem.trace.recorder import Recorder

STEPS = 5
OP = {"op": "Conv2d", "layer": "conv1", "phase": "forward", "kind": "convolution"}
OP |= {"shape": [4, 8, 5, 5], "flops": 7200, "bytes": 3400}


def work(kind: str, rank: int, folder: Path) -> None:
    """Make the steps of a trainer or loader, of some milliseconds each."""
    path = folder / trace_file(rank, kind == "loader")
    number = 2 * rank + (kind == "loader")
    recorder = Recorder(f"{kind} {rank}", number, path, (1, STEPS), {"trainers": 2})
    make_step = fill if kind == "loader" else train
    with ThreadPoolExecutor(1, "buckets") as pool:
        for _ in range(STEPS):
            recorder.begin_step()
            make_step(recorder, pool)
            recorder.end_step()


def fill(recorder: Recorder, _: ThreadPoolExecutor) -> None:
    """Fill a minibatch."""
    begin_flow = partial(recorder.flow, recorder.step, begins=True)
    recorder.wrap(partial(time.sleep, 0.002), "fill", within=begin_flow)()
    sys.stdout.write("filled\n")
    sys.stdout.flush()


def train(recorder: Recorder, pool: ThreadPoolExecutor) -> None:
    """Make a step, of which another thread does a part."""
    line = recorder.wrap(partial(time.sleep, 0.002), "Conv2d", OP)
    average = recorder.wrap(partial(time.sleep, 0.002), "average", {"bucket": 0})

    def gradients() -> None:
        line()
        averaged = pool.submit(average)
        line()
        averaged.result()

    def step() -> None:
        recorder.wrap(sys.stdin.readline, "wait")()
        end_flow = partial(recorder.flow, recorder.step, begins=False)
        recorder.wrap(gradients, "gradients", within=end_flow)()

    recorder.wrap(step, "step")()
    recorder.count("memory", {"resident": 1e9 + recorder.step})


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
