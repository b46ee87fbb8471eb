"""What a run will do, resolved and checked before any process starts."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tandem.artifacts.checkpoint import CheckpointHeader, check_continues, read_header
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.reproducibility import Conditions, check_exact, conditions
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
from tandem.data.augment import Augmentation
from tandem.data.dataset import Dataset, open_split
from tandem.data.manifest import Manifest, read_manifest
from tandem.data.minibatch import MinibatchBuilder
from tandem.data.safe_io import read_npy
from tandem.errors import InputError
from tandem.layers.network import NetworkDescription, check_network

log = logging.getLogger(__name__)

Job = Literal["train", "validate"]


@dataclass(frozen=True)
class RunSpec:
    """A checked run. Small, and sent to every trainer when it starts.

    Attributes
    ----------
    job : "train" or "validate"
        Validation only, or all of it.
    config : Config
        As the user gave it, with every ``auto`` resolved.
    wnids : tuple of str
        The classes of the pictures, in order.
    devices : tuple of str
        One for each trainer, by rank.
    train, validation : Dataset
        The pictures; a validation reads the second only, and has it in both places.
    conditions : dict of str to str
        What else the bits depend on, see `tandem.artifacts.reproducibility`.
    resumed : Path or None
        The checkpoint that is continued.
    weights : Path or None
        Otherwise the checkpoint to start from, or to validate.
    skipped : tuple of (int, int)
        Epoch and global minibatch, from 0, of those to pass over, beside the checkpoint's own.
    """

    job: Job
    config: Config
    wnids: tuple[str, ...]
    devices: tuple[str, ...]
    train: Dataset
    validation: Dataset
    conditions: Conditions
    resumed: Path | None = None
    weights: Path | None = None
    skipped: tuple[tuple[int, int], ...] = ()

    @property
    def classes(self) -> int:
        """How many classes the pictures have."""
        return len(self.wnids)

    @property
    def description(self) -> NetworkDescription:
        """The network that is trained or validated."""
        config = self.config
        return NetworkDescription(
            config.crop_size,
            self.classes,
            config.width,
            self.wnids,
            config.norm_before_pool,
            config.network,
        )

    @property
    def trainers(self) -> int:
        """How many trainers."""
        return len(self.devices)

    @property
    def on_gpu(self) -> bool:
        """Whether the trainers work on GPUs."""
        return self.devices[0] != "cpu"

    @property
    def threads(self) -> int:
        """Threads of each trainer."""
        return int(self.config.threads)

    @property
    def device_crops(self) -> bool:
        """Whether slots hold whole pictures, which the device crops."""
        return bool(self.config.use_data_layer)

    @property
    def picture_size(self) -> int:
        """Rows and columns of the pictures in a slot."""
        return self.train.image_size if self.device_crops else self.config.crop_size

    @property
    def global_batch(self) -> int:
        """Pictures per step over all trainers."""
        return self.config.batch_size * self.trainers

    def filler(self) -> MinibatchBuilder:
        """What fills the slots, for a loader process or for a trainer that loads by itself."""
        config = self.config
        augmentation = Augmentation(
            crop_size=config.crop_size,
            rand_crop=config.rand_crop,
            rand_mirror=config.rand_mirror,
            batch_crop_mirror=config.batch_crop_mirror,
            seed=config.seed,
        )
        crop_here = not self.device_crops
        return MinibatchBuilder(self.train, self.validation, augmentation, crop_here)


def prepare_run(
    config: Config,
    job: Job = "train",
    weights: Path | None = None,
    skipped: tuple[tuple[int, int], ...] = (),
    places: Sequence[RankInfo] = (),
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
    places : sequence of RankInfo, optional
        Where each rank is, by rank, when the trainers are ranks that were started together.

    Raises
    ------
    InputError
        The first thing that is missing, damaged or does not fit.
    """
    _check_start(config, places)
    devices = place_devices(config.devices, places) if places else resolve_devices(config.devices)
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
    config = _resolved(config, devices, places)
    if config.collective == "nccl":
        _check_nccl(config, devices, places)
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
        conditions(config, places),
        resumed,
        weights,
        skipped,
    )
    _check_weights(spec)
    return spec


