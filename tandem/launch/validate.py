"""Loss, top-1 and top-5 error of saved weights over every validation picture.

tandem validate --weights runs/alexnet/epoch-0060.safetensors
tandem validate --weights runs/a/epoch-0016.safetensors --config runs/a/config.yaml
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
        weights, config = load_weights_and_config(arguments, description, program)
        outcome, record = execute_validation(weights, config, launcher)
        if record is not None and outcome.status == 0:
            log.info("%s", describe_validation(record))
            sys.stdout.write(to_json(record) + "\n")
        return outcome.status

    return run(work)
