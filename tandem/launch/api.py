"""Training and validation as functions, for scripts and notebooks::

    import tandem

    result = tandem.train("config.yaml", devices=["cpu", "cpu"], n_epochs=3)
    print(result.weights, result.record[-1].top1_error)

They start the same processes as the programs; a script needs no guard ``if __name__ ==
"__main__"``. Progress is logged to "tandem", whose lines ``logging.basicConfig(level="INFO")``
shows; on a terminal there is the live view as well.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.artifacts.metrics_log import Record, ValidationRecord, read_records
from tandem.artifacts.run_folder import RECORD, list_checkpoints
from tandem.artifacts.run_lock import locked
from tandem.cli import file_beside, to_path
from tandem.config.command_line import ANSWERS, DEFAULT_FILE, read_run_settings
from tandem.config.schema import Config
from tandem.distributed.ranks import is_rank
from tandem.errors import InputError, RunError
from tandem.launch.local import LocalLauncher
from tandem.launch.programs import execute_training, execute_validation
from tandem.processes.supervisor import Outcome
from tandem.validation import read_yaml, validated

Settings = Config | Mapping[str, Any] | str | os.PathLike[str]
"""Settings of a run: checked, by name, or the path of a YAML file."""


@dataclass(frozen=True)
class Result:
    """The results of a training run."""

    weights: Path  # its newest checkpoint
    record: tuple[Record, ...]  # of its whole training, also before it was resumed


def train(config: Settings | None = None, **overrides: Any) -> Result:
    """Train a network with several processes, as ``train.py`` does.

    Parameters
    ----------
    config : Config, mapping or path, optional
        The settings of ``config.yaml``, or such a file; those that are absent have their default.
    **overrides
        Single settings, which win over `config`, such as ``n_epochs=3``.

    Returns
    -------
    Result
        The newest checkpoint and all records of the run.

    Raises
    ------
    InputError
        A setting, a file or a device cannot be used; nothing has been started.
    RunError
        The run has failed.
    KeyboardInterrupt
        After Ctrl-C; a checkpoint was written first. After SIGTERM or SIGHUP, `SystemExit` with
        status 143 or 129. None is noticed where a thread other than the main one calls.
    """
    settings = checked(config, overrides)
    with locked(settings.weights_path) as lock:
        outcome = execute_training(settings, lock, _launcher(), way_on="resume_train=True")
        raise_failure(outcome)
    folder = settings.weights_path
    return Result(list_checkpoints(folder)[-1], tuple(read_records(folder / RECORD)))


def validate(
    weights: str | os.PathLike[str],
    config: Settings | None = None,
    *,
    ten_crops: bool = False,
    **overrides: Any,
) -> ValidationRecord:
    """Loss, top-1 and top-5 error of saved weights over every validation picture.

    Parameters and exceptions are those of `train`; `weights` is a checkpoint. Without `config` the
    settings are those in the ``config.yaml`` beside it, as for ``validate.py``. With `ten_crops`
    the probabilities of ten crops of each picture are averaged.
    """
    source = file_beside(weights, DEFAULT_FILE.name) if config is None else None
    settings = checked(config if source is None else read_run_settings(source), overrides, source)
    outcome, record = execute_validation(
        Path(to_path(os.fspath(weights))), settings, _launcher(), ten_crops
    )
    raise_failure(outcome)
    if record is None:
        raise RunError("the validation has ended without a result")
    return record


def checked(
    config: Settings | None, overrides: Mapping[str, Any], source: Path | None = None
) -> Config:
    """Read and check settings; `source` is the file that a mapping is from.

    Raises InputError if one cannot be used.
    """
    if isinstance(config, str | os.PathLike):
        source = Path(config)
    values = given_values(config, overrides)
    return validated(Config, values, {key: key for key in overrides}, source or "", ANSWERS)


def given_values(config: Settings | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of settings, of which `overrides` win."""
    if isinstance(config, str | os.PathLike):
        values = read_yaml(Path(config))
    else:
        values = config.model_dump() if isinstance(config, Config) else dict(config or {})
    return {
        key: os.fspath(value) if isinstance(value, os.PathLike) else value
        for key, value in {**values, **overrides}.items()
    }


def _launcher() -> LocalLauncher:
    if is_rank():
        raise InputError(
            "this process was started as one of several ranks, and train and validate start "
            "processes of their own; under mpirun, srun or torchrun use `tandem train`"
        )
    return LocalLauncher()


def raise_failure(outcome: Outcome) -> None:
    """Raise what a run that was not completed ended with, see `train`."""
    failure = outcome.failure
    if failure is not None:
        if failure.kind == "input":
            raise InputError(failure.message)
        error = RunError(f"{failure.who}: {failure.message}")
        if failure.traceback:
            error.add_note(failure.traceback.rstrip())
        raise error
    if outcome.status == 130:
        raise KeyboardInterrupt
    if outcome.status:
        raise SystemExit(outcome.status)