def read_mean(path: Path, image_size: int | None = None) -> np.ndarray:
    """Read the mean image.

    Parameters
    ----------
    path : Path
        The file.
    image_size : int, optional
        S, the side of the pictures that it is to be of; by default any.

    Returns
    -------
    float32 (3, S, S)
        (channel, row, column), RGB, 0 to 255.

    Raises
    ------
    InputError
        It is missing, or not an array of that shape.
    """

    def check(dtype: np.dtype, shape: tuple[int, ...]) -> None:
        side = image_size or shape[-1] if shape else None
        if shape != (3, side, side) or dtype.kind != "f":
            expected = "(3, S, S)" if image_size is None else f"(3, {side}, {side})"
            raise InputError(
                f"{path}: the mean image is {dtype} {shape}, the pictures need float32 {expected}"
            )

    try:
        mean = read_npy(path, check)
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no mean image; preprocessing writes it, and mean_file names it"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: this is not a mean image in .npy format: {error}") from error
    if not np.isfinite(mean).all():
        raise InputError(f"{path}: the mean image holds values that are not finite")
    return mean.astype(np.float32)


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
        # Other shapes can be skipped, but filters of the one network mean nothing to the other.
        theirs, ours = header.network.norm_before_pool, spec.config.norm_before_pool
        _check_same(path, "norm_before_pool", theirs, ours)


def _check_same_network(spec: RunSpec, path: Path, header: CheckpointHeader) -> None:
    found = header.network
    check_network(path, found, spec.config.network)
    for name in ("classes", "crop_size", "width", "norm_before_pool"):
        _check_same(path, name, getattr(found, name), getattr(spec.description, name))
    if found.wnids is not None and found.wnids != spec.wnids:
        pairs = zip(found.wnids, spec.wnids, strict=True)
        number = next(i for i, pair in enumerate(pairs) if len(set(pair)) > 1)
        raise InputError(
            f"{path}: class {number} of this checkpoint is {found.wnids[number]}, of the pictures "
            f"{spec.wnids[number]}: it was trained on other classes"
        )


def _check_same(path: Path, name: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        theirs, ours = (str(v).lower() if isinstance(v, bool) else v for v in (theirs, ours))
        raise InputError(
            f"{path}: this checkpoint is of a network with {name} {theirs}, "
            f"the configuration and the pictures ask for {name} {ours}"
        )


def _check_start(config: Config, places: Sequence[RankInfo]) -> None:
    """Refuse what can't be done as the trainers are started: as ranks, or by this program."""
    starter = places[0].starter if places else None
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
            f"one fails: {instead[places[0].starter]}"
        )
    if len({place.software for place in places}) > 1:
        first = places[0].software
        rank = next(r for r, place in enumerate(places) if place.software != first)
        raise InputError(
            f"the ranks have different software: rank 0 {', '.join(first)}; rank {rank} "
            f"{', '.join(places[rank].software)}; use the same environment on every machine"
        )


def _check_nccl(config: Config, devices: tuple[str, ...], places: Sequence[RankInfo]) -> None:
    """Refuse what NCCL can't do."""
    if not have_own_gpus(devices, places):
        raise InputError(
            f"collective: nccl needs a GPU for each rank, and devices are {', '.join(devices)}: "
            "start as many ranks on a machine as it has GPUs, or use collective: asa"
        )


def _collective(config: Config, devices: tuple[str, ...], places: Sequence[RankInfo]) -> str:
    """What ``collective: auto`` stands for."""
    if not places or config.rule != "bsp":
        return "auto"
    has_nccl = have_own_gpus(devices, places) and places[0].starter == "torchrun"
    return "nccl" if has_nccl else "asa"


def _resolved(config: Config, devices: tuple[str, ...], places: Sequence[RankInfo]) -> Config:
    """The configuration without ``auto``."""
    on_gpu = devices[0] != "cpu"
    shared = max(1, len(available_cores()) // len(devices))
    found = {
        "threads": threads_of(places) if places else shared,
        "collective": _collective(config, devices, places),
        "compile": on_gpu and not config.bucket_mb,
        "use_data_layer": on_gpu,
    }
    wanted = {key: value for key, value in found.items() if getattr(config, key) == "auto"}
    return config.model_copy(update={"devices": devices, **wanted})
