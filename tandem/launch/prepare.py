"""What a run will do, resolved and checked before any process starts."""

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tandem.artifacts.checkpoint import CheckpointHeader, check_continues, read_header
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.reproducibility import check_exact, conditions
from tandem.artifacts.run_folder import CONFIGURATION, RECORD, find_checkpoint, list_checkpoints
from tandem.config.hardware import (
    RankInfo,
    available_cores,
    have_own_gpus,
    place_devices,
    resolve_devices,
    threads_of,
)
from tandem.config.schema import Config
from tandem.data.dataset import Dataset, open_split
from tandem.data.manifest import Manifest, read_manifest
from tandem.data.mean_image import read_mean
from tandem.errors import InputError
from tandem.layers.network import check_network
from tandem.training.run_spec import Job, RunSpec

log = logging.getLogger(__name__)


def prepare_run(
    config: Config,
    job: Job = "train",
    weights: Path | None = None,
    skipped: tuple[tuple[int, int], ...] = (),
    ranks: Sequence[RankInfo] = (),
) -> RunSpec:
    """Check everything that a run needs, and resolve every ``auto``.

    Nothing is written.

    Parameters
    ----------
    config : Config
        As the user gave it.
    job : "train" or "validate"
        What the run is to do.
    weights : Path, optional
        What to validate.
    skipped : tuple of (int, int), optional
        Minibatches to pass over, see `RunSpec`.
    ranks : sequence of RankInfo, optional
        Where each rank is, by rank, when the trainers are ranks that were started together.

    Raises
    ------
    InputError
        The first thing that is missing, damaged or does not fit.
    """
    _check_start(config, ranks)
    devices = place_devices(config.devices, ranks) if ranks else resolve_devices(config.devices)
    manifest = read_manifest(config.manifest_path)
    train, validation = _open_splits(config, manifest, job)
    if config.crop_size > manifest.image_size:
        raise InputError(
            f"crop_size is {config.crop_size}, but the pictures of {config.manifest_path} are "
            f"{manifest.image_size} pixels wide and high; choose a crop_size of at most that"
        )
    read_mean(config.mean_path, manifest.image_size)
    resumed = None
    if job == "train":
        resumed = _checkpoint_to_resume(config)
        weights = config.init_weights_path if resumed is None else None
        _check_run_folder(config, resumed)
    config = _resolved(config, devices, ranks)
    if config.collective == "nccl":
        _check_nccl(config, devices, ranks)
    if config.exchange == "shared" and devices[0] != "cpu":
        raise InputError(
            "exchange: shared is one copy of the weights in the host's memory, for trainers on "
            "cpu; on GPUs use average or gradients"
        )
    if config.precision == "tf32" and devices[0] == "cpu":
        raise InputError("precision: tf32 is a format of GPUs; on cpu use float32 or bfloat16")
    spec = RunSpec(
        job,
        config,
        manifest.wnids,
        devices,
        train,
        validation,
        conditions(config, ranks),
        resumed,
        weights,
        skipped,
    )
    _check_weights(spec)
    return spec


def _open_splits(config: Config, manifest: Manifest, job: Job) -> tuple[Dataset, Dataset]:
    folder, labels = config.data_path, config.label_path
    validation = open_split(manifest, folder, "val", labels, config.val_path)
    if job == "validate":
        return validation, validation
    return open_split(manifest, folder, "train", labels, config.train_path), validation


def _checkpoint_to_resume(config: Config) -> Path | None:
    if not config.resume_train:
        return None
    found = find_checkpoint(config.weights_path, config.load_epoch)
    if found is None:
        log.info(
            "%s: there is no checkpoint to resume from: the run begins at its start",
            config.weights_path,
        )
    return found


def _check_run_folder(config: Config, resumed: Path | None) -> None:
    """Refuse a folder that can't be written, or that holds what the run would overwrite."""
    folder = config.weights_path
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"weights_dir {folder}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"weights_dir {folder}: {existing} is not writable")
    if config.resume_train:
        _check_resumed_folder(config, resumed)
        return
    if checkpoints := list_checkpoints(folder):
        raise InputError(
            f"weights_dir {folder} holds a run already, up to {checkpoints[-1].name}: continue it "
            "with --resume_train true, or choose another folder"
        )
    if found := [name for name in (RECORD, CONFIGURATION) if (folder / name).exists()]:
        raise InputError(
            f"weights_dir {folder} holds {found[0]} of a run that left no checkpoint: begin it "
            "again with --resume_train true, remove it, or choose another folder"
        )


def _check_resumed_folder(config: Config, resumed: Path | None) -> None:
    folder = config.weights_path
    checkpoints = list_checkpoints(folder)
    # Those after the latest sound one are damaged; the run will set them aside.
    later = checkpoints[checkpoints.index(resumed) + 1 :] if resumed else []
    if resumed and later and config.load_epoch != "latest":
        raise InputError(
            f"weights_dir {folder}: {later[0].name} is later than {resumed.name}, from which "
            "the run is to continue; move all later ones away, or use --load_epoch latest"
        )
    if (folder / RECORD).exists():
        read_records(folder / RECORD)


