"""Train AlexNet with several processes.

One trainer on the CPU:      python train.py --devices cpu
Two trainers, two loaders:   python train.py --devices cpu cpu
Another configuration:       python train.py --config demo/config.yaml --n_epochs 3
Another network:             python train.py --network examples.le_net:LeNet
Continue a stopped run:      python train.py --resume_train
Eight ranks, over machines:  mpirun -n 8 python train.py
Eight ranks, without MPI:    torchrun --standalone --nproc-per-node 8 train.py
All settings:                python train.py --help
"""

from collections.abc import Sequence

from tandem.launch.programs import run_training


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return the exit status."""
    return run_training(arguments, description=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
