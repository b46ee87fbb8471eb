"""Train AlexNet with several processes.

One trainer on the CPU:      tandem train --devices cpu
A few steps, as a trial:     tandem train --try
Two trainers, two loaders:   tandem train --devices cpu cpu
Another configuration:       tandem train --config mine.yaml --n_epochs 3
Another network:             tandem train --network my_module:MyNetwork
Continue a stopped run:      tandem train --resume_train
Eight ranks, over machines:  mpirun -n 8 tandem train
Eight ranks, without MPI:    torchrun --nproc-per-node 8 --no-python tandem train
All settings:                tandem train --help
"""

from collections.abc import Sequence

from tandem.artifacts.run_lock import locked
from tandem.config.command_line import load_trial_and_config
from tandem.launch.local import Launcher
from tandem.launch.programs import execute_training, run
from tandem.launch.trial import run_trial


def run_training(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Train with the settings of a command line, None the process's own; return the exit status."""

    def work(launcher: Launcher) -> int:
        is_trial, config = load_trial_and_config(arguments, description, program)
        if is_trial:
            return run_trial(config, launcher)
        with locked(config.weights_path) as lock:
            return execute_training(config, lock, launcher).status

    return run(work)
