"""Train as ranks on GPUs that are simulated.

mpirun -n 3 python tests/support/simulated_train.py SETTINGS.

Each rank reports at the end what it has left behind.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tandem.backend import capture
from tandem.config import hardware
from tandem.launch import ranks
from tandem.launch.train import run_training
from tandem.training import functions
from tests.support import simulated_gpu
from tests.support.tiny import open_files

GPUS = 3

shared: list[int] = []
"""Segments of memory that a rank shares with others by MPI, at each start of a trainer."""

files: list[int] = []
"""Open files, pipes and sockets of a rank, at each start of a trainer."""


segments: set[int] = set()
"""Numbers of segments of the functions that a rank has recorded."""


def record(recorded: Any, *arguments: Any, **options: Any) -> Any:
    """Replace `tandem.training.functions.capture`."""
    segments.update(len(getattr(f.vm.jit_fn, "segments", "1")) for f in recorded)
    return capture(recorded, *arguments, **options)


def make_slots(*arguments: Any) -> Any:
    """Replace `tandem.training.memory.make_slots`."""
    names = re.findall(r"/dev/shm/(\S+)", Path("/proc/self/maps").read_text())
    # A library's semaphore is made once for each process.
    shared.append(sum(not name.startswith("sem.") for name in names))
    files.append(open_files())
    return simulated_gpu.make_slots(*arguments)


if __name__ == "__main__":
    hardware.cuda_device_count = lambda: GPUS
    hardware.missing_for_gpus = lambda: None
    hardware._gpu_name = lambda number: "simulated"
    hardware.has_bfloat16 = lambda number: False
    hardware.gpu_identity = lambda number: f"GPU {number}"
    ranks.make_slots = make_slots
    functions.capture = record
    status = run_training(sys.argv[1:], None)
    left = len(simulated_gpu.in_use), shared[-1] - shared[0]
    sys.stderr.write(f"left on GPUs: {left[0]}, shared: {left[1]}\n")
    sys.stderr.write(f"segments recorded: {sorted(segments)}\n")
    # The first child process starts one that stays, to which there is a pipe.
    sys.stderr.write(f"files of {len(files)} runs: {files[1:2]} then {files[-1:]}\n")
    raise SystemExit(status)
