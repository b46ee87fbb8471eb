"""Loss, top-1 and top-5 error of saved weights over every validation picture.

As the run was configured:  tandem validate --weights runs/demo/epoch-0016.safetensors
Another configuration:      tandem validate --weights FILE --config demo/config.yaml
By the paper's ten crops:   tandem validate --weights FILE --ten_crops
On chosen devices:          tandem validate --weights FILE --devices cuda:1
A page of what is wrong:    tandem validate --weights FILE --report DIR
The newest of a run:        tandem validate --weights runs/demo

The settings are those that the run saved in the config.yaml beside the weights; devices, threads
and all else that depends on the machine are chosen anew. Without one, such as beside converted
weights, they are those of the config.yaml in the current folder.
"""

import logging
import sys
from collections.abc import Sequence

from tandem.artifacts.metrics_log import to_json
from tandem.config.command_line import load_weights_and_config
from tandem.launch.console import describe_validation
from tandem.launch.local import Launcher
from tandem.launch.programs import execute_validation, run

log = logging.getLogger(__name__)


def run_validation(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Validate one checkpoint and print its loss and errors; return the exit status."""

    def work(launcher: Launcher) -> int:
        weights, ten_crops, report, config = load_weights_and_config(
            arguments, description, program
        )
        if ten_crops and not config.rand_mirror:
            log.warning("five of the ten crops are mirrored, as none was in training (rand_mirror)")
        outcome, record = execute_validation(weights, config, launcher, ten_crops, report)
        if record is not None and outcome.status == 0:
            log.info("%s", describe_validation(record))
            sys.stdout.write(to_json(record) + "\n")
        return outcome.status

    return run(work)
