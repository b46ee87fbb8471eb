"""Train as ranks on GPUs that are pretended: mpirun -n 3 python tests/pretend_train.py SETTINGS.

Each rank says at the end what it has left behind.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pretend_gpu

import proc_load
from tandem.run import devices, ranks
from tandem.run.main import run_training

GPUS = 3

shared: list[int] = []
"""How many pieces of memory a rank has shared with others by MPI, at each start of a trainer."""


def rank_site(*arguments: Any) -> Any:
    """Stands for `tandem.run.rank_site.rank_site`."""
    shared.append(Path("/proc/self/maps").read_text().count("/dev/shm/"))
    return pretend_gpu.rank_site(*arguments)


if __name__ == "__main__":
    devices.cuda_device_count = lambda: GPUS
    devices.missing_for_gpus = lambda: None
    devices._gpu_name = lambda number: "pretended"
    devices.gpu_identity = lambda number: f"GPU {number}"
    ranks.rank_site = rank_site
    status = run_training(sys.argv[1:], proc_load.serve, None)
    left = len(pretend_gpu.in_use), shared[-1] - shared[0]
    sys.stderr.write(f"left on GPUs: {left[0]}, shared: {left[1]}\n")
    raise SystemExit(status)