def _check_weights(spec: RunSpec) -> None:
    """Refuse weights that don't fit the run."""
    path = spec.resumed or spec.weights
    if path is None:
        return
    header = read_header(path)
    if spec.resumed is not None:
        _check_same_network(spec, path, header)
        check_continues(path, header, spec.config, spec.global_batch, spec.train.size)
        if spec.config.exact and header.state.epoch < spec.config.n_epochs:
            check_exact(path, header.conditions, spec.conditions)
    elif spec.job == "validate":
        _check_same_network(spec, path, header)
    else:
        # Other shapes can be skipped, but filters of one variant mean nothing to another.
        _check_same(path, header.network.differences(spec.description, sizes=False))


def _check_same_network(spec: RunSpec, path: Path, header: CheckpointHeader) -> None:
    found = header.network
    check_network(path, found, spec.config.network)
    _check_same(path, found.differences(spec.description))
    if found.wnids is not None and found.wnids != spec.wnids:
        pairs = zip(found.wnids, spec.wnids, strict=True)
        number = next(i for i, pair in enumerate(pairs) if len(set(pair)) > 1)
        raise InputError(
            f"{path}: class {number} of this checkpoint is {found.wnids[number]}, of the pictures "
            f"{spec.wnids[number]}: it was trained on other classes"
        )


def _check_same(path: Path, differences: Iterable[tuple[str, Any, Any]]) -> None:
    for name, *values in differences:
        theirs, ours = (str(v).lower() if isinstance(v, bool) else v for v in values)
        raise InputError(
            f"{path}: this checkpoint is of a network with {name} {theirs}, "
            f"the configuration and the pictures ask for {name} {ours}"
        )


def _check_start(config: Config, ranks: Sequence[RankInfo]) -> None:
    """Refuse what can't be done as the trainers are started: as ranks, or by this program."""
    starter = ranks[0].starter if ranks else None
    if config.collective == "nccl" and starter != "torchrun":
        raise InputError(
            "collective: nccl is for trainers that torchrun starts: torchrun --standalone "
            "--nproc-per-node 4 train.py, or leave collective at auto"
        )
    if config.rule != "bsp" and starter != "mpirun":
        raise InputError(
            f"rule: {config.rule} is for trainers that are joined by MPI: start them with "
            "mpirun -n 4 python train.py, or use rule: bsp"
        )
    if starter is None:
        if config.collective != "auto":
            raise InputError(
                f"collective: {config.collective} is for trainers that are ranks: start them with "
                "mpirun -n 4 python train.py, or torchrun --standalone --nproc-per-node 4 "
                "train.py, or leave collective at auto"
            )
        if config.bucket_mb:
            raise InputError(
                f"bucket_mb: {config.bucket_mb:g} is for trainers that are ranks, see collective: "
                "start them with mpirun or torchrun, or set it to 0"
            )
        return
    if config.exchange == "shared":
        raise InputError(
            "exchange: shared is one copy of the weights for trainers that one machine starts; "
            "ranks have their own: use average or gradients"
        )
    if config.restarts:
        instead = {
            "mpirun": "let the job script start the run again, with --resume_train true",
            "torchrun": f"use torchrun --max-restarts {config.restarts}, with --resume_train true",
        }
        raise InputError(
            f"restarts: {config.restarts} can't be done under {starter}, which ends all ranks when "
            f"one fails: {instead[ranks[0].starter]}"
        )
    if len({place.software for place in ranks}) > 1:
        first = ranks[0].software
        rank = next(r for r, place in enumerate(ranks) if place.software != first)
        raise InputError(
            f"the ranks have different software: rank 0 {', '.join(first)}; rank {rank} "
            f"{', '.join(ranks[rank].software)}; use the same environment on every machine"
        )


def _check_nccl(config: Config, devices: tuple[str, ...], ranks: Sequence[RankInfo]) -> None:
    """Refuse what NCCL can't do."""
    if not have_own_gpus(devices, ranks):
        raise InputError(
            f"collective: nccl needs a GPU for each rank, and devices are {', '.join(devices)}: "
            "start as many ranks on a machine as it has GPUs, or use collective: asa"
        )


def _collective(config: Config, devices: tuple[str, ...], ranks: Sequence[RankInfo]) -> str:
    """What ``collective: auto`` stands for."""
    if not ranks or config.rule != "bsp":
        return "auto"
    has_nccl = have_own_gpus(devices, ranks) and ranks[0].starter == "torchrun"
    return "nccl" if has_nccl else "asa"


def _resolved(config: Config, devices: tuple[str, ...], ranks: Sequence[RankInfo]) -> Config:
    """The configuration without ``auto``."""
    on_gpu = devices[0] != "cpu"
    shared = max(1, len(available_cores()) // len(devices))
    found = {
        "threads": threads_of(ranks) if ranks else shared,
        "collective": _collective(config, devices, ranks),
        "compile": on_gpu and not config.bucket_mb,
        "use_data_layer": on_gpu,
    }
    wanted = {key: value for key, value in found.items() if getattr(config, key) == "auto"}
    return config.model_copy(update={"devices": devices, **wanted})
