"""Train as ranks on GPUs that are pretended: mpirun -n 3 python tests/pretend_train.py SETTINGS."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pretend_gpu

import proc_load
from tandem.run import devices, ranks
from tandem.run.main import run_training

GPUS = 3

if __name__ == "__main__":
    devices.cuda_device_count = lambda: GPUS
    devices.missing_for_gpus = lambda: None
    devices._gpu_name = lambda number: "pretended"
    devices.gpu_identity = lambda number: f"GPU {number}"
    ranks.rank_site = pretend_gpu.rank_site
    status = run_training(sys.argv[1:], proc_load.serve, None)
    sys.stderr.write(f"left on GPUs: {len(pretend_gpu.in_use)}\n")
    raise SystemExit(status)
